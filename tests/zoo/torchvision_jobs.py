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
    numbers,
    row,
    sgd,
    slow,
    whole,
)

MASKS = TensorDataset(numbers(30, 3, 32, 32, seed=3), whole(4, 30, 32, 32, seed=8))
CHAOTIC = (
    "batch norm over few values: torch against itself in another order of samples differs by as "
    "much"
)


def models(name: str = "") -> Any:
    return foreign(f"torchvision.models{name}")


def resnet(layers: int) -> Any:
    """Return the first stages of ResNet-18."""
    module = models(".resnet")
    model = module.ResNet(module.BasicBlock, [1] * layers + [1] * (4 - layers), num_classes=4)
    for number in range(layers + 1, 5):
        setattr(model, f"layer{number}", nn.Identity())
    model.fc = nn.Linear(32 << layers, 4)
    return model


def resnet_of_two_stages() -> nn.Module:
    return resnet(2)


def resnet18() -> nn.Module:
    """Return ResNet-18 with an eighth of the channels after its stem."""
    module = models(".resnet")

    class Narrow(module.ResNet):  # type: ignore[misc, name-defined]
        def _make_layer(self, block: Any, planes: int, *words: Any, **settings: Any) -> nn.Module:
            return super()._make_layer(block, planes // 8, *words, **settings)

    model = Narrow(module.BasicBlock, [2, 2, 2, 2], num_classes=4)
    model.fc = nn.Linear(64, 4)
    return model


def vgg() -> nn.Module:
    """Return VGG with few channels.

    Its classifier of 100 million parameters is replaced, and never allocated.
    """
    import torch

    module = models(".vgg")
    with torch.device("meta"):
        model = module.VGG(nn.Identity(), init_weights=False)
    model.features = module.make_layers([4, "M", 8, "M"], batch_norm=True)
    model.classifier = nn.Sequential(
        nn.Linear(8 * 49, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 4)
    )
    return model


def mobilenet() -> nn.Module:
    return models().MobileNetV2(
        num_classes=4, width_mult=0.25, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2]]
    )


def shufflenet() -> nn.Module:
    return models().ShuffleNetV2([1, 1, 1], [8, 16, 16, 16, 32], num_classes=4)


def densenet() -> nn.Module:
    return models().DenseNet(
        growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=4, drop_rate=0.1
    )


def recomputing_densenet() -> nn.Module:
    """Return DenseNet with memory_efficient=True, which uses checkpoint(use_reentrant=False)."""
    return models().DenseNet(
        growth_rate=4,
        block_config=(2, 2),
        num_init_features=8,
        num_classes=4,
        drop_rate=0.1,
        memory_efficient=True,
    )


def swin() -> nn.Module:
    """Return a Swin transformer, with shifted windows and stochastic depth."""
    return models().SwinTransformer(
        patch_size=[4, 4],
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=[4, 4],
        stochastic_depth_prob=0.2,
        num_classes=4,
    )


def vit() -> nn.Module:
    """Return a ViT, which uses nn.MultiheadAttention with dropout."""
    return models().VisionTransformer(
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


def googlenet() -> nn.Module:
    """Return GoogLeNet with auxiliary heads, so it has other outputs in training than in eval mode.

    Blocks of one convolution replace its inception blocks.
    """
    module = models(".googlenet")

    def thin(channels: int, *widths: int) -> nn.Module:
        # 1x1, 3x3, 5x5 and the convolution after the pool
        out = widths[0] + widths[2] + widths[4] + widths[5]
        return module.BasicConv2d(channels, out, kernel_size=1, groups=16)

    def head(channels: int, classes: int, dropout: float) -> nn.Module:
        return nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(channels, classes)
        )

    return module.GoogLeNet(
        num_classes=4, aux_logits=True, init_weights=False, blocks=[module.BasicConv2d, thin, head]
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
        hidden = functional.relu(sum_of([branch(early) for branch in self.branches]))
        output = self.out(hidden.mean((2, 3)))
        if not self.training:
            return output
        return models(".inception").InceptionOutputs(output, self.auxiliary(early.mean((2, 3))))


def sum_of(parts: list[Tensor]) -> Tensor:
    return functional.pad(parts[0], (0, 0, 0, 0, 0, 4)) + functional.pad(
        parts[1], (0, 0, 0, 0, 4, 0)
    )


def with_heads(output: Any, target: Tensor) -> Tensor:
    """Return the loss of torchvision's training script for Inception models."""
    if isinstance(output, Tensor):
        return functional.cross_entropy(output, target)
    main, *others = (head for head in output if head is not None)
    return functional.cross_entropy(main, target) + sum(
        0.3 * functional.cross_entropy(head, target) for head in others
    )


def in_training(output: Any, target: Tensor) -> Tensor:
    """Return a similar loss of a user who does not know the outputs of eval mode."""
    return functional.cross_entropy(output.logits, target) + 0.4 * functional.cross_entropy(
        output.aux_logits, target
    )


def segmentation() -> nn.Module:
    """Return FCN with its auxiliary head, on the first stages of a ResNet."""
    module = models(".segmentation.fcn")
    backbone = models("._utils").IntermediateLayerGetter(
        resnet(2), {"layer2": "out", "layer1": "aux"}
    )
    return module.FCN(backbone, module.FCNHead(128, 4), module.FCNHead(64, 4))


def of_both(output: dict[str, Tensor], target: Tensor) -> Tensor:
    """Return the loss of torchvision's reference script for segmentation."""
    losses = {
        name: functional.cross_entropy(each, target, ignore_index=255)
        for name, each in output.items()
    }
    return losses["out"] + 0.5 * losses["aux"] if "aux" in losses else losses["out"]


def pictures(
    name: str,
    model: Callable[[], nn.Module],
    story: str,
    twin: str = "",
    data: Any = IMAGES,
    **changes: Any,
) -> Row:
    return row(
        name,
        model,
        data,
        Equal(twin),
        story,
        ("torchvision",),
        **{"optimizer": slow if twin else sgd, **changes},
    )


ROWS = (
    pictures("resnet of two stages", resnet_of_two_stages, "batch norm", CHAOTIC),
    pictures("resnet18", resnet18, "features of 1 x 1", CHAOTIC, WHOLE_BATCHES),
    pictures(
        "resnet18, last batch of 2",
        resnet18,
        "22 where plain torch against itself reversed has 2.6",
        CHAOTIC,
        data=Subset(IMAGES, range(26)),
        optimizer=sgd,
        under=WITHOUT_MICRO,
        but={
            PIPELINE: Refused(
                "batch norm cannot train on one sample .* out of a batch of 2; give micro of at "
                "most 1"
            )
        },
    ),
    pictures("vgg with batch norm", vgg, "dropout 0.5 twice", CHAOTIC),
    pictures("mobilenet", mobilenet, "depthwise convolutions", CHAOTIC),
    pictures("shufflenet", shufflenet, "shuffles channels", CHAOTIC, WHOLE_BATCHES),
    pictures("densenet", densenet, "dropout, batch norm before convolution", CHAOTIC),
    pictures(
        "densenet, recomputed",
        recomputing_densenet,
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
    pictures("swin", swin, "StochasticDepth draws per sample by bernoulli_"),
    pictures("vit of torchvision", vit, "nn.MultiheadAttention's dropout"),
    pictures(
        "googlenet",
        googlenet,
        "auxiliary heads in training: the door asked in eval mode alone, and crashed",
        CHAOTIC,
        WHOLE_BATCHES,
        loss=with_heads,
    ),
    pictures(
        "small inception",
        SmallInception,
        "a named tuple in training, a tensor in eval mode",
        CHAOTIC,
        loss=with_heads,
    ),
    pictures(
        "small inception, its loss for training",
        SmallInception,
        "the door tried the loss in eval mode: AttributeError",
        CHAOTIC,
        loss=in_training,
    ),
    pictures(
        "segmentation with its auxiliary head",
        segmentation,
        "a sum of two means: no single divisor",
        CHAOTIC,
        data=MASKS,
        loss=of_both,
    ),
)
