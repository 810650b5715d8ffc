"""All optimizers of pytorch_optimizer, on very simple models, under four strategies.

The optimizer decides which part of a model a rank must hold to update it. So a row says which of
three kinds its optimizer is, and its outcomes follow from that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from equality_table import make_job, make_mlp
from torch import Tensor, nn
from zoo_libraries import foreign
from zoo_rows import (
    OPTIMIZER_STRATEGIES,
    PLACE,
    SERVERS,
    SHARDED,
    VECTORS,
    Equal,
    Outcomes,
    Refused,
    Row,
)

LIBRARY = "pytorch_optimizer"

# ---- outcomes of optimizers that need more than elements ---------------------------------------
NO_PIECES = "does not update element by element"
OF_TENSORS: Outcomes = {SHARDED: Refused(NO_PIECES), SERVERS: Refused(NO_PIECES)}
OF_MODELS: Outcomes = {**OF_TENSORS, PLACE: Refused("needs all parameters together")}

Optimizer = torch.optim.Optimizer
Build = Callable[[Iterable[Tensor]], Optimizer]


def build(name: str, parameters: Iterable[Tensor], **settings: Any) -> Optimizer:
    """Build an optimizer of the library, with its default settings except for these."""
    return getattr(foreign(LIBRARY), name)(parameters, **settings)  # type: ignore[no-any-return]


def build_in_groups(name: str, parameters: Iterable[Tensor], **settings: Any) -> Optimizer:
    """Build an optimizer that needs matrices and other parameters in separate groups."""
    listed = list(parameters)
    matrices = [each for each in listed if each.dim() > 1]
    others = [each for each in listed if each.dim() <= 1]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return build(name, groups, **settings)  # type: ignore[arg-type]


def build_around_sgd(name: str, parameters: Iterable[Tensor], **settings: Any) -> Optimizer:
    """Build an optimizer that wraps SGD."""
    return build(name, torch.optim.SGD(parameters, lr=0.05), **settings)  # type: ignore[arg-type]


def make_mlp_without_biases() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))


def make_optimizer_row(
    name: str,
    story: str,
    outcomes: Outcomes,
    builder: Callable[..., Optimizer] = build,
    model: Callable[[], nn.Module] = make_mlp,
    twin: str = "",
    **settings: Any,
) -> Row:
    optimizer = functools.partial(builder, name, **settings)
    row_name = f"{LIBRARY} {name}"
    return Row(
        row_name,
        lambda: make_job(row_name, model, VECTORS, optimizer=optimizer),
        Equal(twin),
        story,
        (LIBRARY,),
        OPTIMIZER_STRATEGIES,
        outcomes,
    )


def list_words(text: str) -> list[str]:
    return text.split()


# ---- three kinds -------------------------------------------------------------------------------
ELEMENTS = list_words("""
    ADOPT APOLLO AccSGD AdEMAMix AdaBelief AdaBound AdaDelta AdaMax AdaMod AdaPNM AdaSmooth
    AdamC AdamG AdamWSN Adan Ano BCOS DiffGrad DualAdam EXAdam EmoLynx EmoNavi FOCUS FTRL Fira
    GaLore Grams GrokFastAdamW Kate LaProp Lion MADGRAD MSVAG PAdam PID PNM QHAdam QHM RAdam
    SGDW SRMM ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD SignSGD SimplifiedAdEMAMix
    Tiger VSGD Yogi
""")
TENSORS = list_words("""
    A2Grad AdaFactor AdaGO AdaMuon AdaNorm AdaShift AdaTAM Adalite AdamP AggMo Aida Alice Amos
    ApolloDQN CAME Conda EmoFact FlashAdamW Fromage LARS Lamb MARS Muon MuonClip Nero NorMuon
    NovoGrad RACS ROSE Ranger SCION SCIONLight SGDP SGDSaI SM3 SOAP SWATS ScalableShampoo
    Shampoo SpectralSphere StableAdamW StableSPAM TAM
""")
MODELS = list_words("""
    ASGD AdaGC Adai AdamS AvaGrad DASH DAdaptAdaGrad DAdaptAdam DAdaptAdan DAdaptLion DAdaptSGD
    Gravity Kron LoRARite Lookahead Magma OrthoGrad PCGrad Prodigy Ranger21 SPAM SPlus SaRA
    ScheduleFreeWrapper TRAC
