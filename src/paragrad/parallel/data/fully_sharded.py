"""Data parallelism in which every rank holds a part of all parameters, gradients and optimizer
state: torch's FSDP2 (Zhao et al. 2023, arXiv 2304.11277).

A group of parameters is gathered when its module is called, in forward and again in backward,
and its gradients are summed and divided among the ranks as soon as backward has them. What is
ours:

* The division, once, by the global weight: FSDP2 divides by 1.0 and sums
(`set_force_sum_reduction_for_comms`; without it a
  factor of 1.0 is played as PREMUL_SUM in float32, which gloo does not know).
* Which modules are groups (`groups.py`); all other parameters are one, gathered around the
whole forward, the loss in it.
* Gathering is collective, so all ranks must do it alike, in forward and in backward: the order
of all messages of step 0 is
  compared, and later a rank that is about to send another one than then ends the step. Where
  some rank's parameters got no gradient in the look before step 0, data may decide what is
  used, and there is one group of all.
* Parameters that no rank used in a step have no gradient, as in serial: FSDP2 makes zeros of
those, so every rank says which it
  used.
* The optimizer is the user's own object: each parameter is cut along its first dimension, so
what a rank holds is a flat range
  of it, and its groups hold these, as in shared memory.
"""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from paragrad.engine.exchange import SHARED, Exchange, Replica
from paragrad.engine.layout import Held, Layout, State, hand_over, hollow
from paragrad.engine.optimizer.modes import in_eval_mode
from paragrad.engine.optimizer.update_probe import updates_by
from paragrad.engine.optimizer.update_slices import FOREACH
from paragrad.errors import StepFailed
from paragrad.parallel.data.fsdp_units import common, groups, shardable
from paragrad.planner.cost_formulas import computed_bytes
from paragrad.record.step_log import Log
from paragrad.runtime.world import World
from paragrad.strategies.strategy import ELEMENT, KINDS

REST = "the rest"  # the group of all that is in no other
WITHOUT = "or train without state=fully_sharded"


