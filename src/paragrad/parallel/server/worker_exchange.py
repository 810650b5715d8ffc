"""The exchange of a worker of `server(n, servers=m)`. It sends requests to all servers.

In a step a worker pushes the gradients of its share; each server gets its slice of them. In bsp the
answers have the sums over all shares. Then the worker sends divisor and clip factor to the servers,
which update once and answer with the parameters. Otherwise the worker pushes its mean gradient,
multiplied by its share of a full batch, and pulls before the next step.
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
from paragrad.errors import StepFailed, describe_error
from paragrad.launch.launcher_folder import use_clearable_tempdir
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
    partition_parameters,
    scatter_vector,
    view_slot_ranges,
)
from paragrad.parallel.server.request_handler import APPLIED
from paragrad.parallel.server.shared_buffer import BufferReader, SharedBuffer
from paragrad.parallel.server.state_message import read_state_message
from paragrad.parallel.server.work_queue import Ticket
from paragrad.record.step_log import StepLog
from paragrad.runtime.peer_processes import PeerProcesses
from paragrad.runtime.stragglers import is_peer_failure
from paragrad.runtime.world import World
from paragrad.strategies.server import Server

# seconds before the first reminder of a request, if a server may have failed
REMINDER_SECONDS = 1.0
# The state of a server has at most so many times the bytes of its slice. (Adam's has two times.)
STATE_FACTOR = 4


def stop_servers(endpoints: ServerEndpoints, seconds: float) -> None:
    """Stop the servers. The process that started them calls this.

    Args:
        endpoints: Where the servers are.
        seconds: Maximum time to wait for an answer.

    Raises:
        StepFailed: A server does not answer.
    """
    with contextlib.closing(
        ServerClient(
            endpoints.server_addresses, 0, KeyPair.generate_pair(), seconds, REMINDER_SECONDS
        )
    ) as client:
        list(
            client.send_requests(
                (server, Header(MessageType.END, endpoints.job), ())
                for server in range(endpoints.servers)
            )
        )


class WorkerExchange(Exchange):
    """The exchange of a worker.

    Args:
        strategy: The resolved strategy.

        replica: What this rank holds of the training.

        world: The world of workers and servers, of the workers, or of this process alone.

        log: The step log.

        endpoints: Where workers and servers are, if workers can come and go; otherwise None.

    Attributes:
        strategy: The resolved strategy.

        log: The step log.

        endpoints: As given.

        partition: The partition of the model over servers.

        known_buffers: On the first worker, buffers as the servers know them, if training can be
            continued; otherwise None.

        step: Number of the step.

        full_batch: Number of samples of a full batch.

        worker_number: Number of the worker.

        sender: A random number of this process.

        ticket: The current ticket, or None.

        worker_world: The world of the workers, or None if they are not ranks of one.

        job: The number of the training.

        client: Sends the requests.

        shared_buffer: The memory of the pushed vectors.

        push_codecs: For each vector, its compression, or None.

        seed: The seed of the job.

        slot_order: (place, (server, number, slot)) of each vector, in the order of requests.

        reader: Reads vectors of the servers.

        versions: Number of updates of each server at the last pull.

        totals: Weight, loss, stop requests and doubtful weight of the step.

        squared_norm: Squared norm of the sum of gradients.

        version: Number of updates of the first server after the last push.

        push_outcome: APPLIED, ALREADY_APPLIED or LATE.

        has_pending_sum: Whether the servers have the sum of a step that is not made yet.

        pulled_values: Values that forward passes change, as they were pulled.
    """

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
        peers: PeerProcesses | None = None
        self.worker_world: World | None = None
        if endpoints:
            self.job = endpoints.job
            servers = endpoints.server_addresses
            self.worker_world = None if strategy.uses_work_queue else world
        else:
            self.worker_world = split_roles(strategy, world)
            # removes what a killed server of this host left, when this process ends
            use_clearable_tempdir()
            self.job, shared, peers = exchange_endpoints(strategy, world, keys.public)
            servers = shared[strategy.workers :]
            # A server rejects a worker for good if it connects before its key is allowed.
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
            peers=peers,
        )
        obstacle = (
            "the servers are on several hosts"
            if not all(each.is_local for each in servers)
            else (
                "a late worker may write the next ones while they are read"
                if strategy.backup
                else ""
            )
        )
        self.shared_buffer = SharedBuffer(
            [(slot.dtype, slot.elements) for _, _, slot in self.partition.list_slots()], obstacle
        )
        self.push_codecs = [
            build_push_codec(strategy, slot) for _, _, slot in self.partition.list_slots()
        ]
        self.seed = replica.seed
        # Each worker begins with another server. Otherwise all would fill the link of the same one
        # while other links are idle.
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
        self.has_pending_sum = False
        self.pulled_values: list[Tensor] = []

    # ---- in a step ---------------------------------------------------------------------------
    def take_ticket(self, ticket: Ticket) -> None:
        """Work for a ticket from here on.

        Args:
            ticket: The ticket.
        """
        self.ticket = ticket

    def begin(self) -> None:
        super().begin()
        self.refuse_refrozen()
        self.push_outcome = APPLIED
        # the last step was computed without its update, to inspect it
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
        """Whether (gradients, parameters) are exchanged in shared memory.

        That depends on the system, so the servers are asked once.
        """
        obstacles = [self.shared_buffer.obstacle, self.shared_buffer.obstacle]
        requests = (
            (
                server,
                self._make_header(MessageType.PROBE, is_shared=True),
                (b"", self.shared_buffer.get_location(0)),
            )
            for server in self._list_servers()
        )
        for server, header, rest in self.client.send_requests(
            requests if self.shared_buffer.is_shared else ()
        ):
            if not header.numbers[0]:
                obstacles[0] = f"server {server} cannot read them"
            obstacles[1] = (
                obstacles[1] or bytes(rest[0]).decode() or self.reader.find_obstacle(rest[1])
            )
        for what, obstacle in zip(("gradients", "parameters"), obstacles, strict=True):
            self.log.write_choice(
                what,
                "travel" if obstacle else "lie in shared memory",
                obstacle or "servers and workers are on one host",
            )
        return not obstacles[0], not obstacles[1]

    def _push_gradients(
        self, numbers: tuple[float, ...], ticket: int, shares: int = 1, share: int = 0
    ) -> None:
        """Push the gradients of a share to all servers.

        `shares` is the number of shares of a step. In bsp the answers have the sums over all
        shares, equal from every server, and the squared norm of each server's slice.
        """
        values = [
            each.detach()
            for each in self.partition.collect_tensors(self.loss_module.model)[
                len(self.partition.parameters) :
            ]
        ]
        is_shared, _ = self.shared_memory_use
        gradients = [
            *(each.grad for each in self.partition.parameters),
            *(
                self._scale_change(new, old)
                for new, old in zip(values, self.pulled_values, strict=True)
            ),
        ]

        def make_requests() -> Iterator[tuple[int, Header, Any]]:
            for place, (server, number, slot) in self.slot_order:
                vector = self.shared_buffer.vectors[place]
                push_codec = self.push_codecs[place]
                fill_vector(slot, gradients, vector)  # meanwhile the vector before this one travels
                frame = (
                    push_codec.encode_vector(vector, self.seed, ticket, share, place)
                    if push_codec
                    else self.shared_buffer.make_frame(place, is_shared)
                )
                self.count_bytes(
                    "gradients", push_codec.nbytes if push_codec else vector.nbytes, computed=False
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
                        is_shared=is_shared and not push_codec,
                        numbers=numbers,
                    ),
                    (mark_gradients(slot, gradients), frame),
                )

        squares: dict[int, float] = {}
        with self.log.record_detail("push", "wait"):
            for server, header, _ in self.client.send_requests(make_requests()):
                if self.strategy.uses_work_queue:
                    if not server:  # the record has the answer of the first server
                        self.push_outcome = int(header.numbers[0])
                        self.version = header.version
                else:
                    self.totals = list(header.numbers[:4])
                    squares[server] = header.numbers[4]
        self.squared_norm = sum(squares.values())

    def _send_changed_buffers(self) -> None:
        """Send the buffers that a forward pass changed to the first server.

        Another process can continue the training with them. They are exact and equal on all
        workers, so only the first worker sends them.
        """
        if self.known_buffers is None:
            return
        buffers = collect_model_buffers(self.loss_module.model)
        if changed := {
            name: each
            for name, each in buffers.items()
            if not is_same_value(each, self.known_buffers.get(name))
        }:
            text = serialize_tensors(changed)
            self.count_bytes("beside", len(text), computed=False)
            list(self.client.send_requests([(0, self._make_header(MessageType.BUFFERS), (text,))]))
            self.known_buffers |= {name: each.detach().clone() for name, each in changed.items()}

    def _scale_change(self, new: Tensor, old: Tensor) -> Tensor:
        """Return a change by forward passes, multiplied by the share of a full batch.

        In a synchronous strategy it is not scaled; the server takes the mean over shares.
        """
        # The difference of equal infinities, as in a mask, must be 0 and not NaN.
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
        """Divide by the weight, unless the servers do so in the update.

        Args:
            weight: The weight of the samples.
        """
        self.weight = weight
        if not self.strategy.is_synchronous:
            super().average(weight)

    def refuse_zero_weight(self) -> None:
        if not self.strategy.uses_work_queue:
            super().refuse_zero_weight()

    @property
    def steps_alone(self) -> bool:  # type: ignore[override]
        """Whether this rank updates with the gradient of its own share only."""
        return not self.strategy.is_synchronous

    @property
    def already_applied(self) -> bool:  # type: ignore[override]
        """Whether the share was applied before, or came too late."""
        return self.push_outcome != APPLIED

    def update(self) -> None:
        # schedulers check this flag to see that the optimizer stepped
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        ticket = (
            self.ticket.number
            if self.ticket
            else self.step * self.strategy.workers + self.worker_number
        )
        numbers = (
            self.weight,
            float(self.ticket.workers if self.ticket else 0),
            0.0,
            float(self.local_samples),
        )
        if not self.strategy.uses_work_queue:
            factor = compute_clip_factor(math.sqrt(self.squared_norm) / self.weight, self.clip_norm)
            self._load_parameters(MessageType.UPDATE, numbers=(self.weight, factor))
            self.has_pending_sum = False
        elif self.strategy.is_synchronous:
            assert self.ticket is not None  # without a ticket another strategy is used
            # a share of other parameters than those after this update is not used
            self.versions = [self.ticket.after]
            self._push_gradients(numbers, ticket, self.ticket.wanted)
        elif not self.weight:  # no sample counts; the ticket is done
            for each in self.partition.parameters:
                each.grad = None
            self._push_gradients(numbers, ticket)
        else:
            # by the norm of this share, because the others are unknown
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.partition.parameters, self.clip_norm)
            gradients = [each.grad for each in self.partition.parameters if each.grad is not None]
            torch._foreach_mul_(gradients, self.local_samples / self.full_batch)
            self._push_gradients(numbers, ticket)
        self.step += 1

    # ---- parameters --------------------------------------------------------------------------
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
        """Load parameters and buffers from the servers.

        With these the worker continues a training of other processes.
        """
        self._pull_parameters()
        for _, _, rest in self.client.send_requests(
            [(0, self._make_header(MessageType.BUFFERS), ())]
        ):
            set_model_buffers(self.loss_module.model, deserialize_tensors(bytes(rest[0])))

    def _load_parameters(self, kind: MessageType, numbers: tuple[float, ...]) -> None:
        """Request vectors from every server and copy them into the parameters."""
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
        is_shared = self.shared_memory_use[1] and kind == MessageType.UPDATE
        requests = [
            (
                server,
                self._make_header(
                    kind, slot=number, share=turn, is_shared=is_shared, numbers=numbers
                ),
                (),
            )
            for turn, (_, (server, number, slot)) in enumerate(self.slot_order)
            if not (slot.is_added and kind in (MessageType.GRADIENTS, MessageType.UPDATE))
        ]
        for server, header, rest in self.client.send_requests(requests):
            slot = self.partition.slots[server][header.slot]
            if (
                header.kind != MessageType.VALUES
                or header.elements != slot.elements
                or header.dtype != slot.dtype
                or (header.is_shared and not is_shared)
            ):
                raise StepFailed(
                    f"server {server} answered with another vector than the one asked for"
                )
            try:
                vector = self.reader.read_vector(header, rest[1])
            except InvalidMessage as error:
                raise StepFailed(
                    f"server {server} answered with a vector, and {error.sender_text}"
                ) from error
            yield server, slot, header, bytes(rest[0]), vector

    # ---- inspection and checkpoints ----------------------------------------------------------
    def gather_gradients(self) -> dict[str, Tensor | None]:
        if self.strategy.uses_work_queue:
            return super().gather_gradients()
        gradients: dict[str, Tensor | None] = {
            name: None for name, _ in self.loss_module.model.named_parameters()
        }
        whole_gradients = [torch.zeros_like(each) for each in self.partition.parameters]
        for _, slot, header, marks, vector in self._request_vectors(MessageType.GRADIENTS, ()):
            targets = view_slot_ranges(slot, whole_gradients)
            torch._foreach_copy_(targets, slot.split_vector(vector))
            if header.numbers[0]:  # the gradients are not divided yet
                torch._foreach_div_(targets, self.weight)
            gradients.update(
                {
                    self.partition.names[each.index]: whole_gradients[each.index]
                    for each, has_gradient in zip(slot.ranges, marks, strict=True)
                    if has_gradient
                }
            )
        return gradients

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
        """Use the parameters of the servers during the context, while no worker pushes.

        Collective: all workers call it together.
        """
        if not self.strategy.uses_work_queue and not for_tests:
            yield
            return
        original = [
            each.detach().clone() for each in self.partition.collect_tensors(self.loss_module.model)
        ]
        # A worker that is ahead waits for this one, but it must reach this point too.
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
                    original,
                )

    def _wait_for_workers(self) -> None:
        # with a work queue no worker has a ticket of training now
        if self.worker_world is not None:
            try:
                self.worker_world.barrier()
            except Exception as error:
                cause = self.find_cause(error)
                if cause is error:  # an error that is its own cause would be a circle
                    raise
                raise cause from error

    def find_cause(self, error: Exception) -> Exception:
        """Return the error that names all ranks that ended, if another one ended with them.

        Args:
            error: The error.
        """
        if self.client.peers is not None and is_peer_failure(describe_error(error)):
            try:
                self.client.peers.refuse_ended()
            except StepFailed as ended:
                return ended
        return error

    def gather_optimizer_state(self) -> OptimizerState:
        parts = []
        for server, header, rest in self.client.send_requests(
            (server, self._make_header(MessageType.STATE), ()) for server in self._list_servers()
        ):
            specs = [
                build_shard_spec(each, self.partition.names, self.partition.parameters)
                for slot in self.partition.slots[server]
                if not slot.is_added
                for each in slot.ranges
            ]
            states, settings = read_state_message(
                bytes(rest[0]), self.reader.read_vector(header, rest[1])
            )
            # the workers' optimizer makes no steps; of several servers all change them alike
            for group, changed in zip(self.optimizer.param_groups, settings, strict=True):
                group.update(changed)
            parts += list(zip(specs, states, strict=True))
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
