"""Keep the values of a whole model once on each host, until every rank holds its part.

The first rank of a host builds the model. It moves the values into memory that the ranks of the
host share. The other ranks receive the modules by pickle, in which a storage is a place in that
memory. So parameters, buffers, tied tensors, views of one storage, and the Python state of modules
are transferred, and nothing is built twice.

Some models cannot be pickled (parametrizations, handles of the system). The other ranks then build
the model themselves, one after another, and free their own values at once.

Every rank maps the memory copy-on-write. So each rank has its own model and may change it, and
values that no rank writes exist only once.
"""

from __future__ import annotations

import copy
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.storage import UntypedStorage

from paragrad.errors import describe_error
from paragrad.launch.tensorless_pickle import dump_tensorless, load_tensorless
from paragrad.record.step_log import StepLog
from paragrad.runtime import stragglers
from paragrad.runtime.allocator import return_freed_memory
from paragrad.runtime.generators import capture_generators, restore_generators
from paragrad.runtime.world import World
from paragrad.shm.region import (
    TOKEN_BYTES,
    CreatedRegion,
    SharedRegion,
    align_to_cache_line,
    compute_offsets,
    explain_unavailable_shm,
    open_region,
    read_boot_id,
)

# Smaller storages belong to each rank: a forward may resize them (observers of quantization do),
# and memory that is mapped cannot be resized.
SHARED_BYTES = 4096
# offset of the pickle in the shared memory; the storages follow it
PICKLE_OFFSET = align_to_cache_line(TOKEN_BYTES)


@dataclass(frozen=True)
class Hosts:
    """Which ranks are on the same host.

    Attributes:
        first_ranks: For each rank, the first rank of its host.
    """

    first_ranks: Sequence[int]

    @classmethod
    def find_hosts(cls, world: World) -> Hosts:
        """Find the hosts of all ranks. Collective.

        Here a host is a set of ranks that can open the memory of one another: same boot, process
        namespace and user.

        Args:
            world: All ranks.
        """
        name = (
            f"rank {world.rank}"
            if explain_unavailable_shm()
            else f"{read_boot_id()} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"
        )
        names = world.broadcast_object(world.gather_objects(name))
        return cls([names.index(each) for each in names])

    @property
    def has_shared_host(self) -> bool:
        """Whether a host has several ranks."""
        return len(set(self.first_ranks)) < len(self.first_ranks)

    def take_turns(self, world: World, ranks: Sequence[int]) -> Iterator[bool]:
        """Let some ranks take turns: on every host one after another, all hosts at once.

        Collective.

        Args:
            world: All ranks.
            ranks: The ranks that take turns.

        Yields:
            For each turn, whether it belongs to this rank.
        """
        turn_of: dict[int, int] = {}
        turn_counts: Counter[int] = Counter()
        for rank in ranks:
            turn_of[rank] = turn_counts[self.first_ranks[rank]]
            turn_counts[self.first_ranks[rank]] += 1
        for turn in range(max(turn_counts.values(), default=0)):
            yield turn_of.get(world.rank) == turn
            world.barrier()


@dataclass(frozen=True)
class InitialModel:
    """The whole model with which a rank starts.

    Attributes:
        model: The model.
        hosts: Which ranks are on the same host, or None.
        choice: For the record: in how many copies the model is on a host. Empty if there was
            nothing to choose.
        reason: The reason for the choice.
    """

    model: nn.Module
    hosts: Hosts | None = None
    choice: str = ""
    reason: str = ""

    def record_choice(self, log: StepLog, world: World) -> Hosts | None:
        """Write the choice into the record.

        Args:
            log: The record of this rank.
            world: All ranks.

        Returns:
            The hosts.
        """
        if self.choice and world.rank == 0:
            log.write_choice("whole model", self.choice, self.reason)
        return self.hosts


@dataclass(frozen=True)
class Offer:
    """What the first rank of a host offers to the other ranks.

    Attributes:
        address: Address of the shared memory.

        pickle_bytes: Size of the pickle of the model, in bytes.

        storage_sizes: Sizes of the storages, in bytes.

        reason: Why there is no pickle, or no memory.
    """

    address: str = ""
    pickle_bytes: int = 0
    storage_sizes: tuple[int, ...] = ()
    reason: str = ""


