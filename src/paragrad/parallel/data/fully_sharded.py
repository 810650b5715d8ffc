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

from paragrad.engine.exchange import SHARED_PARAMETER_CHANGED, Exchange, Replica
from paragrad.engine.layout import (
    Layout,
    OptimizerState,
    ShardSpec,
    build_empty_model,
    install_shards,
)
from paragrad.engine.optimizer.modes import use_optimizer_eval_mode
from paragrad.engine.optimizer.update_probe import find_update_granularity
from paragrad.engine.optimizer.update_slices import FOREACH_OPTIMIZERS
from paragrad.errors import StepFailed
from paragrad.parallel.data.fsdp_units import (
    can_shard_parameter,
    find_fsdp_units,
    select_common_units,
)
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.strategy import PER_ELEMENT, UPDATE_GRANULARITIES

REST_UNIT = "the rest"  # the group of all that is in no other
ALTERNATIVE_HINT = "or train without state=fully_sharded"


class FullyShardedExchange(Exchange):
    """The exchange of `data(n, state=fully_sharded)`. Collective: all ranks make it
    together.
    """

    shard_layout: Layout

    def __init__(self, replica: Replica, world: World, log: StepLog) -> None:
        super().__init__(replica)
        self.world = world
        self.log = log
        whole = replica.module.model
        self._refuse_model(whole)
        assert replica.forward is not None
        told = (
            []
            if replica.has_unused_parameters
            else world.gather_objects(find_fsdp_units(whole, replica.forward))
        )
        self.unit_names: list[str] = world.broadcast_object(
            select_common_units(told) if told else []
        )
        why = (
            "all: some rank's parameters got no gradient"
            if replica.has_unused_parameters
            else "used outside of one call"
        )
        log.write_choice(
            "groups",
            str(len(self.unit_names) + 1),
            "; ".join([*self.unit_names, f"{REST_UNIT} ({why})"]),
        )
        before = dict(whole.named_parameters())
        self.empty_model = build_empty_model(whole)
        if replica.keeps_whole_model:
            self.loss_module = replica.module.wrap_model(copy.deepcopy(whole))
            self.module = self.loss_module
        self.sent_messages: list[str] | None = None  # messages so far, of a micro-batch under way
        self.expected_messages: list[str] = []  # those of the first one
        # parameters that had a gradient on this rank in this step
        self.used_names: set[str] = set()
        # what is gathered, and its version as it was the first time
        self.gathered_parameters: dict[str, tuple[Tensor, int]] = {}
        self._shard_model(before)
        self.shard_tensors: dict[str, nn.Parameter] = {}
        self._build_shards(before)

    def _refuse_model(self, model: nn.Module) -> None:
        if hooked := [
            name
            for name, each in model.named_parameters()
            if each._backward_hooks or each._post_accumulate_grad_hooks
        ]:
            raise StepFailed(
                "state=fully_sharded puts parts in its place, and it has a hook, which they would "
                "not have; hook "
                f"the module, {ALTERNATIVE_HINT}",
                tensor=", ".join(hooked[:3]),
            )
        kind = find_update_granularity(
            self.optimizer, known_elementwise=type(self.optimizer) in FOREACH_OPTIMIZERS
        )
        if (
            UPDATE_GRANULARITIES[
                int(
                    self.world.all_reduce(
                        torch.tensor(float(UPDATE_GRANULARITIES.index(kind))), "MAX"
                    )
                )
            ]
            != PER_ELEMENT
        ):
            raise StepFailed(
                f"{type(self.optimizer).__name__} does not update element by element (tried on a "
                f"small copy), and "
                f"state=fully_sharded gives it parts of tensors; use one that does, such as Adam, "
                f"{ALTERNATIVE_HINT}"
            )

    def _shard_model(self, original: dict[str, nn.Parameter]) -> None:
        """Give the model to FSDP2, group by group; the loss, which may use parameters too, is
        in the outermost module.
        """
        model = self.loss_module.model
        mesh = DeviceMesh.from_group(self.world.group, self.world.device.type)
        sizes: Counter[torch.dtype] = Counter()
        for each in original.values():
            sizes[each.dtype] += each.numel() * each.is_floating_point()
        own = dict(model.named_parameters())
        (dtype, _), *_ = sizes.most_common(1)
        ignored = {
            parameter for parameter in own.values() if not can_shard_parameter(parameter, dtype)
        }
        self.trained_flags = {name: parameter.requires_grad for name, parameter in own.items()}
        # of what is sharded, the group
        self.unit_of_parameter = {
            name: next((each for each in self.unit_names if name.startswith(f"{each}.")), REST_UNIT)
            for name, parameter in own.items()
            if parameter not in ignored
        }
        homes = {name: model.get_submodule(name.rpartition(".")[0]) for name in own}
        self.units: dict[str, Any] = {
            **{name: model.get_submodule(name) for name in self.unit_names},
            REST_UNIT: self.loss_module,
        }
        for name, unit in self.units.items():
            mine = [each for each, group in self.unit_of_parameter.items() if group == name]
            fully_shard(
                unit, mesh=mesh, reshard_after_forward=name != REST_UNIT, ignored_params=ignored
            )
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_reduce_scatter_unused_params(True, recurse=False)
            # nothing ahead: messages are not beside computation here
            unit.set_modules_to_backward_prefetch([unit])
            unit.set_custom_all_gather(_GatherHook(self, name))
            unit.set_custom_reduce_scatter(_ReduceHook(self, name))
            self._watch_gradients(unit, {each: homes[each] for each in mine})

    def _watch_gradients(self, unit: nn.Module, owners: dict[str, nn.Module]) -> None:
        """From the first call on, in which FSDP2 makes the whole parameters, say which get a
        gradient; and know their versions, which gathering does not move.
        """

        def watch(module: nn.Module, inputs: Any) -> None:
            handle.remove()
            for name, home in owners.items():
                whole: Any = home._parameters[name.rpartition(".")[2]]
                self.gathered_parameters[name] = whole, whole._version
                if self.trained_flags[name]:
                    whole.register_post_accumulate_grad_hook(
                        lambda parameter, name=name: self.used_names.add(name)
                    )

        handle = unit.register_forward_pre_hook(watch)

    # ---- what a rank holds -------------------------------------------------------------------
    def _build_shards(self, original: dict[str, nn.Parameter]) -> None:
        held = {}
        first = self.world.rank == 0
        for name, parameter in self.loss_module.model.named_parameters():
            shape = tuple(original[name].shape)
            if name not in self.unit_of_parameter:
                held[name] = ShardSpec(name, shape, is_primary=first)
                self.shard_tensors[name] = parameter
                continue
            local: Any = parameter.to_local().detach()  # type: ignore[operator]
            rows = -(-shape[0] // self.world.size)
            inner = original[name].numel() // shape[0]
            start = min(rows * self.world.rank, shape[0]) * inner
            held[name] = ShardSpec(name, shape, range(start, start + local.numel()))
            if local.numel():
                self.shard_tensors[name] = nn.Parameter(
                    local.view(-1), requires_grad=parameter.requires_grad
                )
        install_shards(
            self.optimizer,
            {original[name]: [(held[name], part)] for name, part in self.shard_tensors.items()},
        )
        held.update(
            {
                name: ShardSpec(name, tuple(each.shape), is_primary=first)
                for name, each in self.loss_module.model.named_buffers()
            }
        )
        self.shard_layout, self.parameters = (
            Layout(self.world, held, list(held)),
            list(self.shard_tensors.values()),
        )
        sizes = Counter(dict.fromkeys(self.units, 0))
        for name, group in self.unit_of_parameter.items():
            sizes[group] += original[name].numel() * original[name].element_size()
        # bytes that are whole at once: of a group parameters, gradients, and these as one
        # vector, which are summed while backward goes on; of the rest parameters and gradients,
        # which are summed when all groups are done
        rest = sizes.pop(REST_UNIT)
        largest = max(sizes.values(), default=0)
        self.peak_bytes = max(2 * rest + 3 * largest, 3 * rest)

    # ---- in a step ---------------------------------------------------------------------------
    def begin(self) -> None:
        super().begin()
        self.used_names = set()
        self.shard_layout.sent_bytes = 0
        self.refuse_refrozen()
        for parameter in self.loss_module.model.parameters():
            parameter.grad = None

    @contextlib.contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.sent_messages = []
        yield
        sent = self.sent_messages
        self.sent_messages = None
        if not self.expected_messages:
            self.expected_messages = sent
        elif len(sent) < len(self.expected_messages):
            raise self._make_order_error(self.expected_messages[len(sent)], "nothing")

    def check_message(self, message: str) -> None:
        """A message is about to be sent, in a step the next one of all."""
        if self.sent_messages is None:  # of a test
            return
        wanted = (
            self.expected_messages[len(self.sent_messages)]
            if len(self.sent_messages) < len(self.expected_messages)
            else "nothing"
        )
        if self.expected_messages and message != wanted:
            raise self._make_order_error(wanted, message)
        self.sent_messages.append(message)

    def _make_order_error(self, expected: str, message: str) -> StepFailed:
        return StepFailed(
            f"all ranks gather and sum the parameters of modules in one order, whatever the data; "
            f"in step 0 came "
            f'here "{expected}", and now "{message}": a module is called, or its output used, for '
            f"some batches "
            f"alone; use it for all, {ALTERNATIVE_HINT}",
            tensor=expected.partition(" ")[2] or message.partition(" ")[2],
        )

    def finish(self, weight: float, loss: float) -> None:
        if moved := [
            name
            for name, (whole, version) in self.gathered_parameters.items()
            if whole._version != version
        ]:
            raise StepFailed(SHARED_PARAMETER_CHANGED, tensor=", ".join(moved[:3]))
        own = dict(self.loss_module.model.named_parameters())
        trained = [name for name, trains in self.trained_flags.items() if trains]
        there = [
            float(
                name in self.used_names
                or (name not in self.unit_of_parameter and own[name].grad is not None)
            )
            for name in trained
        ]
        order = float(zlib.crc32("\n".join(self.expected_messages).encode()))
        own_told = torch.tensor(
            [order, weight, loss, float(self.stop_requested), self.doubtful_weight, *there],
            dtype=torch.float64,
        )
        self.count_bytes(
            "used",
            count_collective_bytes("all_gather", own_told.nbytes, self.world.size),
            computed=True,
        )
        every = torch.stack(self.world.all_gather(own_told))
        if other := [
            rank for rank, number in enumerate(every[:, 0].tolist()) if number != float(every[0, 0])
        ]:
            raise StepFailed(
                f"ranks 0 and {other[0]} gather and sum the parameters of modules in another "
                f"order: a part of the "
                f"model is used for some samples alone; use it for all, {ALTERNATIVE_HINT}",
                differs=True,
            )
        self.totals = every[:, 1:5].sum(0).tolist()
        anyone = dict(zip(trained, every[:, 5:].amax(0).tolist(), strict=True))
        for name, part in self.shard_tensors.items():
            if not anyone.get(name):
                part.grad = None
            elif name in self.unit_of_parameter:
                gradient: Any = own[name].grad
                part.grad = gradient.to_local().reshape(-1)
            else:
                part.grad = self._sum_whole_gradient(
                    torch.zeros_like(part) if part.grad is None else part.grad
                )

    def _sum_whole_gradient(self, gradient: Tensor) -> Tensor:
        """Of what every rank holds whole."""
        self.count_bytes(
            "gradients",
            count_collective_bytes("all_reduce", gradient.nbytes, self.world.size),
            computed=True,
        )
        if gradient.is_complex():
            return torch.view_as_complex(
                self.world.all_reduce(torch.view_as_real(gradient.contiguous()))
            )
        return self.world.all_reduce(gradient.contiguous())

    def reduce_totals(self) -> list[float]:
        return self.totals

    def update(self) -> None:
        if self.clip_norm is not None:
            self.shard_layout.clip_gradients(self.shard_tensors, self.clip_norm)
            self.count_bytes("norm", self.shard_layout.sent_bytes, computed=True)
        self.optimizer.step()

    # ---- what others look at -----------------------------------------------------------------
    @contextlib.contextmanager
    def use_evaluation_weights(self) -> Iterator[None]:
        """All parameters are whole on every rank meanwhile, so that each may run the model as
        often as it likes.
        """
        with use_optimizer_eval_mode(self.optimizer, self.parameters):
            for unit in self.units.values():
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
            try:
                yield
            finally:
                for name, unit in self.units.items():
                    unit.set_reshard_after_forward(name != REST_UNIT, recurse=False)
                    unit.reshard()

    def gather_gradients(self) -> dict[str, Tensor | None]:
        """Of this rank's parts."""
        return {name: part.grad for name, part in self.shard_tensors.items()}

    def gather_optimizer_state(self) -> OptimizerState:
        """Of this rank's parts."""
        return {
            name: self.optimizer.state[part]
            for name, part in self.shard_tensors.items()
            if part in self.optimizer.state
        }


class _CollectiveHook:
    """What FSDP2 asks to gather or to sum: noted, counted, and told in the record."""

    def __init__(self, exchange: FullyShardedExchange, unit: str) -> None:
        self.exchange = exchange
        self.unit = unit

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def record_message(
        self, action: str, kind: str, collective: str, payload: int
    ) -> contextlib.AbstractContextManager[None]:
        exchange = self.exchange
        name = f"{action} {self.unit}"
        exchange.check_message(name)
        exchange.count_bytes(
            kind, count_collective_bytes(collective, payload, exchange.world.size), computed=True
        )
        # a test is no part of a step, and of the next one least
        return (
            contextlib.nullcontext()
            if exchange.sent_messages is None
            else exchange.log.record_detail(name, "receive")
        )


class _GatherHook(_CollectiveHook):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> None:
        with self.record_message("gather", "parameters", "all_gather", input_tensor.nbytes):
            self.exchange.world.all_gather_into(output_tensor, input_tensor)


class _ReduceHook(_CollectiveHook):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        with self.record_message(
            "reduce-scatter", "gradients", "reduce_scatter", input_tensor.nbytes
        ):
            self.exchange.world.reduce_scatter_into(output_tensor, input_tensor, op)
