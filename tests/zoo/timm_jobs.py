"""Jobs with models of timm, on images of 32 x 32.

They have DropPath, batch norm with its activation, and other kinds of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from zoo_libraries import foreign
from zoo_rows import (
    IMAGES,
    IN_PARTS,
    WHOLE_BATCHES,
    Equal,
    Refused,
    Row,
    expect_refusal_in_parts,
    make_row,
    make_sgd,
    make_slow_sgd,
)

VIT = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 4,
}
CHAOTIC = (
    "batch norm over few values: torch against itself in another order of samples differs by as "
    "much"
)


def make_builder(place: str, *words: Any, **settings: Any) -> Callable[[], nn.Module]:
    """Return a function that builds timm.models.<place>(...).

    An example of `place` is "vision_transformer.VisionTransformer".
    """

    def build() -> nn.Module:
        module, name = place.rsplit(".", 1)
        return getattr(foreign(f"timm.models.{module}"), name)(*words, **settings)

    return build


def make_builder_by_name(name: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a function that calls timm.create_model(name).

    The test_* models are timm's own small ones.
    """
    return lambda: foreign("timm").create_model(name, num_classes=4, **settings)


def make_resnet_builder(**settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = foreign("timm.models.resnet")
        return module.ResNet(
            module.BasicBlock,
            (1, 1, 1, 1),
            channels=(8, 8, 16, 16),
            stem_width=8,
            num_classes=4,
            **settings,
        )

    return build


def make_norm_act_builder(**settings: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a stem and a block.

    Their batch norms contain the activations, as those of EfficientNet and RegNet do.
    """

    def build() -> nn.Module:
        norm = foreign("timm.layers").BatchNormAct2d
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            norm(8, **settings),
            nn.Conv2d(8, 8, 3, 2, 1),
            norm(8, **settings),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        )

    return build


def make_picture_row(
    name: str,
    model: Callable[[], nn.Module],
    story: str,
    twin: str = "",
    data: Any = IMAGES,
    **changes: Any,
) -> Row:
    return make_row(
        name,
        model,
        data,
        Equal(twin),
        story,
        ("timm", "torchvision"),
        **{"optimizer": make_slow_sgd if twin else make_sgd, **changes},
    )


ROWS = (
    make_picture_row(
        "timm vit",
        make_builder("vision_transformer.VisionTransformer", **VIT),
        "nothing random in it by default",
    ),
    make_picture_row(
        "timm vit, DropPath",
        make_builder("vision_transformer.VisionTransformer", **VIT, drop_path_rate=0.3),
        "DropPath draws one number per sample by bernoulli_: every rank drew its own",
    ),
    make_picture_row(
        "timm vit, every dropout",
        make_builder(
            "vision_transformer.VisionTransformer",
            **VIT,
            drop_rate=0.1,
            pos_drop_rate=0.1,
            attn_drop_rate=0.1,
            proj_drop_rate=0.1,
            drop_path_rate=0.1,
        ),
        "dropout of positions, attention, projection, path",
    ),
    make_picture_row(
        "timm vit, dropped patches",
        make_builder("vision_transformer.VisionTransformer", **VIT, patch_drop_rate=0.5),
        "PatchDropout: which patches stay is an argsort of randn, per sample",
    ),
    make_picture_row(
        "timm BatchNormAct2d",
        make_norm_act_builder(),
        "a batch norm with a forward of its own lost its activation: 2.5 at step 0",
    ),
    make_picture_row(
        "timm BatchNormAct2d, SiLU",
        make_norm_act_builder(act_layer="silu"),
        "the same with another activation",
    ),
    make_picture_row(
        "timm resnet", make_resnet_builder(), "plain BatchNorm2d", CHAOTIC, WHOLE_BATCHES
    ),
    make_picture_row(
        "timm resnet, DropPath",
        make_resnet_builder(drop_path_rate=0.2),
        "a mask of whole samples",
        CHAOTIC,
        WHOLE_BATCHES,
    ),
    make_row(
        "timm resnet, DropBlock",
        make_resnet_builder(drop_block_rate=0.2),
        WHOLE_BATCHES,
        Refused("not one worker's training"),
        "its mask is divided by what is left of it over the whole batch",
        ("timm",),
        optimizer=make_slow_sgd,
        # with batch norm, serial has the same number of micro-batches
        but=dict.fromkeys(IN_PARTS, Equal(CHAOTIC)),
    ),
    make_picture_row(
        "timm efficientnet",
        make_builder_by_name("test_efficientnet"),
        "BatchNormAct2d, SiLU, DropPath",
        CHAOTIC,
        WHOLE_BATCHES,
    ),
    make_picture_row(
        "timm efficientnet, DropPath",
        make_builder_by_name("test_efficientnet", drop_rate=0.2, drop_path_rate=0.2),
        "all of it",
        CHAOTIC,
        WHOLE_BATCHES,
    ),
    make_picture_row(
        "timm convnext, DropPath",
        make_builder(
            "convnext.ConvNeXt",
            depths=(1, 1, 1, 1),
            dims=(8, 8, 16, 16),
            num_classes=4,
            drop_path_rate=0.2,
        ),
        "layer scale of 1e-6: gradients of very different sizes",
    ),
    make_picture_row(
        "timm mixer",
        make_builder(
            "mlp_mixer.MlpMixer",
            num_classes=4,
            img_size=32,
            patch_size=8,
            num_blocks=2,
            embed_dim=16,
        ),
        "mixes patches, not samples",
    ),
    make_picture_row(
        "timm nfnet",
        make_builder_by_name("test_nfnet"),
        "weights standardised in every forward",
        "it has learnt all by step 41: its gradients are 1e-7 of the first ones, mostly rounding",
        optimizer=make_sgd,
        but=expect_refusal_in_parts(
            "batch norms inside of samples or weights, .* train it with data"
        ),
    ),
    make_picture_row(
        "timm mambaout, DropPath",
        make_builder_by_name("test_mambaout", drop_path_rate=0.1),
        "gated convolutions",
    ),
)
