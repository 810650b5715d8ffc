"""The exchange of a worker of `server(n, servers=m)`, which asks all servers.

In a step a worker pushes its share's gradients, each server its slice of them. Under bsp it is
told the sums of all shares, and by how much they are to be divided and clipped it tells the
servers, which update once and answer with the parameters. Otherwise it pushes its mean
gradient, as much of a full batch's as its share is of one, and pulls before it computes again.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from paragrad.engine.exchange import Exchange, Replica
from paragrad.engine.layout import OptimizerState, assemble_optimizer_state
from paragrad.engine.optimizer.modes import has_modes
from paragrad.engine.optimizer.update_probe import compute_clip_factor
from paragrad.engine.state.values import is_same_value
from paragrad.errors import StepFailed
from paragrad.parallel.server.client import ServerClient
from paragrad.parallel.server.compressed_push import build_push_codec
from paragrad.parallel.server.curve_keys import KeyPair
from paragrad.parallel.server.endpoints import ServerEndpoints, exchange_endpoints, split_roles
from paragrad.parallel.server.message_header import Header, InvalidMessage, MessageType
from paragrad.parallel.server.model_buffers import (
    collect_model_buffers,
    deserialize_tensors,
    estimate_buffer_bytes,
    serialize_tensors,
    set_model_buffers,
)
from paragrad.parallel.server.parameter_partition import (
    VectorSlot,
    build_shard_spec,
    fill_vector,
    mark_gradients,
    parse_optimizer_state,
    partition_parameters,
    scatter_vector,
    view_slot_ranges,
)
from paragrad.parallel.server.request_handler import APPLIED
from paragrad.parallel.server.shared_buffer import BufferReader, SharedBuffer
from paragrad.record.step_log import StepLog
from paragrad.runtime.world import World
from paragrad.strategies.server import Server

# seconds after which a worker reminds of a question, where a server may have died
REMINDER_SECONDS = 1.0
# times its slice that a server's state is at most, as it travels: Adam keeps two of it
STATE_FACTOR = 4


def stop_servers(endpoints: ServerEndpoints, seconds: float) -> None:
    """Servers are told to end, by whoever started them. Raises StepFailed where one does not
    answer.
    """
    with contextlib.closing(
        ServerClient(
            endpoints.server_addresses, 0, KeyPair.generate_pair(), seconds, REMINDER_SECONDS
        )
    ) as calling:
        list(
            calling.send_requests(
                (server, Header(MessageType.END, endpoints.job), ())
                for server in range(endpoints.servers)
            )
        )


class WorkerExchange(Exchange):
    def __init__(
        self,
        strategy: Server,
        replica: Replica,
        world: World,
        log: StepLog,
        endpoints: ServerEndpoints | None,
    ) -> None:
        super().__init__(replica)
        self.strategy = strategy
        self.log = log
        self.endpoints = endpoints
        keys = (endpoints and endpoints.keys) or KeyPair.generate_pair()
        self.partition = partition_parameters(
            strategy, replica.optimizer, replica.module.model, replica.changed_by_forward
        )
        # as servers know it, where somebody may have to go on with it
        self.known_buffers: dict[str, Tensor] | None = None
        if endpoints and not strategy.uses_work_queue and not world.rank:
            self.known_buffers = {
                name: each.clone()
                for name, each in collect_model_buffers(replica.module.model).items()
            }
        self.step = replica.completed_steps
        self.full_batch = replica.full_batch
        self.worker_number = world.rank
        self.sender = secrets.randbits(63)
        self.ticket = endpoints.ticket if endpoints else None
        self.worker_world: World | None = None  # where they are ranks of one
        if endpoints:
            self.job = endpoints.job
            servers = endpoints.server_addresses
            self.worker_world = None if strategy.uses_work_queue else world
        else:
            self.worker_world = split_roles(strategy, world)
            self.job, told = exchange_endpoints(world, keys.public)
            servers = told[strategy.workers :]
            # who comes before it is allowed to is sent away for good
            world.barrier()
        longest = max(
            STATE_FACTOR * self.partition.longest_bytes,
            estimate_buffer_bytes(replica.module.model) if endpoints else 0,
        )
        self.client = ServerClient(
            servers,
            longest,
            keys,
            world.timeout,
            REMINDER_SECONDS if strategy.uses_work_queue and endpoints else math.inf,
            queue_address=endpoints.queue_address
            if endpoints and endpoints.known_addresses
            else None,
        )
        against = (
            "the servers are on several hosts"
            if not all(each.is_local for each in servers)
            else (
                "who is late may be at the next ones when they are read" if strategy.backup else ""
            )
        )
        self.shared_buffer = SharedBuffer(
            [(slot.dtype, slot.elements) for _, _, slot in self.partition.list_slots()], against
        )
        self.push_codecs = [
            build_push_codec(strategy, slot) for _, _, slot in self.partition.list_slots()
        ]
        self.seed = replica.seed
        # all workers at once to the same server would fill its link while those of the others
        # rest
        self.slot_order = sorted(
            enumerate(self.partition.list_slots()),
            key=lambda each: (each[1][0] - self.worker_number) % strategy.servers,
        )
        self.reader = BufferReader(strategy.servers)
        self.peak_bytes = sum(each.nbytes for each in self.shared_buffer.vectors)
        self.versions = [0] * strategy.servers
        self.totals = [0.0] * 4
        self.squared_norm = 0.0
        self.version = 0
        self.push_outcome = APPLIED
        # the servers have the sum of a step that is not made yet
        self.has_pending_sum = False
        self.pulled_values: list[Tensor] = []  # what forwards change, as it was pulled

    # ---- in a step ---------------------------------------------------------------------------
    def begin(self) -> None:
        super().begin()
        self.refuse_refrozen()
        self.push_outcome = APPLIED
        # it was made up to its update, to be looked at
        if self.has_pending_sum:
            list(
                self.client.send_requests(
                    (server, self._make_header(MessageType.FORGET), ())
                    for server in self._list_servers()
                )
            )
            self.has_pending_sum = False
        if self.strategy.uses_work_queue:
            self._pull_parameters()

    def finish(self, weight: float, loss: float) -> None:
        self.totals = [weight, loss, float(self.stop_requested), self.doubtful_weight]
        if not self.strategy.uses_work_queue:
            self.has_pending_sum = True
            numbers = (
                weight,
                loss,
                float(self.stop_requested),
                self.doubtful_weight,
                float(self.local_samples),
            )
            self._send_changed_buffers()
            self._push_gradients(numbers, self.step, self.strategy.share_count, self.worker_number)

    @cached_property
    def shared_memory_use(self) -> tuple[bool, bool]:
        """Do gradients, and parameters, lie where the other side can read them? That depends on
        the system: servers are asked, once.
        """
        against = [self.shared_buffer.obstacle, self.shared_buffer.obstacle]
        questions = (
            (
                server,
                self._make_header(MessageType.PROBE, is_shared=True),
                (b"", self.shared_buffer.get_location(0)),
            )
            for server in self._list_servers()
        )
        for server, header, rest in self.client.send_requests(
            questions if self.shared_buffer.is_shared else ()
        ):
            if not header.numbers[0]:
                against[0] = f"server {server} cannot read them"
            against[1] = against[1] or bytes(rest[0]).decode() or self.reader.find_obstacle(rest[1])
        for what, why in zip(("gradients", "parameters"), against, strict=True):
            self.log.write_choice(
                what,
                "travel" if why else "lie in shared memory",
                why or "servers and workers are on one host",
            )
        return not against[0], not against[1]

    def _push_gradients(
        self, numbers: tuple[float, ...], ticket: int, shares: int = 1, share: int = 0
    ) -> None:
        """shares: that make a step. Where all wait for all, what comes back are the sums over
        all shares, the same from every server, and of each the square of its part of the
        norm.
        """
        own = [
            each.detach()
            for each in self.partition.collect_tensors(self.loss_module.model)[
                len(self.partition.parameters) :
            ]
        ]
        lies, _ = self.shared_memory_use
        gradients = [
            *(each.grad for each in self.partition.parameters),
            *(
                self._scale_change(new, old)
                for new, old in zip(own, self.pulled_values, strict=True)
            ),
        ]

        def questions() -> Iterator[tuple[int, Header, Any]]:
            for place, (server, number, slot) in self.slot_order:
                vector = self.shared_buffer.vectors[place]
                parcel = self.push_codecs[place]
                fill_vector(slot, gradients, vector)  # while what came before travels
                frame = (
                    parcel.encode_vector(vector, self.seed, ticket, share, place)
                    if parcel
                    else self.shared_buffer.make_frame(place, lies)
                )
                self.count_bytes(
                    "gradients", parcel.nbytes if parcel else vector.nbytes, computed=False
                )
                yield (
                    server,
                    self._make_header(
                        MessageType.PUSH,
                        step=ticket,
                        share=share,
                        shares=shares,
                        slot=number,
                        dtype=slot.dtype,
                        elements=slot.elements,
                        version=self.versions[server],
                        is_shared=lies and not parcel,
                        numbers=numbers,
                    ),
                    (mark_gradients(slot, gradients), frame),
                )

        squares: dict[int, float] = {}
        with self.log.record_detail("push", "wait"):
            for server, header, _ in self.client.send_requests(questions()):
                if self.strategy.uses_work_queue:
                    if not server:  # what the first one says is recorded
                        self.push_outcome = int(header.numbers[0])
                        self.version = header.version
                else:
                    self.totals = list(header.numbers[:4])
                    squares[server] = header.numbers[4]
        self.squared_norm = sum(squares.values())

    def _send_changed_buffers(self) -> None:
        """What a forward changed beside the parameters, for whoever may have to go on. It is
        exact, and so the same on all workers: the first one tells.
        """
        if self.known_buffers is None:
            return
        now = collect_model_buffers(self.loss_module.model)
        if changed := {
            name: each
            for name, each in now.items()
            if not is_same_value(each, self.known_buffers.get(name))
        }:
            text = serialize_tensors(changed)
            self.count_bytes("beside", len(text), computed=False)
            list(self.client.send_requests([(0, self._make_header(MessageType.BUFFERS), (text,))]))
            self.known_buffers |= {name: each.detach().clone() for name, each in changed.items()}

    def _scale_change(self, new: Tensor, old: Tensor) -> Tensor:
        """Of what a forward changed, as much as its share is of a full batch; under backup the
        server takes the mean.
        """
        # not of infinity from itself: a mask's
        change = torch.where(new == old, torch.zeros_like(new), new - old)
        return (
            change
            if self.strategy.is_synchronous or not change.is_floating_point()
            else change * (self.local_samples / self.full_batch)
        )

    def _list_servers(self) -> range:
        return range(self.strategy.servers)

    def reduce_totals(self) -> list[float]:
        return self.totals

    def average(self, weight: float) -> None:
        """The servers do, in the update."""
        self.weight = weight
        if not self.strategy.is_synchronous:
            super().average(weight)

    def refuse_zero_weight(self) -> None:
        if not self.strategy.uses_work_queue:
            super().refuse_zero_weight()

    @property
    def already_applied(self) -> bool:  # type: ignore[override]
        return self.push_outcome != APPLIED

    def update(self) -> None:
        # schedulers want to know
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        ticket = (
            self.ticket.number
            if self.ticket
            else self.step * self.strategy.workers + self.worker_number
        )
        numbers = (
            self.totals[0],
            float(self.ticket.workers if self.ticket else 0),
            0.0,
            float(self.local_samples),
        )
        if not self.strategy.uses_work_queue:
            factor = compute_clip_factor(math.sqrt(self.squared_norm) / self.weight, self.clip_norm)
            self._load_parameters(MessageType.UPDATE, numbers=(self.weight, factor))
            self.has_pending_sum = False
        elif self.strategy.is_synchronous:
            assert self.ticket is not None  # it is handed out, or another strategy
            # who pulled later has done it for nothing
            self.versions = [self.ticket.after]
            self._push_gradients(numbers, ticket, self.ticket.wanted)
        elif not self.weight:  # nothing counts, and that is done
            for each in self.partition.parameters:
                each.grad = None
            self._push_gradients(numbers, ticket)
        else:
            if self.clip_norm is not None:  # by its own: nobody knows the others'
                nn.utils.clip_grad_norm_(self.partition.parameters, self.clip_norm)
            mine = [each.grad for each in self.partition.parameters if each.grad is not None]
            torch._foreach_mul_(mine, self.local_samples / self.full_batch)
            self._push_gradients(numbers, ticket)
        self.step += 1

    # ---- parameters come ---------------------------------------------------------------------
    def _make_header(self, kind: MessageType, **fields: Any) -> Header:
        return Header(
            kind,
            self.job,
            self.sender,
            **{"step": self.step, "shares": self.strategy.share_count, **fields},
        )

    def _pull_parameters(self, for_tests: bool = False, for_step: bool = True) -> None:
        self._load_parameters(MessageType.PULL, numbers=(float(for_tests), float(not for_step)))

    def adopt_server_state(self) -> None:
        """What servers have of a training becomes the model's, where others trained before."""
        self._pull_parameters()
        for _, _, rest in self.client.send_requests(
            [(0, self._make_header(MessageType.BUFFERS), ())]
        ):
            set_model_buffers(self.loss_module.model, deserialize_tensors(bytes(rest[0])))

    def _load_parameters(self, kind: MessageType, numbers: tuple[float, ...]) -> None:
        """Ask every server; what they have becomes the parameters."""
        with self.log.record_detail(kind.name.lower(), "wait"), torch.no_grad():
            tensors = self.partition.collect_tensors(self.loss_module.model)
            for server, slot, header, _, vector in self._request_vectors(kind, numbers):
                scatter_vector(vector, slot, tensors)
                self.versions[server] = header.version
            if self.strategy.uses_work_queue:
                self.pulled_values = [
                    each.detach().clone() for each in tensors[len(self.partition.parameters) :]
                ]

    def _request_vectors(
        self, kind: MessageType, numbers: tuple[float, ...]
    ) -> Iterator[tuple[int, VectorSlot, Header, bytes, Tensor]]:
        lies = self.shared_memory_use[1] and kind == MessageType.UPDATE
        questions = [
            (
                server,
                self._make_header(kind, slot=number, share=turn, is_shared=lies, numbers=numbers),
                (),
            )
            for turn, (_, (server, number, slot)) in enumerate(self.slot_order)
            if not (slot.is_added and kind in (MessageType.GRADIENTS, MessageType.UPDATE))
        ]
        for server, header, rest in self.client.send_requests(questions):
            slot = self.partition.slots[server][header.slot]
            if (
                header.kind != MessageType.VALUES
                or header.elements != slot.elements
                or header.dtype != slot.dtype
                or (header.is_shared and not lies)
            ):
                raise StepFailed(f"server {server} answered with another vector than was asked for")
            try:
                vector = self.reader.read_vector(header, rest[1])
            except InvalidMessage as error:
                raise StepFailed(
                    f"server {server} answered with a vector, and {error.sender_text}"
                ) from error
            yield server, slot, header, bytes(rest[0]), vector

    # ---- what others look at -----------------------------------------------------------------
    def gather_gradients(self) -> dict[str, Tensor | None]:
        if self.strategy.uses_work_queue:
            return super().gather_gradients()
        found: dict[str, Tensor | None] = {
            name: None for name, _ in self.loss_module.model.named_parameters()
        }
        whole = [torch.zeros_like(each) for each in self.partition.parameters]
        for _, slot, header, marked, vector in self._request_vectors(MessageType.GRADIENTS, ()):
            into = view_slot_ranges(slot, whole)
            torch._foreach_copy_(into, slot.split_vector(vector))
            if header.numbers[0]:  # not averaged yet
                torch._foreach_div_(into, self.weight)
            found.update(
                {
                    self.partition.names[each.index]: whole[each.index]
                    for each, there in zip(slot.ranges, marked, strict=True)
                    if there
                }
            )
        return found

    @contextlib.contextmanager
    def use_evaluation_weights(self) -> Iterator[None]:
        with self._use_server_parameters(has_modes(self.optimizer)):
            yield

    def use_effective_weights(self) -> contextlib.AbstractContextManager[None]:
        return (
            self._use_server_parameters(False)
            if self.strategy.uses_work_queue
            else contextlib.nullcontext()
        )

    @contextlib.contextmanager
    def _use_server_parameters(self, for_tests: bool) -> Iterator[None]:
        """The servers' parameters, while no worker pushes. Collective of the workers."""
        if not self.strategy.uses_work_queue and not for_tests:
            yield
            return
        before = [
            each.detach().clone() for each in self.partition.collect_tensors(self.loss_module.model)
        ]
        # who is ahead waits for this one, and must come
        if self.worker_world is not None and self.strategy.staleness_bound is not None:
            list(
                self.client.send_requests(
                    (server, self._make_header(MessageType.EXCLUDE), ())
                    for server in self._list_servers()
                )
            )
        self._wait_for_workers()
        self._pull_parameters(for_tests, for_step=False)
        self._wait_for_workers()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(
                    [
                        each.detach()
                        for each in self.partition.collect_tensors(self.loss_module.model)
                    ],
                    before,
                )

    def _wait_for_workers(self) -> None:
        # otherwise nobody is given something to train now
        if self.worker_world is not None:
            self.worker_world.barrier()

    def gather_optimizer_state(self) -> OptimizerState:
        parts = []
        for server, header, rest in self.client.send_requests(
            (server, self._make_header(MessageType.STATE), ()) for server in self._list_servers()
        ):
            stretches = [
                build_shard_spec(each, self.partition.names, self.partition.parameters)
                for slot in self.partition.slots[server]
                if not slot.is_added
                for each in slot.ranges
            ]
            found = parse_optimizer_state(
                bytes(rest[0]), self.reader.read_vector(header, rest[1]), len(stretches)
            )
            parts += list(zip(stretches, found, strict=True))
        return assemble_optimizer_state(parts)

    def dismiss_servers(self) -> None:
        if self.endpoints is None:
            list(
                self.client.send_requests(
                    (server, self._make_header(MessageType.END), ())
                    for server in self._list_servers()
                )
            )

    def close(self) -> None:
        self.client.close()
        self.shared_buffer.close()