class FullySharded(Exchange):
    """The exchange of `data(n, state=fully_sharded)`. Collective: all ranks make it
    together.
    """

    shards: Layout

    def __init__(self, replica: Replica, world: World, log: Log) -> None:
        super().__init__(replica)
        self.world = world
        self.log = log
        whole = replica.module.model
        self._refuse(whole)
        assert replica.forward is not None
        told = [] if replica.some_unused else world.collected(groups(whole, replica.forward))
        self.names: list[str] = world.agreed(common(told) if told else [])
        why = (
            "all: some rank's parameters got no gradient"
            if replica.some_unused
            else "used outside of one call"
        )
        log.choice("groups", str(len(self.names) + 1), "; ".join([*self.names, f"{REST} ({why})"]))
        before = dict(whole.named_parameters())
        self.hollow = hollow(whole)
        if replica.kept:
            self.summed = replica.module.around(copy.deepcopy(whole))
            self.module = self.summed
        self.sending: list[str] | None = None  # messages so far, of a micro-batch under way
        self.script: list[str] = []  # those of the first one
        # parameters that had a gradient on this rank in this step
        self.used: set[str] = set()
        # what is gathered, and its version as it was the first time
        self.whole: dict[str, tuple[Tensor, int]] = {}
        self._shard(before)
        self.parts: dict[str, nn.Parameter] = {}
        self._hold(before)

    def _refuse(self, model: nn.Module) -> None:
        if hooked := [
            name
            for name, each in model.named_parameters()
            if each._backward_hooks or each._post_accumulate_grad_hooks
        ]:
            raise StepFailed(
                "state=fully_sharded puts parts in its place, and it has a hook, which they would "
                "not have; hook "
                f"the module, {WITHOUT}",
                tensor=", ".join(hooked[:3]),
            )
        kind = updates_by(self.optimizer, known=type(self.optimizer) in FOREACH)
        if (
            KINDS[int(self.world.all_reduced(torch.tensor(float(KINDS.index(kind))), "MAX"))]
            != ELEMENT
        ):
            raise StepFailed(
                f"{type(self.optimizer).__name__} does not update element by element (tried on a "
                f"small copy), and "
                f"state=fully_sharded gives it parts of tensors; use one that does, such as Adam, "
                f"{WITHOUT}"
            )

    def _shard(self, before: dict[str, nn.Parameter]) -> None:
        """Give the model to FSDP2, group by group; the loss, which may use parameters too, is
        in the outermost module.
        """
        model = self.summed.model
        mesh = DeviceMesh.from_group(self.world.group, self.world.device.type)
        sizes: Counter[torch.dtype] = Counter()
        for each in before.values():
            sizes[each.dtype] += each.numel() * each.is_floating_point()
        own = dict(model.named_parameters())
        (dtype, _), *_ = sizes.most_common(1)
        ignored = {parameter for parameter in own.values() if not shardable(parameter, dtype)}
        self.trained = {name: parameter.requires_grad for name, parameter in own.items()}
        # of what is sharded, the group
        self.sharded = {
            name: next((each for each in self.names if name.startswith(f"{each}.")), REST)
            for name, parameter in own.items()
            if parameter not in ignored
        }
        homes = {name: model.get_submodule(name.rpartition(".")[0]) for name in own}
        self.units: dict[str, Any] = {
            **{name: model.get_submodule(name) for name in self.names},
            REST: self.summed,
        }
        for name, unit in self.units.items():
            mine = [each for each, group in self.sharded.items() if group == name]
            fully_shard(unit, mesh=mesh, reshard_after_forward=name != REST, ignored_params=ignored)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_reduce_scatter_unused_params(True, recurse=False)
            # nothing ahead: messages are not beside computation here
            unit.set_modules_to_backward_prefetch([unit])
            unit.set_custom_all_gather(_Gather(self, name))
            unit.set_custom_reduce_scatter(_Reduce(self, name))
            self._watch_gradients(unit, {each: homes[each] for each in mine})

    def _watch_gradients(self, unit: nn.Module, homes: dict[str, nn.Module]) -> None:
        """From the first call on, in which FSDP2 makes the whole parameters, say which get a
        gradient; and know their versions, which gathering does not move.
        """

        def watch(module: nn.Module, inputs: Any) -> None:
            handle.remove()
            for name, home in homes.items():
                whole: Any = home._parameters[name.rpartition(".")[2]]
                self.whole[name] = whole, whole._version
                if self.trained[name]:
                    whole.register_post_accumulate_grad_hook(
                        lambda parameter, name=name: self.used.add(name)
                    )

        handle = unit.register_forward_pre_hook(watch)

    # ---- what a rank holds -------------------------------------------------------------------
    def _hold(self, before: dict[str, nn.Parameter]) -> None:
        held = {}
        first = self.world.rank == 0
        for name, parameter in self.summed.model.named_parameters():
            shape = tuple(before[name].shape)
            if name not in self.sharded:
                held[name] = Held(name, shape, counts=first)
                self.parts[name] = parameter
                continue
            local: Any = parameter.to_local().detach()  # type: ignore[operator]
            rows = -(-shape[0] // self.world.size)
            inner = before[name].numel() // shape[0]
            start = min(rows * self.world.rank, shape[0]) * inner
            held[name] = Held(name, shape, range(start, start + local.numel()))
            if local.numel():
                self.parts[name] = nn.Parameter(
                    local.view(-1), requires_grad=parameter.requires_grad
                )
        hand_over(
            self.optimizer,
            {before[name]: [(held[name], part)] for name, part in self.parts.items()},
        )
        held.update(
            {
                name: Held(name, tuple(each.shape), counts=first)
                for name, each in self.summed.model.named_buffers()
            }
        )
        self.shards, self.every = Layout(self.world, held, list(held)), list(self.parts.values())
        sizes = Counter(dict.fromkeys(self.units, 0))
        for name, group in self.sharded.items():
            sizes[group] += before[name].numel() * before[name].element_size()
        # bytes that are whole at once: of a group parameters, gradients, and these as one
        # vector, which are summed while backward goes on; of the rest parameters and gradients,
        # which are summed when all groups are done
        rest = sizes.pop(REST)
        largest = max(sizes.values(), default=0)
        self.largest = max(2 * rest + 3 * largest, 3 * rest)

    # ---- in a step ---------------------------------------------------------------------------
    def begin(self) -> None:
        super().begin()
        self.used = set()
        self.shards.sent = 0
        self.refuse_refrozen()
        for parameter in self.summed.model.parameters():
            parameter.grad = None

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.sending = []
        yield
        sent = self.sending
        self.sending = None
        if not self.script:
            self.script = sent
        elif len(sent) < len(self.script):
            raise self._otherwise(self.script[len(sent)], "nothing")

    def send(self, message: str) -> None:
        """A message is about to be sent, in a step the next one of all."""
        if self.sending is None:  # of a test
            return
        wanted = (
            self.script[len(self.sending)] if len(self.sending) < len(self.script) else "nothing"
        )
        if self.script and message != wanted:
            raise self._otherwise(wanted, message)
        self.sending.append(message)

    def _otherwise(self, wanted: str, message: str) -> StepFailed:
        return StepFailed(
            f"all ranks gather and sum the parameters of modules in one order, whatever the data; "
            f"in step 0 came "
            f'here "{wanted}", and now "{message}": a module is called, or its output used, for '
            f"some batches "
            f"alone; use it for all, {WITHOUT}",
            tensor=wanted.partition(" ")[2] or message.partition(" ")[2],
        )

    def finish(self, weight: float, loss: float) -> None:
        if moved := [
            name for name, (whole, version) in self.whole.items() if whole._version != version
        ]:
            raise StepFailed(SHARED, tensor=", ".join(moved[:3]))
        own = dict(self.summed.model.named_parameters())
        trained = [name for name, trains in self.trained.items() if trains]
        there = [
            float(name in self.used or (name not in self.sharded and own[name].grad is not None))
            for name in trained
        ]
        order = float(zlib.crc32("\n".join(self.script).encode()))
        own_told = torch.tensor(
            [order, weight, loss, float(self.stop), self.doubt, *there], dtype=torch.float64
        )
        self.count(
            "used", computed_bytes("all_gather", own_told.nbytes, self.world.size), computed=True
        )
        every = torch.stack(self.world.gathered(own_told))
        if other := [
            rank for rank, number in enumerate(every[:, 0].tolist()) if number != float(every[0, 0])
        ]:
            raise StepFailed(
                f"ranks 0 and {other[0]} gather and sum the parameters of modules in another "
                f"order: a part of the "
                f"model is used for some samples alone; use it for all, {WITHOUT}",
                differs=True,
            )
        self.told = every[:, 1:5].sum(0).tolist()
        anyone = dict(zip(trained, every[:, 5:].amax(0).tolist(), strict=True))
        for name, part in self.parts.items():
            if not anyone.get(name):
                part.grad = None
            elif name in self.sharded:
                gradient: Any = own[name].grad
                part.grad = gradient.to_local().reshape(-1)
            else:
                part.grad = self._summed(torch.zeros_like(part) if part.grad is None else part.grad)

    def _summed(self, gradient: Tensor) -> Tensor:
        """Of what every rank holds whole."""
        self.count(
            "gradients",
            computed_bytes("all_reduce", gradient.nbytes, self.world.size),
            computed=True,
        )
        if gradient.is_complex():
            return torch.view_as_complex(
                self.world.all_reduced(torch.view_as_real(gradient.contiguous()))
            )
        return self.world.all_reduced(gradient.contiguous())

    def counted(self) -> list[float]:
        return self.told

    def update(self) -> None:
        if self.clip_norm is not None:
            self.shards.clip(self.parts, self.clip_norm)
            self.count("norm", self.shards.sent, computed=True)
        self.optimizer.step()

    # ---- what others look at -----------------------------------------------------------------
    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """All parameters are whole on every rank meanwhile, so that each may run the model as
        often as it likes.
        """
        with in_eval_mode(self.optimizer, self.every):
            for unit in self.units.values():
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
            try:
                yield
            finally:
                for name, unit in self.units.items():
                    unit.set_reshard_after_forward(name != REST, recurse=False)
                    unit.reshard()

    def gradients(self) -> dict[str, Tensor | None]:
        """Of this rank's parts."""
        return {name: part.grad for name, part in self.parts.items()}

    def state(self) -> State:
        """Of this rank's parts."""
        return {
            name: self.optimizer.state[part]
            for name, part in self.parts.items()
            if part in self.optimizer.state
        }


class _Message:
    """What FSDP2 asks to gather or to sum: noted, counted, and told in the record."""

    def __init__(self, exchange: FullySharded, group: str) -> None:
        self.exchange = exchange
        self.group = group

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def noted(
        self, doing: str, kind: str, collective: str, payload: int
    ) -> contextlib.AbstractContextManager[None]:
        exchange = self.exchange
        name = f"{doing} {self.group}"
        exchange.send(name)
        exchange.count(
            kind, computed_bytes(collective, payload, exchange.world.size), computed=True
        )
        # a test is no part of a step, and of the next one least
        return (
            contextlib.nullcontext()
            if exchange.sending is None
            else exchange.log.detail(name, "receive")
        )


class _Gather(_Message):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        with self.noted("gather", "parameters", "all_gather", input_tensor.nbytes):
            self.exchange.world.gather_into(output_tensor, input_tensor)


class _Reduce(_Message):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        with self.noted("reduce-scatter", "gradients", "reduce_scatter", input_tensor.nbytes):
            self.exchange.world.reduce_into(output_tensor, input_tensor, op)
