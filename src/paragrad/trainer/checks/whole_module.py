"""Put the whole model together on rank 0, to make one worker's step with.

Ranks may hold parts of the model, and the loss may run on another rank. So rank 0 gathers the
parameters and buffers, what modules keep in Python, and which parameters are trained.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import torch

from paragrad.engine.probe import has_parameter_hooks
from paragrad.engine.state.preserve_state import PythonState, find_all_owners, find_state_owners
from paragrad.engine.state.values import GeneratorState, is_same_value, set_tensor_values
from paragrad.errors import describe_error
from paragrad.jobs.loss import LossModule
from paragrad.runtime.launcher_env import read_available_memory
from paragrad.trainer.training import Training

# Copies of this size need no look at the memory that is left; the look takes 0.3 ms.
SMALL_BYTES = 64 << 20


def _can_be_sent(value: Any) -> bool:
    """Return whether a value of a module's attribute is equal after a message."""
    if isinstance(value, GeneratorState):
        return False
    try:
        return bool(is_same_value(pickle.loads(pickle.dumps(value)), value))
    except Exception:
        return False


def count_model_bytes(training: Training) -> int:
    """Count the bytes of the whole model's parameters.

    Args:
        training: The training.
    """
    return sum(
        each.numel() * each.element_size() for each in training.setup.empty_model.parameters()
    )


def explain_no_room(training: Training, copies: int) -> str:
    """Explain why rank 0 has no memory for copies of the whole model; empty text: it has.

    Args:
        training: The training.
        copies: The number of copies.
    """
    if training.world.rank or training.world.device.type != "cpu":
        return ""
    needed = copies * count_model_bytes(training)
    available = None if needed <= SMALL_BYTES else read_available_memory()
    if available is None or needed <= available:
        return ""
    return f"copies need about {needed >> 20} MiB on rank 0, and {available >> 20} MiB are left"


@dataclass(frozen=True)
class WholeModule:
    """The whole model and the loss, to make one worker's step with.

    Attributes:
        module: The training's own, or on rank 0 a copy put together from all parts; on other ranks
            then None.

        is_everywhere: Whether every rank has the whole model, as its own.

        is_hooked: Whether a parameter has a hook on any rank, which a copy would not have.

        obstacle: Why there is none, or an empty text.
    """

    module: LossModule | None
    is_everywhere: bool
    is_hooked: bool = False
    obstacle: str = ""


def assemble_whole_module(training: Training, python_state: PythonState | None) -> WholeModule:
    """Put the whole model together on rank 0, if ranks hold parts of it. Collective.

    Args:
        training: The training.
        python_state: The Python state of the loss and of this rank's part of the model when it was
            partitioned.
    """
    setup, world = training.setup, training.world
    if setup.exchange is None or not setup.explain_no_whole_model():
        flags = world.all_gather(torch.tensor([has_parameter_hooks(training.module)]))
        return WholeModule(training.module, True, any(map(bool, flags)))
    carried, obstacle = _list_carried_values(training, python_state)
    # the training's own loss stays as it is; it is current if this rank runs it
    loss = training.module.loss
    if not world.rank and not setup.layout.has_output:
        try:
            loss = copy.deepcopy(loss)
        except Exception as error:
            obstacle = f"the loss cannot be copied: {describe_error(error)}"
    # the whole model, a copy to restore, and gradients of the step and of baselines
    obstacle = obstacle or explain_no_room(training, 6)
    if world.all_reduce(torch.tensor(bool(obstacle), dtype=torch.float32), "MAX"):
        obstacles = world.gather_objects(obstacle)
        obstacle = world.broadcast_object(next(filter(None, obstacles), ""))
        return WholeModule(None, False, obstacle=obstacle)
    parts = world.gather_objects(carried)
    model = setup.gather_model()
    if training.world.rank:
        return WholeModule(None, False)
    module = training.module.wrap_model(model, loss)
    owners = find_state_owners(model) if setup.layout.has_output else find_all_owners(module)
    trained = {
        name
        for part in filter(None, parts)
        for name, requires_grad in part.requires_grad.items()
        if requires_grad
    }
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    for part in filter(None, parts):
        for (name, attribute), value in part.python_values.items():
            if name in owners:
                vars(owners[name])[attribute] = value
        if not setup.layout.has_output:
            _set_loss_buffers(module, part.loss_buffers)
    return WholeModule(module, False)


def _set_loss_buffers(module: LossModule, values: dict[str, torch.Tensor]) -> None:
    """Give the loss the buffers of another rank's, also those that its forward registered."""
    for name, value in values.items():
        path, _, buffer_name = name.rpartition(".")
        owner = module.state_owner.get_submodule(path)
        if buffer_name in owner._buffers:
            set_tensor_values(owner._buffers[buffer_name], value)
        else:
            owner.register_buffer(buffer_name, value)


@dataclass(frozen=True)
class CarriedValues:
    """What the whole model on rank 0 needs of a rank besides parameters and buffers.

    Attributes:
        python_values: What model and loss keep in Python and was changed, by (owner, attribute).

        requires_grad: Whether parameters are trained, by serial name.

        loss_buffers: The buffers of the loss, if this rank runs it. Rank 0 uses them if it does not
            run the loss itself.
    """

    python_values: dict[tuple[str, str], Any]
    requires_grad: dict[str, bool]
    loss_buffers: dict[str, torch.Tensor]


def _list_carried_values(
    training: Training, python_state: PythonState | None
) -> tuple[CarriedValues | None, str]:
    """List what this rank sends to rank 0; other replicas than the first one send nothing.

    Returns:
        (values, obstacle): the values or None, and why some of them cannot be sent, or "".
    """
    setup = training.setup
    if setup.samples_world.rank:
        return None, ""
    model = setup.empty_model
    # a part may keep its parameters and buffers in attributes too
    tensor_names = {
        name
        for name, _ in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    }
    changes = {
        place: value
        for place, value in (python_state.collect_changes() if python_state else {}).items()
        if ".".join(filter(None, place)) not in tensor_names
    }
    if left := [place for place, value in changes.items() if not _can_be_sent(value)]:
        name = ".".join(filter(None, left[0]))
        return None, f"{name} cannot be sent to rank 0, which compares"
    specs = setup.shard_layout.specs
    loss = setup.module.state_owner
    is_sent = setup.layout.has_output and isinstance(loss, torch.nn.Module)
    return CarriedValues(
        changes,
        {
            specs[name].name: each.requires_grad
            for name, each in setup.parameters.items()
            if name in specs
        },
        {name: each.detach().cpu() for name, each in loss.named_buffers()}
        if is_sent and training.world.rank
        else {},
    ), ""
