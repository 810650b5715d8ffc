"""Data parallelism that shards parameters, gradients and optimizer state.

Every rank holds a part of each of them. It uses FSDP2 of torch (Zhao et al. 2023, arXiv
2304.11277). The parameters of a unit are gathered when its module is called, in forward and again
in backward. Its gradients are summed and divided among the ranks as soon as backward has computed
them. These parts are our own:

* The division by the global weight happens once. FSDP2 divides by 1.0 and sums
  (`set_force_sum_reduction_for_comms`). Without that setting a factor of 1.0 becomes PREMUL_SUM in
  float32, which gloo does not support.
* `fsdp_units.py` decides which modules are units. All other parameters are one unit, which is
  gathered around the whole forward, the loss included.
* Gathering is collective, so all ranks must gather in the same order, in forward and in backward.
  The order of all messages of step 0 is compared between ranks. If a rank is about to send a
  message that does not follow this order in a later step, the step ends.
* If parameters of some rank got no gradient when the model was inspected before step 0, the data
  may decide what is used. Then there is one unit with all parameters.
* A parameter that no rank used in a step has no gradient, as in `serial`. FSDP2 gives it zeros
  instead, so the ranks share which parameters they used.
* The optimizer is the user's own object. Each parameter is divided along its first dimension, so a
  rank holds a flat range of it. The parameter groups hold these ranges, as with shared memory.
"""

from __future__ import annotations

import contextlib
import copy
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from paragrad.engine.exchange import (
    SHARED_PARAMETER_CHANGED,
    Exchange,
    Replica,
    step_optimizer,
)
from paragrad.engine.layout import (
    Layout,
    OptimizerState,
    ShardSpec,
    build_empty_model,
    install_shards,
)
from paragrad.engine.optimizer.modes import use_optimizer_eval_mode
from paragrad.engine.optimizer.update_probe import agree_on_granularity
from paragrad.errors import StepFailed
from paragrad.parallel.data.fsdp_units import (
    can_shard_parameter,
    find_fsdp_units,
    select_common_units,
)
from paragrad.planner.cost_formulas import count_collective_bytes
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.strategy import PER_ELEMENT

REST_UNIT = "the rest"  # the unit of all parameters that are in no other one
ALTERNATIVE_HINT = "or train without state=fully_sharded"