def build_shared_model(world: World, build_model: Callable[[], nn.Module]) -> InitialModel:
    """Build a model on one rank of every host, and share it with the others. Collective.

    The random generators of all ranks are then as the build leaves them.

    Args:
        world: All ranks.
        build_model: Builds the model.

    Returns:
        The model of this rank.
    """
    hosts = Hosts.find_hosts(world)
    if not hosts.has_shared_host:
        return InitialModel(build_model(), hosts)
    if hosts.first_ranks[world.rank] != world.rank:
        model = None
        with stragglers.explain_timeout(
            "the first rank of this host builds the model, once for all of them"
        ):
            offer = _gather_offers(world, Offer())[hosts.first_ranks[world.rank]]
        try:
            model = _unpickle_offered_model(offer)
            failure_reason = ""
        except Exception as error:
            failure_reason = offer.reason or describe_error(error)
        return _build_where_missing(
            world, hosts, model, failure_reason, lambda: _build_and_adopt(build_model, offer)
        )
    model = build_model()
    region, offer = _offer_model(model, with_modules=True)
    _gather_offers(world, offer)
    try:
        return _build_where_missing(world, hosts, model, "", lambda: model)
    finally:
        if region is not None:
            region.close_descriptor()


def share_model_values(world: World, model: nn.Module) -> InitialModel:
    """Share the values of a model that every rank has with the same values. Collective.

    Afterwards the values on one rank of every host serve all ranks of that host.

    Args:
        world: All ranks.
        model: The model of this rank.

    Returns:
        The same model.
    """
    hosts = Hosts.find_hosts(world)
    _adopt_first_rank_values(world, hosts, model)
    return InitialModel(model, hosts)


def load_shared_model(
    world: World, hosts: Hosts | None, model: nn.Module, load_checkpoint: Callable[[bool], None]
) -> None:
    """Load a checkpoint; one rank of every host reads the values of the model. Collective.

    Args:
        world: All ranks.

        hosts: Which ranks are on the same host; None: every rank reads the values.

        model: The model of this rank.

        load_checkpoint: load_checkpoint(with_values) loads the checkpoint, with or without the
            values of the model.
    """
    load_checkpoint(hosts is None or hosts.first_ranks[world.rank] == world.rank)
    if hosts is not None and not _adopt_first_rank_values(world, hosts, model):
        load_checkpoint(True)


def _adopt_first_rank_values(world: World, hosts: Hosts, model: nn.Module) -> bool:
    """Take over the values of the first rank of the host. Collective.

    Returns whether that worked.
    """
    first_rank = hosts.first_ranks[world.rank]
    if not hosts.has_shared_host:
        return True
    region, offer = (
        _offer_model(model, with_modules=False) if first_rank == world.rank else (None, Offer())
    )
    offer = _gather_offers(world, offer)[first_rank]
    has_values = first_rank == world.rank or _adopt_values(model, offer)
    world.barrier()
    if region is not None:
        region.close_descriptor()
    return has_values


def _gather_offers(world: World, offer: Offer) -> list[Offer]:
    return world.broadcast_object(world.gather_objects(offer))  # type: ignore[no-any-return]


def _build_where_missing(
    world: World,
    hosts: Hosts,
    model: nn.Module | None,
    failure_reason: str,
    build_model: Callable[[], nn.Module],
) -> InitialModel:
    """Build the model on ranks that did not get it, one after another."""
    reasons = world.broadcast_object(world.gather_objects(failure_reason))
    for is_my_turn in hosts.take_turns(
        world, [rank for rank, reason in enumerate(reasons) if reason]
    ):
        if is_my_turn:
            model = build_model()
    assert model is not None
    if any(reasons):
        return InitialModel(model, hosts, "built by every rank", next(filter(None, reasons)))
    return InitialModel(
        model,
        hosts,
        "built once on each host",
        "its ranks share the values until each has its part",
    )


# ---- one rank offers its values, and the others take them over -------------------------------
def _offer_model(model: nn.Module, with_modules: bool) -> tuple[CreatedRegion | None, Offer]:
    """Move the values of a model into memory that other ranks can open.

    With `with_modules`, the modules are offered too.
    """
    storages = _list_storages(model)
    pickle_data = b""
    reason = ""
    if with_modules:
        try:
            pickle_data, storages = dump_tensorless((model, capture_generators()), storages)
        except Exception as error:
            reason = describe_error(error)
    sizes = tuple(storage.nbytes() for storage in storages)
    offsets = compute_offsets(PICKLE_OFFSET + len(pickle_data), sizes)
    users: dict[int, list[Tensor]] = {}
    for tensor in _list_host_tensors(model):
        users.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    region = None
    try:
        region = CreatedRegion(offsets[-1], reserved=0)
        mapped = SharedRegion(region.descriptor, region.size, private=True)
        region.reserve_pages(0, offsets[0])
        region.map[PICKLE_OFFSET : PICKLE_OFFSET + len(pickle_data)] = pickle_data
        # one after another: each storage is freed after it was moved
        for offset, size in zip(offsets, sizes, strict=False):
            region.reserve_pages(offset, size)
            _move_storage(
                storages.pop(0),
                region.bytes[offset : offset + size],
                mapped.make_storage(offset, size),
                users,
            )
    except (RuntimeError, OSError) as error:
        if region is not None:
            region.close_descriptor()  # no other rank opens it: this frees the memory
        return None, Offer(reason=str(error))
    return_freed_memory()
    return region, Offer(region.address, len(pickle_data), sizes, reason)


