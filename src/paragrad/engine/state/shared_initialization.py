"""The values of a whole model, once on each host, until every rank holds its part.

The first rank of a host builds the model, and moves its values into memory that the ranks of
the host share. The others get its modules by pickle, in which a storage is a place of that
memory: parameters, buffers, tied ones, views of one storage, and what the modules keep in
Python come over, and nothing is built twice. What cannot be pickled (parametrizations, handles
of the system) the others build themselves, one after another, and let their own values go at
once.

Every rank maps the memory copy-on-write: a model is its rank's own, whatever is done with it,
and what nobody writes is there once.
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

PICKLE_OFFSET = align_to_cache_line(
    TOKEN_BYTES
)  # where the pickle is in the memory; the storages follow


@dataclass(frozen=True)
class Hosts:
    """firsts: of each rank, the first one of its host."""

    first_ranks: Sequence[int]

    @classmethod
    def find_hosts(cls, world: World) -> Hosts:
        """A host here is those who can open each other's memory: of one boot, process namespace
        and user. Collective.
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
        """Is one of them host to several ranks?"""
        return len(set(self.first_ranks)) < len(self.first_ranks)

    def take_turns(self, world: World, ranks: Sequence[int]) -> Iterator[bool]:
        """Some ranks take turns, on every host one after another: is it this rank's?
        Collective.
        """
        turn_of: dict[int, int] = {}
        taken: Counter[int] = Counter()
        for rank in ranks:
            turn_of[rank] = taken[self.first_ranks[rank]]
            taken[self.first_ranks[rank]] += 1
        for turn in range(max(taken.values(), default=0)):
            yield turn_of.get(world.rank) == turn
            world.barrier()


@dataclass(frozen=True)
class InitialModel:
    """How a rank begins. picked, because: in how many copies the model is on a host, for the
    record; empty where there was nothing to pick.
    """

    model: nn.Module
    hosts: Hosts | None = None
    choice: str = ""
    reason: str = ""

    def record_choice(self, log: StepLog, world: World) -> Hosts | None:
        """Into the record; the hosts."""
        if self.choice and world.rank == 0:
            log.write_choice("whole model", self.choice, self.reason)
        return self.hosts


@dataclass(frozen=True)
class Offer:
    """What the first rank of a host has for the others. address: of the memory;  pickled: bytes
    of the model's pickle;  sizes: of the storages;  because: why there is no pickle, or no
    memory.
    """

    address: str = ""
    pickle_bytes: int = 0
    storage_sizes: tuple[int, ...] = ()
    reason: str = ""


def build_shared_model(world: World, build_model: Callable[[], nn.Module]) -> InitialModel:
    """A model that one rank of every host builds, and the random generators as that leaves
    them. Collective.
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
            because = ""
        except Exception as error:
            because = offer.reason or describe_error(error)
        return _build_where_missing(
            world, hosts, model, because, lambda: _build_and_adopt(build_model, offer)
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
    """A model that every rank has, with the same values: from here on those of one rank of
    every host. Collective.
    """
    hosts = Hosts.find_hosts(world)
    _adopt_first_rank_values(world, hosts, model)
    return InitialModel(model, hosts)


def load_shared_model(
    world: World, hosts: Hosts | None, model: nn.Module, load_checkpoint: Callable[[bool], None]
) -> None:
    """Load a checkpoint into a model and what belongs to it, the model's values on one rank of
    every host. Collective.
    """
    load_checkpoint(hosts is None or hosts.first_ranks[world.rank] == world.rank)
    if hosts is not None and not _adopt_first_rank_values(world, hosts, model):
        load_checkpoint(True)


def _adopt_first_rank_values(world: World, hosts: Hosts, model: nn.Module) -> bool:
    """Has a model now the values of that of the host's first rank? Collective."""
    first = hosts.first_ranks[world.rank]
    if not hosts.has_shared_host:
        return True
    region, offer = (
        _offer_model(model, with_modules=False) if first == world.rank else (None, Offer())
    )
    offer = _gather_offers(world, offer)[first]
    there = first == world.rank or _adopt_values(model, offer)
    world.barrier()
    if region is not None:
        region.close_descriptor()
    return there


def _gather_offers(world: World, offer: Offer) -> list[Offer]:
    return world.broadcast_object(world.gather_objects(offer))  # type: ignore[no-any-return]


