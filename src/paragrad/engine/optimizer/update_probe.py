"""How an optimizer updates, tried on a small copy: element by element, tensor by tensor, or
neither, and whether from copies of the weights; its draws.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as of_torch

from paragrad.engine.optimizer.modes import has_modes, set_optimizer_mode
from paragrad.runtime.generators import (
    fingerprint_generators,
    keep_generators,
    use_seeded_generators,
)
from paragrad.strategies.strategy import PER_ELEMENT, PER_TENSOR, WHOLE_MODEL

# a dimension of the copy at most; above 128, from which known optimizers factor a matrix
TRIAL_SIZE = 160
# the same for classes known to treat every element alike, which are tried all the same, for one
# step
SHORT_TRIAL_SIZE = 8
# of the gradients of each step: so that clipping inside of an optimizer shows
GRADIENT_SCALES = (1.0, 1e3, 1e-3, 1.0, 1.0, 1.0, 1.0)
# steps: some optimizers write what they keep into the parameters every few steps alone
COPY_TRIAL_STEPS = 12
# of a move by somebody else, after one more step: more where weight decay alone has shrunk it
REMAINING_SHARE = 0.85
TensorGroups = list[list[Tensor]]


@dataclass
class TrialParameter:
    """A small parameter, and what the optimizer knows of it before the first step."""

    values: Tensor
    state: dict[str, Any]

    def slice_piece(self, which: int) -> TrialParameter:
        """The first third of the elements, or the rest, as a flat piece."""
        state = {
            what: _slice_piece(value, which) if isinstance(value, Tensor) and value.dim() else value
            for what, value in self.state.items()
        }
        return TrialParameter(_slice_piece(self.values, which), state)


def find_update_granularity(
    optimizer: torch.optim.Optimizer, known_elementwise: bool = False
) -> str:
    """ELEMENT: any piece of a parameter will do;  TENSOR: each parameter by itself;  ALL:
    neither, or it cannot be tried.

    Hooks and a step that was put on the object may hold the real parameters, so nothing is
    tried with them. What is drawn follows the order of all parameters. known: of a class that
    is known to go element by element, so that a brief trial will do.
    """
    if find_step_hook(optimizer):
        return WHOLE_MODEL
    generator = torch.Generator().manual_seed(0)
    size = SHORT_TRIAL_SIZE if known_elementwise else TRIAL_SIZE
    scales = GRADIENT_SCALES[:1] if known_elementwise else GRADIENT_SCALES

    def drawn(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    with keep_generators():
        before = fingerprint_generators()
        groups = [
            [
                TrialParameter(
                    drawn(_copy_corner_float64(parameter, size).shape),
                    {
                        what: _copy_corner_float64(value, size)
                        for what, value in optimizer.state.get(parameter, {}).items()
                    },
                )
                for parameter in _choose_largest(group["params"], 1 if known_elementwise else 2)
            ]
            for group in optimizer.param_groups
        ]
        gradients = [
            [[scale * drawn(each.values.shape) for each in group] for group in groups]
            for scale in scales
        ]
        for kind, tried in ((PER_ELEMENT, _is_elementwise), (PER_TENSOR, _is_tensorwise)):
            try:
                if tried(optimizer, groups, gradients):
                    return WHOLE_MODEL if fingerprint_generators() != before else kind
            # of a foreign step on what it was not made for: then it is not so
            except Exception:
                continue
    return WHOLE_MODEL


def has_weight_copies(optimizer: torch.optim.Optimizer) -> bool:
    """Does it go on from copies of the weights that it keeps (in float32 beside coarser ones,
    slow ones), so that what somebody else writes into the parameters is lost? False where it
    cannot be tried, and of one with modes.

    Two copies of it make the same steps, and the parameters of one are moved after the first:
    the move stays.
    """
    if find_step_hook(optimizer) or has_modes(optimizer):
        return False
    generator = torch.Generator().manual_seed(0)

    def drawn(like: Tensor) -> Tensor:
        found = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        return (found + found.sign()).to(like.dtype)  # none near 0

    # of a foreign step on what it was not made for
    with keep_generators(), suppress(Exception):
        groups = [
            [
                TrialParameter(
                    _copy_corner(parameter.detach(), SHORT_TRIAL_SIZE),
                    {
                        what: _copy_corner(value, SHORT_TRIAL_SIZE)
                        for what, value in optimizer.state.get(parameter, {}).items()
                    },
                )
                for parameter in _choose_largest(group["params"], 2)
            ]
            for group in optimizer.param_groups
        ]
        moves = [drawn(each.values) for each in _flatten_groups(groups)]
        (stayed, one), (moved, other) = (
            _start_trial(optimizer, groups),
            _start_trial(optimizer, groups),
        )
        left = [1.0 for _ in moves]
        for step in range(COPY_TRIAL_STEPS):
            gradients = [[drawn(each.values) for each in group] for group in groups]
            _run_trial_step(one, stayed, gradients)
            _run_trial_step(other, moved, gradients)
            for parameter, move in (
                zip(_flatten_groups(moved), moves, strict=True) if not step else ()
            ):
                parameter.detach().add_(move)
            before = left
            left = [
                _measure_remaining_share(*each)
                for each in zip(_flatten_groups(stayed), _flatten_groups(moved), moves, strict=True)
            ]
            if any(now < REMAINING_SHARE * then for now, then in zip(left, before, strict=True)):
                return True
    return False


def _measure_remaining_share(stayed: Tensor, moved: Tensor, move: Tensor) -> float:
    """How much of a move is left."""
    apart, whole = (
        each.detach().to(torch.complex128).reshape(-1) for each in (moved - stayed, move)
    )
    return (
        float((torch.vdot(whole, apart) / torch.vdot(whole, whole)).real) if move.numel() else 1.0
    )


def find_step_hook(optimizer: torch.optim.Optimizer) -> str | None:
    """What runs in a step besides the class's own, or None. A learning rate scheduler's
    counting around it is nothing. Of one that was never initialised as an Optimizer (a wrapper
    with the groups of another), nobody knows.
    """
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return "a step of its own around another optimizer's"
    for hooks in (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        of_torch._global_optimizer_pre_hooks,
        of_torch._global_optimizer_post_hooks,
    ):
        for hook in hooks.values():
            return f"the hook {getattr(hook, '__name__', type(hook).__name__)}"
    step = vars(optimizer).get("step")
    counted = (
        getattr(step, "_wrapped_by_lr_sched", False)
        and getattr(step, "__wrapped__", None) is type(optimizer).step
    )
    return "a step that was put on the object" if step is not None and not counted else None


def _choose_largest(parameters: list[Tensor], count: int) -> list[Tensor]:
    """Of each number of dimensions the largest parameters, so many."""
    found: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
        if len(found[parameter.dim()]) < count:
            found[parameter.dim()].append(parameter)
    return [parameter for each in found.values() for parameter in each]


def _copy_corner(value: Any, size: int) -> Any:
    """The corner of a tensor; anything else as it is."""
    if not isinstance(value, Tensor) or not value.dim():
        return copy.deepcopy(value)
    return value.detach()[tuple(slice(size) for _ in value.shape)].cpu().clone()


def _copy_corner_float64(value: Any, size: int) -> Any:
    """The same, in float64."""
    corner = _copy_corner(value, size)
    return (
        corner.double()
        if isinstance(corner, Tensor) and corner.dim() and corner.is_floating_point()
        else corner
    )


def _is_elementwise(
    optimizer: torch.optim.Optimizer,
    groups: list[list[TrialParameter]],
    gradients: list[TensorGroups],
) -> bool:
    """Whole parameters against pieces of them, held by two optimizers; a third one holds
    nothing.
    """
    whole = _run_trial(optimizer, groups, gradients)
    _run_trial(optimizer, [[] for _ in groups], [[[] for _ in groups] for _ in gradients])
    for which in (0, 1):
        pieces = [[each.slice_piece(which) for each in group] for group in groups]
        part = _run_trial(
            optimizer,
            pieces,
            [
                [[_slice_piece(each, which) for each in group] for group in step]
                for step in gradients
            ],
            are_pieces=True,
        )
        if not all(
            _is_equal_update(_slice_piece(wanted, which), found, began.values)
            for wanted, found, began in zip(
                _flatten_groups(whole), _flatten_groups(part), _flatten_groups(pieces), strict=True
            )
        ):
            return False
    return True


def _is_tensorwise(
    optimizer: torch.optim.Optimizer,
    groups: list[list[TrialParameter]],
    gradients: list[TensorGroups],
) -> bool:
    """All together against optimizers that hold all parameters, where every other one has a
    gradient; the rest must stay.
    """
    whole = _flatten_groups(_run_trial(optimizer, groups, gradients))
    for which in (0, 1):
        few: Any = [
            [
                [each if place % 2 == which else None for place, each in enumerate(group)]
                for group in step
            ]
            for step in gradients
        ]
        mine = [place % 2 == which for group in groups for place in range(len(group))]
        part = _flatten_groups(_run_trial(optimizer, groups, few))
        for own, wanted, found, began in zip(
            mine, whole, part, _flatten_groups(groups), strict=True
        ):
            if not (
                _is_equal_update(wanted, found, began.values)
                if own
                else torch.equal(found, began.values)
            ):
                return False
    return True


def _flatten_groups(groups: list[list[Any]]) -> list[Any]:
    return [each for group in groups for each in group]


def _slice_piece(tensor: Tensor, which: int) -> Tensor:
    flat = tensor.reshape(-1)
    cut = -(-len(flat) // 3)
    return flat[cut:] if which else flat[:cut]


def _is_equal_update(expected: Tensor, actual: Tensor, initial: Tensor) -> bool:
    """Did both arrive at the same, up to rounding, and not where they began?"""
    if not expected.numel():
        return True
    moved = float((expected - initial).abs().max())
    bound = 1e-9 * moved + 8 * torch.finfo(torch.float64).eps * float(expected.abs().max())
    return moved > 0 and float((expected - actual).abs().max()) <= bound


def _run_trial(
    optimizer: torch.optim.Optimizer,
    groups: list[list[TrialParameter]],
    gradients: list[TensorGroups],
    are_pieces: bool = False,
) -> TensorGroups:
    """The parameters after some steps of a copy of the optimizer, in eval mode where it has
    modes.
    """
    held, twin = _start_trial(optimizer, groups, are_pieces)
    for step in gradients:
        _run_trial_step(twin, held, step)
    if are_pieces and any(
        value.dim() and value.shape != parameter.shape
        for parameter, state in twin.state.items()
        for value in state.values()
        if isinstance(value, Tensor)
    ):
        raise ValueError(
            "state of another shape than the piece, which could not be put together again"
        )
    return [[parameter.detach() for parameter in group] for group in held]


def _start_trial(
    optimizer: torch.optim.Optimizer, groups: list[list[TrialParameter]], are_pieces: bool = False
) -> tuple[Any, torch.optim.Optimizer]:
    """(small parameters, a copy of the optimizer over them), before its first step."""
    held: Any = [
        [each.values.clone() if are_pieces else nn.Parameter(each.values.clone()) for each in group]
        for group in groups
    ]
    twin = _copy_optimizer(optimizer, held)
    for parameter, known in zip(_flatten_groups(held), _flatten_groups(groups), strict=True):
        if known.state:
            twin.state[parameter] = copy.deepcopy(known.state)
    return held, twin


def _run_trial_step(
    trial_optimizer: torch.optim.Optimizer, parameters: Any, gradients: TensorGroups
) -> None:
    """In eval mode afterwards, where it has modes."""
    set_optimizer_mode(trial_optimizer, "train")
    for parameter, gradient in zip(
        _flatten_groups(parameters), _flatten_groups(gradients), strict=True
    ):
        parameter.grad = None if gradient is None else gradient.clone()
    trial_optimizer.step()
    set_optimizer_mode(trial_optimizer, "eval")


def _copy_optimizer(
    optimizer: torch.optim.Optimizer, parameter_groups: TensorGroups
) -> torch.optim.Optimizer:
    """The same class, attributes and hyper-parameters over other parameters; Optimizer's own
    copy forgets the attributes.
    """
    memo: dict[int, Any] = _RefusingMemo(
        {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    )
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    vars(twin).update(
        copy.deepcopy(
            {
                name: value
                for name, value in vars(optimizer).items()
                if name not in ("state", "param_groups", "step")
                and not name.startswith("_optimizer_")
            },
            memo,
        )
    )
    torch.optim.Optimizer.__setstate__(twin, {"state": defaultdict(dict), "param_groups": []})
    for group, parameters in zip(optimizer.param_groups, parameter_groups, strict=True):
        settings = copy.deepcopy(
            {name: value for name, value in group.items() if name != "params"}, memo
        )
        # a warm-up begins with 0, which would show nothing
        if not settings.get("lr", 1.0):
            settings["lr"] = settings["lr"] + 0.01
        twin.param_groups.append({**settings, "params": parameters})
    return twin


class _RefusingMemo(dict[int, Any]):
    """deepcopy's memory of what was copied, which lets no real parameter be copied along."""

    def __init__(self, refused_ids: set[int]) -> None:
        super().__init__()
        self.refused_ids = refused_ids

    def get(self, key: int, default: Any = None) -> Any:
        if key in self.refused_ids:
            raise ValueError("the optimizer keeps its parameters outside of its groups")
        return super().get(key, default)


