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

from paragrad.errors import told
from paragrad.launch.tensorless_pickle import pickled, unpickled
from paragrad.record.step_log import Log
from paragrad.runtime import stragglers
from paragrad.runtime.allocator import give_back
from paragrad.runtime.generators import set_states, states
from paragrad.runtime.world import World
from paragrad.shm.region import (
    TOKEN,
    OwnRegion,
    Region,
    aligned,
    begins,
    host_name,
    opened,
    unavailable,
)

BEGINS = aligned(TOKEN)  # where the pickle is in the memory; the storages follow


@dataclass(frozen=True)
class Hosts:
    """firsts: of each rank, the first one of its host."""

    firsts: Sequence[int]

    @classmethod
    def of(cls, world: World) -> Hosts:
        """A host here is those who can open each other's memory: of one boot, process namespace
        and user. Collective.
        """
        name = (
            f"rank {world.rank}"
            if unavailable()
            else f"{host_name()} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"
        )
        names = world.agreed(world.collected(name))
        return cls([names.index(each) for each in names])

    @property
    def shared(self) -> bool:
        """Is one of them host to several ranks?"""
        return len(set(self.firsts)) < len(self.firsts)

    def turns(self, world: World, ranks: Sequence[int]) -> Iterator[bool]:
        """Some ranks take turns, on every host one after another: is it this rank's?
        Collective.
        """
        turn_of: dict[int, int] = {}
        taken: Counter[int] = Counter()
        for rank in ranks:
            turn_of[rank] = taken[self.firsts[rank]]
            taken[self.firsts[rank]] += 1
        for turn in range(max(taken.values(), default=0)):
            yield turn_of.get(world.rank) == turn
            world.barrier()


@dataclass(frozen=True)
class Start:
    """How a rank begins. picked, because: in how many copies the model is on a host, for the
    record; empty where there was nothing to pick.
    """

    model: nn.Module
    hosts: Hosts | None = None
    picked: str = ""
    because: str = ""

    def told(self, log: Log, world: World) -> Hosts | None:
        """Into the record; the hosts."""
        if self.picked and world.rank == 0:
            log.choice("whole model", self.picked, self.because)
        return self.hosts


@dataclass(frozen=True)
class Offer:
    """What the first rank of a host has for the others. address: of the memory;  pickled: bytes
    of the model's pickle;  sizes: of the storages;  because: why there is no pickle, or no
    memory.
    """

    address: str = ""
    pickled: int = 0
    sizes: tuple[int, ...] = ()
    because: str = ""


def built(world: World, build: Callable[[], nn.Module]) -> Start:
    """A model that one rank of every host builds, and the random generators as that leaves
    them. Collective.
    """
    hosts = Hosts.of(world)
    if not hosts.shared:
        return Start(build(), hosts)
    if hosts.firsts[world.rank] != world.rank:
        model = None
        with stragglers.meanwhile(
            "the first rank of this host builds the model, once for all of them"
        ):
            offer = _offers(world, Offer())[hosts.firsts[world.rank]]
        try:
            model = _taken(offer)
            because = ""
        except Exception as error:
            because = offer.because or told(error)
        return _settled(world, hosts, model, because, lambda: _built_beside(build, offer))
    model = build()
    region, offer = _offered(model, whole=True)
    _offers(world, offer)
    try:
        return _settled(world, hosts, model, "", lambda: model)
    finally:
        if region is not None:
            region.opened_by_all()


def moved(world: World, model: nn.Module) -> Start:
    """A model that every rank has, with the same values: from here on those of one rank of
    every host. Collective.
    """
    hosts = Hosts.of(world)
    _values_of_first(world, hosts, model)
    return Start(model, hosts)


def loaded(
    world: World, hosts: Hosts | None, model: nn.Module, load: Callable[[bool], None]
) -> None:
    """Load a checkpoint into a model and what belongs to it, the model's values on one rank of
    every host. Collective.
    """
    load(hosts is None or hosts.firsts[world.rank] == world.rank)
    if hosts is not None and not _values_of_first(world, hosts, model):
        load(True)


def _values_of_first(world: World, hosts: Hosts, model: nn.Module) -> bool:
    """Has a model now the values of that of the host's first rank? Collective."""
    first = hosts.firsts[world.rank]
    if not hosts.shared:
        return True
    region, offer = _offered(model, whole=False) if first == world.rank else (None, Offer())
    offer = _offers(world, offer)[first]
    there = first == world.rank or _adopted(model, offer)
    world.barrier()
    if region is not None:
        region.opened_by_all()
    return there


def _offers(world: World, own: Offer) -> list[Offer]:
    return world.agreed(world.collected(own))  # type: ignore[no-any-return]