""")
KINDS: tuple[tuple[list[str], str, Outcomes], ...] = (
    (ELEMENTS, "updates element by element: any cut is the same training", {}),
    (TENSORS, "wants whole tensors", OF_TENSORS),
    (MODELS, "wants all parameters together", OF_MODELS),
)
STORIES = {
    "A2Grad": "its groups have no lr: KeyError in the first step",
    "AdamP": "projects a gradient that is orthogonal to the weights; no gradient of the trial was",
    "AggMo": "several momenta in a dictionary: pieces of them were in no checkpoint",
    "DAdaptAdaGrad": "an estimate from all parameters, which was every rank's own, in silence",
    "DAdaptAdan": "an estimate from all parameters, which was every rank's own, in silence",
    "DAdaptLion": "an estimate from all parameters, which was every rank's own, in silence",
    "Kron": "a flat piece of a matrix made the trial take minutes",
    "Prodigy": "an estimate from all parameters, which was every rank's own, in silence",
    "ScalableShampoo": "looks at whole tensors after 25 steps; the trial had seven",
}
SETTINGS: dict[str, dict[str, Any]] = {
    **{
        name: {"builder": build_in_groups}
        for name in ("AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon")
    },
    **{
        name: {"builder": build_around_sgd}
        for name in ("Lookahead", "Magma", "OrthoGrad", "PCGrad", "ScheduleFreeWrapper", "TRAC")
    },
    "Ranger21": {"num_iterations": 20},
    "SOAP": {"twin": "the signs of eigenvectors, which rounding decides"},
    "SpectralSphere": {"model": make_mlp_without_biases},
}
ROWS: tuple[Row, ...] = tuple(
    make_optimizer_row(name, STORIES.get(name, story), outcomes, **SETTINGS.get(name, {}))
    for names, story, outcomes in KINDS
    for name in names
)

# ---- optimizers without a row, and the reasons ---------------------------------------------------
OF_TORCH = ("Adam", "AdamW", "LBFGS", "NAdam", "RMSprop", "SGD")  # the library has the same classes
TAKES_MODEL = "takes the model, and a job's optimizer takes parameters"
WANTS_CLOSURE = "needs a closure"
WANTS_GRAPH = "wants gradients of gradients"
FAILING = {
    "AdaHessian": WANTS_GRAPH,
    "AdaLOMO": TAKES_MODEL,
    "AdamMini": TAKES_MODEL,
    "AliG": WANTS_CLOSURE,
    "BSAM": WANTS_CLOSURE,
    "DeMo": "wants several workers, and einops",
    "DistributedMuon": "wants a process group",
    "FAdam": "its step fails in float64",
    "FriendlySAM": WANTS_CLOSURE,
    "GSAM": WANTS_CLOSURE,
    "LOMO": TAKES_MODEL,
    "LookSAM": WANTS_CLOSURE,
    "SAM": WANTS_CLOSURE,
    "SafeFP16Optimizer": "has no groups: no Optimizer but by name",
    "SophiaH": WANTS_GRAPH,
    "WSAM": WANTS_CLOSURE,
}


def step_once(name: str) -> None:
    """Build an optimizer that has no row, and make one step in a plain loop on one worker."""
    model = make_mlp().double()
    cls = getattr(foreign(LIBRARY), name)
    if name in ("FriendlySAM", "LookSAM", "SAM"):
        optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.05)
    elif name == "WSAM":
        optimizer = cls(model, model.parameters(), torch.optim.SGD, lr=0.05)
    elif name == "GSAM":
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        rate = torch.optim.lr_scheduler.ConstantLR(sgd)
        scheduler = foreign(LIBRARY).ProportionScheduler(rate, 0.1, 0.0)
        optimizer = cls(model.parameters(), sgd, model, scheduler)
    elif name == "SafeFP16Optimizer":
        optimizer = build_around_sgd(name, model.parameters())
    elif name == "DistributedMuon":
        optimizer = build_in_groups(name, model.parameters())
    elif name == "BSAM":
        optimizer = cls(model.parameters(), num_data=29)
    else:
        optimizer = cls(model.parameters())
    inputs, targets = VECTORS.tensors
    nn.functional.cross_entropy(model(inputs.double()), targets).backward()
    assert optimizer.param_groups
    optimizer.step()