def _build_where_missing(
    world: World,
    hosts: Hosts,
    model: nn.Module | None,
    failure_reason: str,
    build_model: Callable[[], nn.Module],
) -> InitialModel:
    """Whoever did not get the model builds it, one after another."""
    reasons = world.broadcast_object(world.gather_objects(failure_reason))
    for mine in hosts.take_turns(world, [rank for rank, reason in enumerate(reasons) if reason]):
        if mine:
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


# ---- one rank has it, and the others take it -------------------------------------------------
def _offer_model(model: nn.Module, with_modules: bool) -> tuple[CreatedRegion | None, Offer]:
    """Move a model's values into memory that others can open. whole: with the modules."""
    storages = _list_storages(model)
    text = b""
    because = ""
    if with_modules:
        try:
            text, storages = dump_tensorless((model, capture_generators()), storages)
        except Exception as error:
            because = describe_error(error)
    sizes = tuple(storage.nbytes() for storage in storages)
    places = compute_offsets(PICKLE_OFFSET + len(text), sizes)
    users: dict[int, list[Tensor]] = {}
    for tensor in _list_host_tensors(model):
        users.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    region = None
    try:
        region = CreatedRegion(places[-1], reserved=0)
        mapped = SharedRegion(region.descriptor, region.size, private=True)
        region.reserve_pages(0, places[0])
        region.map[PICKLE_OFFSET : PICKLE_OFFSET + len(text)] = text
        # one after another: what was moved is let go
        for begin, size in zip(places, sizes, strict=False):
            region.reserve_pages(begin, size)
            _move_storage(
                storages.pop(0),
                region.bytes[begin : begin + size],
                mapped.make_storage(begin, size),
                users,
            )
    except (RuntimeError, OSError) as error:
        if region is not None:
            region.close_descriptor()  # by nobody: it is let go
        return None, Offer(reason=str(error))
    return_freed_memory()
    return region, Offer(region.address, len(text), sizes, because)


def _move_storage(
    storage: UntypedStorage, place: Tensor, mapped: UntypedStorage, users: dict[int, list[Tensor]]
) -> None:
    """The bytes of a storage, to another place, and the tensors over it."""
    place.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    for tensor in users.pop(storage._cdata, ()):
        _rebind_tensor(tensor, mapped)


def _unpickle_offered_model(offer: Offer) -> nn.Module:
    """The model that another rank built. Raises where there is none, or it cannot be unpickled
    here.
    """
    if not offer.pickle_bytes:
        raise RuntimeError(offer.reason)
    region = open_region(offer.address, private=True)
    storages = [
        region.make_storage(*each)
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
    return model  # type: ignore[no-any-return]


def _register_output_capture(model: nn.Module) -> None:
    """What transformers writes down in a process when it builds a model of a class there: which
    modules' outputs its forward gathers (hidden states, logits of routers). Without it they
    would be missing.
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
    """Has a model now the values that another rank offers? Not where its tensors are others, or
    the memory cannot be opened.
    """
    storages = _list_storages(model)
    if not offer.address or [storage.nbytes() for storage in storages] != list(
        offer.storage_sizes[: len(storages)]
    ):
        return False
    try:
        region = open_region(offer.address, private=True)
        starts = compute_offsets(PICKLE_OFFSET + offer.pickle_bytes, offer.storage_sizes)
    except RuntimeError:
        return False
    places = {
        each._cdata: region.make_storage(begin, each.nbytes())
        for each, begin in zip(storages, starts, strict=False)
    }
    for tensor in _list_host_tensors(model):
        _rebind_tensor(tensor, places[tensor.untyped_storage()._cdata])
    del storages
    return_freed_memory()
    return True


# ---- the values of a model -------------------------------------------------------------------
def copy_modules(model: nn.Module) -> nn.Module:
    """The same modules once more, over the same values."""
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
    """From here on a model has values of its own, and no more of them than it needs."""
    tensors = _list_host_tensors(model)
    users = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
    copies: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if users[storage._cdata] == 1:
            tensor.data = tensor.data.clone()
            continue
        if storage._cdata not in copies:  # views of one another stay so
            copies[storage._cdata] = storage.clone()
        _rebind_tensor(tensor, copies[storage._cdata])


def _list_host_tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers that have their values in a storage of the host."""
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
    """The same tensor over another storage, which has the same bytes."""
    tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )
