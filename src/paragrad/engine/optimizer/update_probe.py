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

from paragrad.engine.optimizer.modes import has_modes, set_mode
from paragrad.runtime.generators import generator_states, generators_kept, generators_seeded
from paragrad.strategies.strategy import ALL, ELEMENT, TENSOR

# a dimension of the copy at most; above 128, from which known optimizers factor a matrix
SIZE = 160
# the same for classes known to treat every element alike, which are tried all the same, for one
# step
FEW = 8
# of the gradients of each step: so that clipping inside of an optimizer shows
SCALES = (1.0, 1e3, 1e-3, 1.0, 1.0, 1.0, 1.0)
# steps: some optimizers write what they keep into the parameters every few steps alone
LATER = 12
# of a move by somebody else, after one more step: more where weight decay alone has shrunk it
LEFT = 0.85
Groups = list[list[Tensor]]


@dataclass
class Small:
    """A small parameter, and what the optimizer knows of it before the first step."""

    values: Tensor
    state: dict[str, Any]

    def half(self, which: int) -> Small:
        """The first third of the elements, or the rest, as a flat piece."""
        state = {
            what: _half(value, which) if isinstance(value, Tensor) and value.dim() else value
            for what, value in self.state.items()
        }
        return Small(_half(self.values, which), state)