def _move_storage(
    storage: UntypedStorage, place: Tensor, mapped: UntypedStorage, users: dict[int, list[Tensor]]
) -> None:
    """Copy the bytes of a storage to another place; if it is large, move its tensors there."""
    place.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    for tensor in users.pop(storage._cdata, ()) if len(place) >= SHARED_BYTES else ():
        _rebind_tensor(tensor, mapped)


def _open_storage(region: SharedRegion, offset: int, size: int) -> UntypedStorage:
    """Return the bytes of a storage in shared memory: mapped if it is large, otherwise copied."""
    storage = region.make_storage(offset, size)
    return storage if size >= SHARED_BYTES else storage.clone()


def _unpickle_offered_model(offer: Offer) -> nn.Module:
    """Return the model that another rank built.

    Raises an error if there is none, or if it cannot be unpickled here.
    """
    if not offer.pickle_bytes:
        raise RuntimeError(offer.reason)
    region = open_region(offer.address, private=True)
    storages = [
        _open_storage(region, *each)
        for each in zip(
            compute_offsets(PICKLE_OFFSET + offer.pickle_bytes, offer.storage_sizes),
            offer.storage_sizes,
            strict=False,
        )
    ]
    model, generators = load_tensorless(
        region.map[PICKLE_OFFSET : PICKLE_OFFSET + offer.pickle_bytes], storages
    )
    restore_generators(generators)
    _register_output_capture(model)
    return model


def _register_output_capture(model: nn.Module) -> None:
    """Register the modules of a model with transformers.

    When transformers builds a model, it registers in this process which modules' outputs a forward
    pass collects (hidden states, logits of routers). Without that these outputs would be missing.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if (registry := getattr(capturing, "_CAN_RECORD_REGISTRY", None)) is None:
        return
    for module in model.modules():
        if (recorded := getattr(module, "_can_record_outputs", None)) is not None:
            registry[module] = recorded


def _build_and_adopt(build_model: Callable[[], nn.Module], offer: Offer) -> nn.Module:
    model = build_model()
    _adopt_values(model, offer)
    return model


def _adopt_values(model: nn.Module, offer: Offer) -> bool:
    """Take over the values that another rank offers; return whether that worked.

    It does not work if the tensors differ, or if the memory cannot be opened.
    """
    storages = _list_storages(model)
    if not offer.address or [storage.nbytes() for storage in storages] != list(
        offer.storage_sizes[: len(storages)]
    ):
        return False
    try:
        region = open_region(offer.address, private=True)
        offsets = compute_offsets(PICKLE_OFFSET + offer.pickle_bytes, offer.storage_sizes)
    except RuntimeError:
        return False
    new_storages = {
        each._cdata: _open_storage(region, offset, each.nbytes())
        for each, offset in zip(storages, offsets, strict=False)
    }
    for tensor in _list_host_tensors(model):
        _rebind_tensor(tensor, new_storages[tensor.untyped_storage()._cdata])
    del storages
    return_freed_memory()
    return True


# ---- the values of a model -------------------------------------------------------------------
def copy_modules(model: nn.Module) -> nn.Module:
    """Copy the modules of a model; the copy uses the same values.

    Args:
        model: The model.

    Returns:
        The copy.
    """
    return copy.deepcopy(
        model,
        {
            **{
                id(each): nn.Parameter(each.detach(), requires_grad=each.requires_grad)
                for each in model.parameters()
            },
            **{id(each): each.detach() for each in model.buffers()},
        },
    )


def make_values_private(model: nn.Module) -> None:
    """Give a model its own values, without more memory than it needs.

    Args:
        model: The model, changed in place.
    """
    tensors = _list_host_tensors(model)
    users = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
    copies: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if users[storage._cdata] == 1:
            tensor.data = tensor.data.clone()
            continue
        if storage._cdata not in copies:  # views keep sharing one storage
            copies[storage._cdata] = storage.clone()
        _rebind_tensor(tensor, copies[storage._cdata])


def _list_host_tensors(model: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers that have values in host memory."""
    return [
        each
        for each in (*model.parameters(), *model.buffers())
        if type(each.data) is Tensor and each.layout == torch.strided and each.device.type == "cpu"
    ]


def _list_storages(model: nn.Module) -> list[UntypedStorage]:
    return list(
        {
            tensor.untyped_storage()._cdata: tensor.untyped_storage()
            for tensor in _list_host_tensors(model)
        }.values()
    )


def _rebind_tensor(tensor: Tensor, storage: UntypedStorage) -> None:
    """Set a tensor to another storage with the same bytes."""
    tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )
