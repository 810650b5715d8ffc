"""Jobs with small models of torchvision: images of 32 x 32, and few channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset, TensorDataset
from zoo_libraries import foreign
from zoo_rows import (
    IMAGES,
    IN_PARTS,
    PIPELINE,
    WHOLE_BATCHES,
    WITHOUT_MICRO,
    Equal,
    Refused,
    Row,
    draw_integers,
    draw_numbers,
    make_row,
    make_sgd,
    make_slow_sgd,
)

MASKS = TensorDataset(draw_numbers(30, 3, 32, 32, seed=3), draw_integers(4, 30, 32, 32, seed=8))
CHAOTIC = (
    "batch norm over few values: torch against itself in another order of samples differs by as "
    "much"
)


def import_models(name: str = "") -> Any:
    return foreign(f"torchvision.models{name}")


def make_resnet(layers: int) -> Any:
    """Return the first stages of ResNet-18."""
    module = import_models(".resnet")
    model = module.ResNet(module.BasicBlock, [1] * layers + [1] * (4 - layers), num_classes=4)
    for number in range(layers + 1, 5):
        setattr(model, f"layer{number}", nn.Identity())
    model.fc = nn.Linear(32 << layers, 4)
    return model


def make_two_stage_resnet() -> nn.Module:
    return make_resnet(2)


def make_resnet18() -> nn.Module:
    """Return ResNet-18 with an eighth of the channels after its stem."""
    module = import_models(".resnet")

    class Narrow(module.ResNet):  # type: ignore[misc, name-defined]
        def _make_layer(self, block: Any, planes: int, *words: Any, **settings: Any) -> nn.Module:
            return super()._make_layer(block, planes // 8, *words, **settings)

    model = Narrow(module.BasicBlock, [2, 2, 2, 2], num_classes=4)
    model.fc = nn.Linear(64, 4)
    return model


def make_vgg() -> nn.Module:
    """Return VGG with few channels.

    Its classifier of 100 million parameters is replaced, and never allocated.
    """
    import torch

    module = import_models(".vgg")
    with torch.device("meta"):
        model = module.VGG(nn.Identity(), init_weights=False)
    model.features = module.make_layers([4, "M", 8, "M"], batch_norm=True)
    model.classifier = nn.Sequential(
        nn.Linear(8 * 49, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 4)
    )
    return model


def make_mobilenet() -> nn.Module:
    return import_models().MobileNetV2(
        num_classes=4, width_mult=0.25, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2]]
    )


def make_shufflenet() -> nn.Module:
    return import_models().ShuffleNetV2([1, 1, 1], [8, 16, 16, 16, 32], num_classes=4)


def make_densenet() -> nn.Module:
    return import_models().DenseNet(
        growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=4, drop_rate=0.1
    )


def make_recomputing_densenet() -> nn.Module:
    """Return DenseNet with memory_efficient=True, which uses checkpoint(use_reentrant=False)."""
    return import_models().DenseNet(
        growth_rate=4,
        block_config=(2, 2),
        num_init_features=8,
        num_classes=4,
        drop_rate=0.1,
        memory_efficient=True,
    )


def make_swin() -> nn.Module:
    """Return a Swin transformer, with shifted windows and stochastic depth."""
    return import_models().SwinTransformer(
        patch_size=[4, 4],
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=[4, 4],
        stochastic_depth_prob=0.2,
        num_classes=4,
    )


def make_vit() -> nn.Module:
    """Return a ViT, which uses nn.MultiheadAttention with dropout."""
    return import_models().VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        dropout=0.1,
        attention_dropout=0.1,
        num_classes=4,
    )


def make_googlenet() -> nn.Module:
    """Return GoogLeNet with auxiliary heads, so it has other outputs in training than in eval mode.

    Blocks of one convolution replace its inception blocks.
    """
    module = import_models(".googlenet")

    def make_thin_block(channels: int, *widths: int) -> nn.Module:
        # 1x1, 3x3, 5x5 and the convolution after the pool
        out = widths[0] + widths[2] + widths[4] + widths[5]
        return module.BasicConv2d(channels, out, kernel_size=1, groups=16)

    def make_head(channels: int, classes: int, dropout: float) -> nn.Module:
        return nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels, classes)
        )

    return module.GoogLeNet(
        num_classes=4,
        aux_logits=True,
        init_weights=False,
        blocks=[module.BasicConv2d, make_thin_block, make_head],
    )


class SmallInception(nn.Module):
    """A small model like Inception.

    In training it returns a named tuple (output, auxiliary output), in eval mode the output alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.branches = nn.ModuleList([nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 3, padding=1)])
        self.auxiliary = nn.Linear(8, 4)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        early = self.stem(x)
        hidden = functional.relu(join_branches([branch(early) for branch in self.branches]))
        output = self.out(hidden.mean((2, 3)))
        if not self.training:
            return output
        return import_models(".inception").InceptionOutputs(
            output, self.auxiliary(early.mean((2, 3)))
        )