def updates_by(optimizer: torch.optim.Optimizer, known: bool = False) -> str:
    """ELEMENT: any piece of a parameter will do;  TENSOR: each parameter by itself;  ALL:
    neither, or it cannot be tried.

    Hooks and a step that was put on the object may hold the real parameters, so nothing is
    tried with them. What is drawn follows the order of all parameters. known: of a class that
    is known to go element by element, so that a brief trial will do.
    """
    if hooked(optimizer):
        return ALL
    generator = torch.Generator().manual_seed(0)
    size = FEW if known else SIZE
    scales = SCALES[:1] if known else SCALES

    def drawn(shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    with generators_kept():
        before = generator_states()
        groups = [
            [
                Small(
                    drawn(_small(parameter, size).shape),
                    {
                        what: _small(value, size)
                        for what, value in optimizer.state.get(parameter, {}).items()
                    },
                )
                for parameter in _chosen(group["params"], 1 if known else 2)
            ]
            for group in optimizer.param_groups
        ]
        gradients = [
            [[scale * drawn(each.values.shape) for each in group] for group in groups]
            for scale in scales
        ]
        for kind, tried in ((ELEMENT, _by_element), (TENSOR, _by_tensor)):
            try:
                if tried(optimizer, groups, gradients):
                    return ALL if generator_states() != before else kind
            # of a foreign step on what it was not made for: then it is not so
            except Exception:
                continue
    return ALL


def keeps_copies(optimizer: torch.optim.Optimizer) -> bool:
    """Does it go on from copies of the weights that it keeps (in float32 beside coarser ones,
    slow ones), so that what somebody else writes into the parameters is lost? False where it
    cannot be tried, and of one with modes.

    Two copies of it make the same steps, and the parameters of one are moved after the first:
    the move stays.
    """
    if hooked(optimizer) or has_modes(optimizer):
        return False
    generator = torch.Generator().manual_seed(0)

    def drawn(like: Tensor) -> Tensor:
        found = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        return (found + found.sign()).to(like.dtype)  # none near 0

    # of a foreign step on what it was not made for
    with generators_kept(), suppress(Exception):
        groups = [
            [
                Small(
                    _corner(parameter.detach(), FEW),
                    {
                        what: _corner(value, FEW)
                        for what, value in optimizer.state.get(parameter, {}).items()
                    },
                )
                for parameter in _chosen(group["params"], 2)
            ]
            for group in optimizer.param_groups
        ]
        moves = [drawn(each.values) for each in _flat(groups)]
        (stayed, one), (moved, other) = _begun(optimizer, groups), _begun(optimizer, groups)
        left = [1.0 for _ in moves]
        for step in range(LATER):
            gradients = [[drawn(each.values) for each in group] for group in groups]
            _step(one, stayed, gradients)
            _step(other, moved, gradients)
            for parameter, move in zip(_flat(moved), moves, strict=True) if not step else ():
                parameter.detach().add_(move)
            before = left
            left = [_left(*each) for each in zip(_flat(stayed), _flat(moved), moves, strict=True)]
            if any(now < LEFT * then for now, then in zip(left, before, strict=True)):
                return True
    return False


def _left(stayed: Tensor, moved: Tensor, move: Tensor) -> float:
    """How much of a move is left."""
    apart, whole = (
        each.detach().to(torch.complex128).reshape(-1) for each in (moved - stayed, move)
    )
    return (
        float((torch.vdot(whole, apart) / torch.vdot(whole, whole)).real) if move.numel() else 1.0
    )


def hooked(optimizer: torch.optim.Optimizer) -> str | None:
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


def _chosen(parameters: list[Tensor], most: int) -> list[Tensor]:
    """Of each number of dimensions the largest parameters, so many."""
    found: dict[int, list[Tensor]] = defaultdict(list)
    for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
        if len(found[parameter.dim()]) < most:
            found[parameter.dim()].append(parameter)
    return [parameter for each in found.values() for parameter in each]


def _corner(value: Any, size: int) -> Any:
    """The corner of a tensor; anything else as it is."""
    if not isinstance(value, Tensor) or not value.dim():
        return copy.deepcopy(value)
    return value.detach()[tuple(slice(size) for _ in value.shape)].cpu().clone()


def _small(value: Any, size: int) -> Any:
    """The same, in float64."""
    corner = _corner(value, size)
    return (
        corner.double()
        if isinstance(corner, Tensor) and corner.dim() and corner.is_floating_point()
        else corner
    )


def _by_element(
    optimizer: torch.optim.Optimizer, groups: list[list[Small]], gradients: list[Groups]
) -> bool:
    """Whole parameters against pieces of them, held by two optimizers; a third one holds
    nothing.
    """
    whole = _trained(optimizer, groups, gradients)
    _trained(optimizer, [[] for _ in groups], [[[] for _ in groups] for _ in gradients])
    for which in (0, 1):
        pieces = [[each.half(which) for each in group] for group in groups]
        part = _trained(
            optimizer,
            pieces,
            [[[_half(each, which) for each in group] for group in step] for step in gradients],
            cut=True,
        )
        if not all(
            _equal(_half(wanted, which), found, began.values)
            for wanted, found, began in zip(_flat(whole), _flat(part), _flat(pieces), strict=True)
        ):
            return False
    return True


def _by_tensor(
    optimizer: torch.optim.Optimizer, groups: list[list[Small]], gradients: list[Groups]
) -> bool:
    """All together against optimizers that hold all parameters, where every other one has a
    gradient; the rest must stay.
    """
    whole = _flat(_trained(optimizer, groups, gradients))
    for which in (0, 1):
        few: Any = [
            [
                [each if place % 2 == which else None for place, each in enumerate(group)]
                for group in step
            ]
            for step in gradients
        ]
        mine = [place % 2 == which for group in groups for place in range(len(group))]
        part = _flat(_trained(optimizer, groups, few))
        for own, wanted, found, began in zip(mine, whole, part, _flat(groups), strict=True):
            if not (
                _equal(wanted, found, began.values) if own else torch.equal(found, began.values)
            ):
                return False
    return True


def _flat(groups: list[list[Any]]) -> list[Any]:
    return [each for group in groups for each in group]


def _half(tensor: Tensor, which: int) -> Tensor:
    flat = tensor.reshape(-1)
    cut = -(-len(flat) // 3)
    return flat[cut:] if which else flat[:cut]


def _equal(wanted: Tensor, found: Tensor, began: Tensor) -> bool:
    """Did both arrive at the same, up to rounding, and not where they began?"""
    if not wanted.numel():
        return True
    moved = float((wanted - began).abs().max())
    bound = 1e-9 * moved + 8 * torch.finfo(torch.float64).eps * float(wanted.abs().max())
    return moved > 0 and float((wanted - found).abs().max()) <= bound


def _trained(
    optimizer: torch.optim.Optimizer,
    groups: list[list[Small]],
    gradients: list[Groups],
    cut: bool = False,
) -> Groups:
    """The parameters after some steps of a copy of the optimizer, in eval mode where it has
    modes.
    """
    held, twin = _begun(optimizer, groups, cut)
    for step in gradients:
        _step(twin, held, step)
    if cut and any(
        value.dim() and value.shape != parameter.shape
        for parameter, state in twin.state.items()
        for value in state.values()
        if isinstance(value, Tensor)
    ):
        raise ValueError(
            "state of another shape than the piece, which could not be put together again"
        )
    return [[parameter.detach() for parameter in group] for group in held]


def _begun(
    optimizer: torch.optim.Optimizer, groups: list[list[Small]], cut: bool = False
) -> tuple[Any, torch.optim.Optimizer]:
    """(small parameters, a copy of the optimizer over them), before its first step."""
    held: Any = [
        [each.values.clone() if cut else nn.Parameter(each.values.clone()) for each in group]
        for group in groups
    ]
    twin = _twin(optimizer, held)
    for parameter, known in zip(_flat(held), _flat(groups), strict=True):
        if known.state:
            twin.state[parameter] = copy.deepcopy(known.state)
    return held, twin


def _step(twin: torch.optim.Optimizer, held: Any, gradients: Groups) -> None:
    """In eval mode afterwards, where it has modes."""
    set_mode(twin, "train")
    for parameter, gradient in zip(_flat(held), _flat(gradients), strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    twin.step()
    set_mode(twin, "eval")


def _twin(optimizer: torch.optim.Optimizer, held: Groups) -> torch.optim.Optimizer:
    """The same class, attributes and hyper-parameters over other parameters; Optimizer's own
    copy forgets the attributes.
    """
    memo: dict[int, Any] = _Refusing(
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
    for group, parameters in zip(optimizer.param_groups, held, strict=True):
        settings = copy.deepcopy(
            {name: value for name, value in group.items() if name != "params"}, memo
        )
        # a warm-up begins with 0, which would show nothing
        if not settings.get("lr", 1.0):
            settings["lr"] = settings["lr"] + 0.01
        twin.param_groups.append({**settings, "params": parameters})
    return twin


class _Refusing(dict[int, Any]):
    """deepcopy's memory of what was copied, which lets no real parameter be copied along."""

    def __init__(self, refused: set[int]) -> None:
        super().__init__()
        self.refused = refused

    def get(self, key: int, default: Any = None) -> Any:
        if key in self.refused:
            raise ValueError("the optimizer keeps its parameters outside of its groups")
        return super().get(key, default)


class Alike:
    """Calls that every rank makes by itself, such as an optimizer's step, and that shall draw
    the same random numbers on all ranks, and as on one worker: the generators begin as (seed,
    step) says. Where the first call of a name draws nothing, the later ones cost nothing.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        self.own = (
            torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else None
        )
        self.draws: dict[str, bool] = {}

    def __call__(self, name: str, step: int, function: Callable[[], Any]) -> None:
        if not self.draws.get(name, True):
            function()
            return
        with generators_seeded(f"{name} {self.seed} {step}"), self._seeded():
            before = self._states()
            function()
            self.draws.setdefault(name, self._states() != before)

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """The device's own generator, as torch's on the CPU; afterwards as it was."""
        kept = self.own and self.own.get_state()
        if self.own is not None:
            self.own.manual_seed(torch.default_generator.initial_seed())
        try:
            yield
        finally:
            if self.own is not None:
                self.own.set_state(kept)

    def _states(self) -> Any:
        return generator_states(), self.own and self.own.get_state().numpy().tobytes()


def clip_factor(norm: float, most: float | None) -> float:
    """What gradients of that norm are multiplied by, as torch.nn.utils.clip_grad_norm_ does
    (None: not at all).
    """
    return 1.0 if most is None else min(1.0, most / (norm + 1e-6))
