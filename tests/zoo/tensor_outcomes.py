"""Expected outcomes of rows of the zoo under tensor(2) and spatial(2).

For tensor(2), a row is listed only if strategies that divide the batch have another outcome.
"""

from __future__ import annotations

from zoo_rows import Equal, Outcomes, Refused

FLOAT32 = Equal("its loss is computed in float32, of parts of the vocabulary in another order")
WHOLE_TENSORS = Refused(
    "needs whole tensors together .* and tensor\\(2\\) divides them; use one that updates element "
    "by element"
)
SMALL_BATCHES = Equal("batch norm over few values")

IN_WIDTH: Outcomes = {
    # every rank has all samples, so code that mixes or counts samples computes as on one worker
    **dict.fromkeys(
        (
            "timm resnet, DropBlock",
            "contrastive loss",
            "batch term of 2e-3",
            "covariance over the batch",
            "root of a mean",
            "mean over the batch in the model",
            "mean over the batch, a buffer of -inf",
            "attention over the batch",
            "mixup in forward",
            "batch norm, a buffer that counts its share",
            "a running mean of its share",
            "bare sum",
        ),
        Equal(),
    ),
    "clip": Equal("scores of a batch of pairs, sharpened"),
    **dict.fromkeys(
        (
            "gpt2",
            "gpt2, few labels",
            "gpt2, loss as a pair by hand",
            "gpt2, clipped, AdamW",
            "gpt2, bfloat16 by autocast",
            "gpt2, recomputed",
            "llama",
            "llama, few labels",
            "opt",
            "mixtral",
            "mixtral, grouped products",
            "mixtral, balanced experts",
        ),
        FLOAT32,
    ),
    "constants in float32": Equal("its constants are in float32"),
    **dict.fromkeys(("densenet", "densenet, recomputed", "instance and group norm"), SMALL_BATCHES),
    **dict.fromkeys(("LARS", "Muon", "Adafactor"), WHOLE_TENSORS),
    "a hook on the optimizer": Refused(
        "SGD has the hook centre, which may look at parameters that are on another rank"
    ),
    "compiled": Refused(
        "compiled code cannot compute with a tensor that is divided; train it without torch.compile"
    ),
}

# all rows on images, with their expected outcomes under spatial(2)
FEW = Equal("statistics of few values, merged over ranks")
OF_IMAGES: Outcomes = {
    **dict.fromkeys(
        (
            "vit of transformers",
            "vit of transformers, dropout",
            "resnet of transformers",
            "timm vit",
            "timm vit, DropPath",
            "timm vit, every dropout",
            "timm vit, dropped patches",
            "timm BatchNormAct2d",
            "timm BatchNormAct2d, SiLU",
            "timm resnet",
            "timm resnet, DropPath",
            "timm resnet, DropBlock",
            "timm efficientnet",
            "timm efficientnet, DropPath",
            "timm convnext, DropPath",
            "timm mixer",
            "timm nfnet",
            "timm mambaout, DropPath",
            "resnet of two stages",
            "resnet18",
            "vgg with batch norm",
            "swin",
            "vit of torchvision",
            "googlenet",
            "small inception",
            "small inception, its loss for training",
            "segmentation with its auxiliary head",
            "fractional max pool",
            "diffusion u-net",
            "batch norm with its activation",
            "batch norm by its function",
            "SyncBatchNorm",
            "batch norm, adam",
            "cutmix",
            "batch norm, a buffer that counts its share",
        ),
        Equal(),
    ),
    **dict.fromkeys(
        ("mobilenet", "shufflenet", "densenet", "densenet, recomputed", "instance and group norm"),
        FEW,
    ),
    "resnet18, last batch of 2": Equal("batch norm over two values"),
    "clip": Equal("scores of a batch of pairs, sharpened"),
}