class FullyShardedExchange(Exchange):
    """The exchange of `data(n, state=fully_sharded)`.

    The constructor is collective: all ranks make the exchange together.

    Args:
        replica: What this rank holds of the training.

        world: The world of the workers.

        log: The step log that receives spans and choices.

    Attributes:
        world: The world of the workers.

        log: The step log.

        unit_names: Names of the modules that are units, without the rest.

        units: Modules by unit name, the rest included.

        sent_messages: Messages of the current micro-batch so far; None outside of micro-batches.

        expected_messages: The messages of the first micro-batch.

        used_names: Names of parameters that had a gradient on this rank in this step.

        gathered_parameters: Each gathered parameter and its version after the first gathering.

        trained_flags: For each parameter name, whether it is trained.

        unit_of_parameter: Name of the unit of each sharded parameter.

        module_parameters: The parameters of the modules between two steps, by name. FSDP2 puts
            whole ones in their place in a step.

        totals: Weight, loss, stop requests and doubtful weight, summed over ranks.
    """

    shard_layout: Layout

    def __init__(self, replica: Replica, world: World, log: StepLog) -> None:
        super().__init__(replica)
        self.world = world
        self.log = log
        whole = replica.module.model
        self._refuse_model(whole)
        assert replica.forward is not None
        unit_lists = (
            []
            if replica.has_unused_parameters
            else world.gather_objects(find_fsdp_units(whole, replica.forward))
        )
        self.unit_names: list[str] = world.broadcast_object(
            select_common_units(unit_lists) if unit_lists else []
        )
        reason = (
            "all: some rank's parameters got no gradient"
            if replica.has_unused_parameters
            else "used outside of one call"
        )
        log.write_choice(
            "groups",
            str(len(self.unit_names) + 1),
            "; ".join([*self.unit_names, f"{REST_UNIT} ({reason})"]),
        )
        original = dict(whole.named_parameters())
        self.empty_model = build_empty_model(whole)
        if replica.keeps_whole_model:
            self.loss_module = replica.module.wrap_model(copy.deepcopy(whole))
            self.module = self.loss_module
        self.sent_messages: list[str] | None = None
        self.expected_messages: list[str] = []
        self.used_names: set[str] = set()
        self.gathered_parameters: dict[str, tuple[Tensor, int]] = {}
        self._shard_model(original)
        self.shard_tensors: dict[str, nn.Parameter] = {}
        self._build_shards(original)

    def _refuse_model(self, model: nn.Module) -> None:
        """Refuse models with hooks on parameters, and optimizers that do not update by element."""
        if hooked := [
            name
            for name, each in model.named_parameters()
            if each._backward_hooks or each._post_accumulate_grad_hooks
        ]:
            raise StepFailed(
                "state=fully_sharded puts parts in its place, and it has a hook, which the parts "
                f"do not have; hook the module, {ALTERNATIVE_HINT}",
                tensor=", ".join(hooked[:3]),
            )
        if agree_on_granularity(self.optimizer, self.world) != PER_ELEMENT:
            raise StepFailed(
                f"{type(self.optimizer).__name__} does not update element by element (tried on a "
                "small copy), and state=fully_sharded gives it parts of tensors; use one that "
                f"does, such as Adam, {ALTERNATIVE_HINT}"
            )

    def _shard_model(self, original: dict[str, nn.Parameter]) -> None:
        """Shard the units of the model with FSDP2.

        The outermost module includes the loss, which may also use parameters.
        """
        model = self.loss_module.model
        mesh = DeviceMesh.from_group(self.world.group, self.world.device.type)
        sizes: Counter[torch.dtype] = Counter()
        for each in original.values():
            sizes[each.dtype] += each.numel() * each.is_floating_point()
        parameters = dict(model.named_parameters())
        (dtype, _), *_ = sizes.most_common(1)
        ignored = {
            parameter
            for parameter in parameters.values()
            if not can_shard_parameter(parameter, dtype)
        }
        self.trained_flags = {
            name: parameter.requires_grad for name, parameter in parameters.items()
        }
        self.unit_of_parameter = {
            name: next((each for each in self.unit_names if name.startswith(f"{each}.")), REST_UNIT)
            for name, parameter in parameters.items()
            if parameter not in ignored
        }
        owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in parameters}
        self.units: dict[str, Any] = {
            **{name: model.get_submodule(name) for name in self.unit_names},
            REST_UNIT: self.loss_module,
        }
        for name, unit in self.units.items():
            names = [each for each, group in self.unit_of_parameter.items() if group == name]
            fully_shard(
                unit, mesh=mesh, reshard_after_forward=name != REST_UNIT, ignored_params=ignored
            )
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_reduce_scatter_unused_params(True, recurse=False)
            # no prefetch: messages do not overlap with computation here
            unit.set_modules_to_backward_prefetch([unit])
            unit.set_custom_all_gather(_GatherHook(self, name))
            unit.set_custom_reduce_scatter(_ReduceHook(self, name))
            self._watch_gradients(unit, {each: owners[each] for each in names})

    def _watch_gradients(self, unit: nn.Module, owners: dict[str, nn.Module]) -> None:
        """Record which parameters of a unit get a gradient, from its first call on.

        In the first call FSDP2 makes the whole parameters. Their versions are recorded too;
        gathering does not change a version.
        """

        def watch(module: nn.Module, inputs: Any) -> None:
            handle.remove()
            for name, owner in owners.items():
                whole: Any = owner._parameters[name.rpartition(".")[2]]
                self.gathered_parameters[name] = whole, whole._version
                if self.trained_flags[name]:
                    whole.register_post_accumulate_grad_hook(
                        lambda parameter, name=name: self.used_names.add(name)
                    )

        handle = unit.register_forward_pre_hook(watch)

    # ---- shards of this rank -----------------------------------------------------------------
    def _build_shards(self, original: dict[str, nn.Parameter]) -> None:
        """Build the specs of the shards of this rank and give the shards to the optimizer."""
        specs = {}
        is_first = self.world.rank == 0
        self.module_parameters: dict[str, Any] = dict(self.loss_module.model.named_parameters())
        for name, parameter in self.module_parameters.items():
            shape = tuple(original[name].shape)
            if name not in self.unit_of_parameter:
                specs[name] = ShardSpec(name, shape, is_primary=is_first)
                self.shard_tensors[name] = parameter
                continue
            local = parameter.to_local().detach()
            rows = -(-shape[0] // self.world.size)
            row_elements = original[name].numel() // shape[0]
            start = min(rows * self.world.rank, shape[0]) * row_elements
            specs[name] = ShardSpec(name, shape, range(start, start + local.numel()))
            if local.numel():
                self.shard_tensors[name] = nn.Parameter(
                    local.view(-1), requires_grad=parameter.requires_grad
                )
        install_shards(
            self.optimizer,
            {original[name]: [(specs[name], part)] for name, part in self.shard_tensors.items()},
        )
        specs.update(
            {
                name: ShardSpec(name, tuple(each.shape), is_primary=is_first)
                for name, each in self.loss_module.model.named_buffers()
            }
        )
        self.shard_layout, self.parameters = (
            Layout(self.world, specs, list(specs)),
            list(self.shard_tensors.values()),
        )
        sizes = Counter(dict.fromkeys(self.units, 0))
        for name, group in self.unit_of_parameter.items():
            sizes[group] += original[name].numel() * original[name].element_size()
        # Bytes that are whole at the same time. For a unit: parameters, gradients and the gradients
        # as one vector, which is summed while backward runs. For the rest: parameters and
        # gradients, which are summed when all units are done.
        rest = sizes.pop(REST_UNIT)
        largest = max(sizes.values(), default=0)
        self.peak_bytes = max(2 * rest + 3 * largest, 3 * rest)

    # ---- in a step ---------------------------------------------------------------------------
    def begin(self) -> None:
        super().begin()
        self.used_names = set()
        self.shard_layout.sent_bytes = 0
        self.refuse_refrozen()
        for parameter in self.module_parameters.values():
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
        """Check a message that is about to be sent.

        In a step it must be the next one of the expected messages.

        Args:
            message: The action and the unit, such as "gather layers.0".

        Raises:
            StepFailed: Another message is expected.
        """
        if self.sent_messages is None:  # the message belongs to a test
            return
        expected = (
            self.expected_messages[len(self.sent_messages)]
            if len(self.sent_messages) < len(self.expected_messages)
            else "nothing"
        )
        if self.expected_messages and message != expected:
            raise self._make_order_error(expected, message)
        self.sent_messages.append(message)

    def _make_order_error(self, expected: str, message: str) -> StepFailed:
        """Make the error for a message that differs from that of step 0."""
        return StepFailed(
            "all ranks gather and sum the parameters of modules in one order, whatever the data; "
            f'in step 0 this was "{expected}", and now it is "{message}": a module is called, or '
            f"its output used, for some batches only; use it for all, {ALTERNATIVE_HINT}",
            tensor=expected.partition(" ")[2] or message.partition(" ")[2],
        )

    def finish(self, weight: float, loss: float) -> None:
        if moved := [
            name
            for name, (whole, version) in self.gathered_parameters.items()
            if whole._version != version
        ]:
            raise StepFailed(SHARED_PARAMETER_CHANGED, tensor=", ".join(moved[:3]))
        parameters = self.module_parameters
        trained = [name for name, trains in self.trained_flags.items() if trains]
        used_flags = [
            float(
                name in self.used_names
                or (name not in self.unit_of_parameter and parameters[name].grad is not None)
            )
            for name in trained
        ]
        own_report = [
            float(zlib.crc32("\n".join(self.expected_messages).encode())),
            weight,
            loss,
            float(self.stop_requested),
            self.doubtful_weight,
            *used_flags,
        ]
        self.count_bytes(
            "used",
            count_collective_bytes(
                "all_reduce", 8 * self.world.size * len(own_report), self.world.size
            ),
            computed=True,
        )
        reports = self.world.gather_numbers(own_report)
        if other_ranks := [rank for rank, each in enumerate(reports) if each[0] != reports[0][0]]:
            raise StepFailed(
                f"ranks 0 and {other_ranks[0]} gather and sum the parameters of modules in another "
                "order: a part of the model is used for some samples only; use it for all, "
                f"{ALTERNATIVE_HINT}",
                differs=True,
            )
        columns = list(zip(*reports, strict=True))
        self.totals = [math.fsum(each) for each in columns[1:5]]
        used_by_any = dict(zip(trained, map(any, columns[5:]), strict=True))
        with torch.no_grad():  # otherwise a part is an operation of autograd
            for name, part in self.shard_tensors.items():
                if not used_by_any.get(name):
                    part.grad = None
                elif name in self.unit_of_parameter:
                    part.grad = parameters[name].grad.to_local().reshape(-1)
                else:
                    part.grad = self._sum_whole_gradient(
                        torch.zeros_like(part) if part.grad is None else part.grad
                    )

    def _sum_whole_gradient(self, gradient: Tensor) -> Tensor:
        """Return the sum of the gradient of a parameter that every rank holds whole."""
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
        step_optimizer(self.optimizer)

    # ---- inspection and checkpoints ----------------------------------------------------------
    @contextlib.contextmanager
    def use_evaluation_weights(self) -> Iterator[None]:
        """Return a context in which all parameters are whole on every rank.

        In it each rank can run the model any number of times.
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
        """Return the gradients of the shards of this rank."""
        return {name: part.grad for name, part in self.shard_tensors.items()}

    def gather_optimizer_state(self) -> OptimizerState:
        """Return the optimizer state of the shards of this rank."""
        return {
            name: self.optimizer.state[part]
            for name, part in self.shard_tensors.items()
            if part in self.optimizer.state
        }


class _CollectiveHook:
    """Base class of hooks for the collectives of FSDP2.

    A hook checks each message, counts its bytes and records it.
    """

    def __init__(self, exchange: FullyShardedExchange, unit: str) -> None:
        self.exchange = exchange
        self.unit = unit

    def allocate(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate the buffer of a collective (protocol of FSDP2).

        Args:
            size: Shape of the buffer.
            dtype: Its dtype.
            device: Its device.
        """
        return torch.empty(size, dtype=dtype, device=device)

    def record_message(
        self, action: str, kind: str, collective: str, payload: int
    ) -> contextlib.AbstractContextManager[None]:
        """Check and count a message; return a context that records its time.

        Args:
            action: "gather" or "reduce-scatter".

            kind: The kind under which its bytes are counted.

            collective: Name of the collective operation in the formula of its bytes.

            payload: Bytes of the input.
        """
        exchange = self.exchange
        name = f"{action} {self.unit}"
        exchange.check_message(name)
        exchange.count_bytes(
            kind, count_collective_bytes(collective, payload, exchange.world.size), computed=True
        )
        # a test does not belong to a step, and not to the next one either
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