def _settled(
    world: World,
    hosts: Hosts,
    model: nn.Module | None,
    because: str,
    build: Callable[[], nn.Module],
) -> Start:
    """Whoever did not get the model builds it, one after another."""
    reasons = world.agreed(world.collected(because))
    for mine in hosts.turns(world, [rank for rank, reason in enumerate(reasons) if reason]):
        if mine:
            model = build()
    assert model is not None
    if any(reasons):
        return Start(model, hosts, "built by every rank", next(filter(None, reasons)))
    return Start(
        model,
        hosts,
        "built once on each host",
        "its ranks share the values until each has its part",
    )


# ---- one rank has it, and the others take it -------------------------------------------------
def _offered(model: nn.Module, whole: bool) -> tuple[OwnRegion | None, Offer]:
    """Move a model's values into memory that others can open. whole: with the modules."""
    storages = _storages(model)
    text = b""
    because = ""
    if whole:
        try:
            text, storages = pickled((model, states()), storages)
        except Exception as error:
            because = told(error)
    sizes = tuple(storage.nbytes() for storage in storages)
    places = begins(BEGINS + len(text), sizes)
    users: dict[int, list[Tensor]] = {}
    for tensor in _tensors(model):
        users.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    region = None
    try:
        region = OwnRegion(places[-1], reserved=0)
        mapped = Region(region.descriptor, region.size, private=True)
        region.reserve(0, places[0])
        region.map[BEGINS : BEGINS + len(text)] = text
        # one after another: what was moved is let go
        for begin, size in zip(places, sizes, strict=False):
            region.reserve(begin, size)
            _move(
                storages.pop(0),
                region.bytes[begin : begin + size],
                mapped.storage(begin, size),
                users,
            )
    except (RuntimeError, OSError) as error:
        if region is not None:
            region.opened_by_all()  # by nobody: it is let go
        return None, Offer(because=str(error))
    give_back()
    return region, Offer(region.address, len(text), sizes, because)


def _move(
    storage: UntypedStorage, place: Tensor, mapped: UntypedStorage, users: dict[int, list[Tensor]]
) -> None:
    """The bytes of a storage, to another place, and the tensors over it."""
    place.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    for tensor in users.pop(storage._cdata, ()):
        _rebind(tensor, mapped)


def _taken(offer: Offer) -> nn.Module:
    """The model that another rank built. Raises where there is none, or it cannot be unpickled
    here.
    """
    if not offer.pickled:
        raise RuntimeError(offer.because)
    region = opened(offer.address, private=True)
    storages = [
        region.storage(*each)
        for each in zip(begins(BEGINS + offer.pickled, offer.sizes), offer.sizes, strict=False)
    ]
    model, generators = unpickled(region.map[BEGINS : BEGINS + offer.pickled], storages)
    set_states(generators)
    _enrolled(model)
    return model  # type: ignore[no-any-return]


def _enrolled(model: nn.Module) -> None:
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


def _built_beside(build: Callable[[], nn.Module], offer: Offer) -> nn.Module:
    model = build()
    _adopted(model, offer)
    return model


def _adopted(model: nn.Module, offer: Offer) -> bool:
    """Has a model now the values that another rank offers? Not where its tensors are others, or
    the memory cannot be opened.
    """
    storages = _storages(model)
    if not offer.address or [storage.nbytes() for storage in storages] != list(
        offer.sizes[: len(storages)]
    ):
        return False
    try:
        region = opened(offer.address, private=True)
        starts = begins(BEGINS + offer.pickled, offer.sizes)
    except RuntimeError:
        return False
    places = {
        each._cdata: region.storage(begin, each.nbytes())
        for each, begin in zip(storages, starts, strict=False)
    }
    for tensor in _tensors(model):
        _rebind(tensor, places[tensor.untyped_storage()._cdata])
    del storages
    give_back()
    return True


# ---- the values of a model -------------------------------------------------------------------
def beside(model: nn.Module) -> nn.Module:
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


def own(model: nn.Module) -> None:
    """From here on a model has values of its own, and no more of them than it needs."""
    tensors = _tensors(model)
    users = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
    copies: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if users[storage._cdata] == 1:
            tensor.data = tensor.data.clone()
            continue
        if storage._cdata not in copies:  # views of one another stay so
            copies[storage._cdata] = storage.clone()
        _rebind(tensor, copies[storage._cdata])


def _tensors(model: nn.Module) -> list[Tensor]:
    """Parameters and buffers that have their values in a storage of the host."""
    return [
        each
        for each in (*model.parameters(), *model.buffers())
        if type(each.data) is Tensor and each.layout == torch.strided and each.device.type == "cpu"
    ]


def _storages(model: nn.Module) -> list[UntypedStorage]:
    return list(
        {
            tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in _tensors(model)
        }.values()
    )


def _rebind(tensor: Tensor, storage: UntypedStorage) -> None:
    """The same tensor over another storage, which has the same bytes."""
    tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
        storage, tensor.storage_offset(), tensor.shape, tensor.stride()
    )