class ReplicatedDraws:
    """Calls that every rank makes by itself, such as an optimizer's step, and that shall draw
    the same random numbers on all ranks, and as on one worker: the generators begin as (seed,
    step) says. Where the first call of a name draws nothing, the later ones cost nothing.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.cuda_generator = (
            torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
        )
        self.has_draws: dict[str, bool] = {}

    def __call__(self, name: str, step: int, function: Callable[[], Any]) -> None:
        if not self.has_draws.get(name, True):
            function()
            return
        with use_seeded_generators(f"{name} {self.seed} {step}"), self._seed_cuda_generator():
            before = self._read_generator_states()
            function()
            self.has_draws.setdefault(name, self._read_generator_states() != before)

    @contextmanager
    def _seed_cuda_generator(self) -> Iterator[None]:
        """The device's own generator, as torch's on the CPU; afterwards as it was."""
        kept = self.cuda_generator and self.cuda_generator.get_state()
        if self.cuda_generator is not None:
            self.cuda_generator.manual_seed(torch.default_generator.initial_seed())
        try:
            yield
        finally:
            if self.cuda_generator is not None:
                self.cuda_generator.set_state(kept)

    def _read_generator_states(self) -> Any:
        return (
            fingerprint_generators(),
            self.cuda_generator and self.cuda_generator.get_state().numpy().tobytes(),
        )


def compute_clip_factor(norm: float, max_norm: float | None) -> float:
    """What gradients of that norm are multiplied by, as torch.nn.utils.clip_grad_norm_ does
    (None: not at all).
    """
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