def join_branches(parts: list[Tensor]) -> Tensor:
    return functional.pad(parts[0], (0, 0, 0, 0, 0, 4)) + functional.pad(
        parts[1], (0, 0, 0, 0, 4, 0)
    )


def compute_loss_with_heads(output: Any, target: Tensor) -> Tensor:
    """Return the loss of torchvision's training script for Inception models."""
    if isinstance(output, Tensor):
        return functional.cross_entropy(output, target)
    main, *others = (head for head in output if head is not None)
    return functional.cross_entropy(main, target) + sum(
        0.3 * functional.cross_entropy(head, target) for head in others
    )


def compute_training_loss(output: Any, target: Tensor) -> Tensor:
    """Return a similar loss of a user who does not know the outputs of eval mode."""
    return functional.cross_entropy(output.logits, target) + 0.4 * functional.cross_entropy(
        output.aux_logits, target
    )


def make_segmentation_model() -> nn.Module:
    """Return FCN with its auxiliary head, on the first stages of a ResNet."""
    module = import_models(".segmentation.fcn")
    backbone = import_models("._utils").IntermediateLayerGetter(
        make_resnet(2), {"layer2": "out", "layer1": "aux"}
    )
    return module.FCN(backbone, module.FCNHead(128, 4), module.FCNHead(64, 4))


def compute_loss_of_both(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Return the loss of torchvision's reference script for segmentation."""
    losses = {
        name: functional.cross_entropy(each, target, ignore_index=255)
        for name, each in output.items()
    }
    return losses["out"] + 0.5 * losses["aux"] if "aux" in losses else losses["out"]


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
        ("torchvision",),
        **{"optimizer": make_slow_sgd if twin else make_sgd, **changes},
    )


ROWS = (
    make_picture_row("resnet of two stages", make_two_stage_resnet, "batch norm", CHAOTIC),
    make_picture_row("resnet18", make_resnet18, "features of 1 x 1", CHAOTIC, WHOLE_BATCHES),
    make_picture_row(
        "resnet18, last batch of 2",
        make_resnet18,
        "22 where plain torch against itself reversed has 2.6",
        CHAOTIC,
        data=Subset(IMAGES, range(26)),
        optimizer=make_sgd,
        under=WITHOUT_MICRO,
        but={
            PIPELINE: Refused(
                "batch norm cannot train on one sample .* out of a batch of 2; give micro of at "
                "most 1"
            )
        },
    ),
    make_picture_row("vgg with batch norm", make_vgg, "dropout 0.5 twice", CHAOTIC),
    make_picture_row("mobilenet", make_mobilenet, "depthwise convolutions", CHAOTIC),
    make_picture_row("shufflenet", make_shufflenet, "shuffles channels", CHAOTIC, WHOLE_BATCHES),
    make_picture_row("densenet", make_densenet, "dropout, batch norm before convolution", CHAOTIC),
    make_picture_row(
        "densenet, recomputed",
        make_recomputing_densenet,
        "checkpoint by its own option",
        CHAOTIC,
        but=dict.fromkeys(
            IN_PARTS,
            Refused(
                "computes again in backward .* counts twice on one worker, .* leave its "
                "checkpoints out",
                by_cut=True,
            ),
        ),
    ),
    make_picture_row("swin", make_swin, "StochasticDepth draws per sample by bernoulli_"),
    make_picture_row("vit of torchvision", make_vit, "nn.MultiheadAttention's dropout"),
    make_picture_row(
        "googlenet",
        make_googlenet,
        "auxiliary heads in training: the door asked in eval mode alone, and crashed",
        CHAOTIC,
        WHOLE_BATCHES,
        loss=compute_loss_with_heads,
    ),
    make_picture_row(
        "small inception",
        SmallInception,
        "a named tuple in training, a tensor in eval mode",
        CHAOTIC,
        loss=compute_loss_with_heads,
    ),
    make_picture_row(
        "small inception, its loss for training",
        SmallInception,
        "the door tried the loss in eval mode: AttributeError",
        CHAOTIC,
        loss=compute_training_loss,
    ),
    make_picture_row(
        "segmentation with its auxiliary head",
        make_segmentation_model,
        "a sum of two means: no single divisor",
        CHAOTIC,
        data=MASKS,
        loss=compute_loss_of_both,
    ),
)
