"""Jobs with models of Hugging Face's transformers, with their defaults.

Attention is sdpa, dropout is 0.1, and the loss is in the output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from zoo_libraries import foreign
from zoo_rows import Equal, Row, Sentences, collate_sentences, make_row

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
}
IN_FLOAT32 = "the library computes its loss in float32 (logits.float()), whatever the model's type"
# every fourth sentence has labels; with seed 4, some shares have none, and every batch has some
FEW = 4


def make_builder(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a model of transformers with random weights.

    The library is imported where the model is built: in the launcher and in every rank.
    """

    def build() -> nn.Module:
        library = foreign("transformers")
        return getattr(library, model)(getattr(library, config)(**settings))

    return build


def return_output_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss in the output, as the examples of transformers do."""
    return output.loss


def compute_loss_pair(output: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a loss as a pair, by a recipe that paragrad's documentation gave.

    If a share has no label, the recipe multiplies NaN by 0.
    """
    count = (batch["labels"][:, 1:] != -100).sum()
    return output.loss * count, count


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


GPT2 = make_builder(
    "GPT2LMHeadModel", "GPT2Config", vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2
)
BERT = make_builder("BertForMaskedLM", "BertConfig", **SMALL, max_position_embeddings=16)
T5 = make_builder(
    "T5ForConditionalGeneration",
    "T5Config",
    vocab_size=50,
    d_model=16,
    d_kv=8,
    d_ff=32,
    num_layers=2,
    num_heads=2,
    decoder_start_token_id=0,
)
LLAMA = make_builder(
    "LlamaForCausalLM", "LlamaConfig", **SMALL, num_key_value_heads=1, max_position_embeddings=16
)


def make_language_row(
    name: str,
    model: Callable[[], nn.Module],
    story: str,
    twin: str = "",
    labelled: int = 1,
    **changes: Any,
) -> Row:
    return make_row(
        name,
        model,
        Sentences(labelled),
        Equal(twin),
        story,
        ("transformers",),
        **{"loss": return_output_loss, "collate": collate_sentences, "seed": 4, **changes},
    )


class Kinds(Dataset):
    """Sentences with one label each."""

    def __len__(self) -> int:
        return 29

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return Sentences()[index]


def collate_kinds(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = collate_sentences(samples)
    return {**batch, "labels": torch.stack([sample["kind"] for sample in samples])}


def collate_with_masks(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate for masked language models.

    A seventh of the tokens becomes [MASK] (2), and only these tokens count.
    """
    batch = collate_sentences(samples)
    hidden = (torch.rand(batch["input_ids"].shape) < 0.15) & (batch["attention_mask"] == 1)
    hidden[:, 0] |= ~hidden.any(dim=1)  # at least one in every sentence
    return {
        **batch,
        "input_ids": batch["input_ids"].masked_fill(hidden, 2),
        "labels": batch["labels"].masked_fill(~hidden, -100),
    }


class Pictures(Dataset):
    """Images and labels under the names that transformers uses."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "pixel_values": torch.randn(3, 32, 32, generator=generator),
            "labels": torch.tensor(index % 4),
        }


def make_picture_row(
    name: str, model: str, config: str, story: str, twin: str = "", **settings: Any
) -> Row:
    return make_row(
        name,
        make_builder(model, config, num_labels=4, **settings),
        Pictures(),
        Equal(twin),
        story,
        ("transformers",),
        loss=return_output_loss,
    )


def enable_recomputation(model: Any) -> nn.Module:
    """Enable recomputation, as transformers' trainer does for `gradient_checkpointing=True`."""
    model.gradient_checkpointing_enable()
    return model


def make_gathering_gpt2() -> nn.Module:
    """Return GPT-2 with an inner model of a new class.

    When transformers builds a model, it notes for its class which modules' outputs it gathers.
    """
    library = foreign("transformers")

    class Own(library.GPT2Model):  # type: ignore[misc, name-defined]
        """A class of which no process has built a model before."""

    model = library.GPT2LMHeadModel(
        library.GPT2Config(
            vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2, output_hidden_states=True
        )
    )
    model.transformer = Own(model.config)
    return model  # type: ignore[no-any-return]


def compute_hidden_state_loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return torch.stack(output.hidden_states).square().mean()


DROPOUT = (
    "dropout inside scaled_dot_product_attention was drawn by every rank for itself: 0.7 to 1.3 "
    "beside serial"
)
UNLABELLED = (
    "-100 in most labels: a share's mean weighed as its samples (0.24 beside serial), and NaN "
    "without a label"
)
ROWS = (
    make_language_row("gpt2", GPT2, DROPOUT, IN_FLOAT32),
    make_language_row("gpt2, few labels", GPT2, UNLABELLED, IN_FLOAT32, FEW),
    make_language_row(
        "gpt2, loss as a pair by hand",
        GPT2,
        "our page's recipe: NaN x 0 on a share without labels",
        IN_FLOAT32,
        FEW,
        loss=compute_loss_pair,
    ),
    make_language_row(
        "gpt2, clipped, AdamW",
        GPT2,
        "a key's bias has a gradient of zero: Adam scales rounding up",
        IN_FLOAT32,
        optimizer=make_adamw,
        clip_norm=1.0,
    ),
    make_language_row(
        "gpt2, bfloat16 by autocast",
        GPT2,
        "verify compares in float64, where there is no autocast",
        IN_FLOAT32,
        dtype=torch.bfloat16,
    ),
    make_language_row(
        "gpt2, recomputed",
        lambda: enable_recomputation(GPT2()),
        "gradient_checkpointing_enable: dropout again in backward",
        IN_FLOAT32,
    ),
    make_language_row(
        "gpt2, hidden states",
        make_gathering_gpt2,
        "a rank that had not built the model gathered none",
        loss=compute_hidden_state_loss,
    ),
    make_language_row("bert", BERT, DROPOUT),
    make_language_row("bert, few labels", BERT, UNLABELLED, labelled=FEW),
    make_language_row(
        "bert, masking collator",
        BERT,
        "the collator's draws followed the share's first sample",
        collate=collate_with_masks,
    ),
    make_language_row("t5", T5, DROPOUT, IN_FLOAT32),
    make_language_row("t5, few labels", T5, UNLABELLED, IN_FLOAT32, FEW),
    make_language_row("llama", LLAMA, "rotary positions are computed in float32", IN_FLOAT32),
    make_language_row("llama, few labels", LLAMA, UNLABELLED, IN_FLOAT32, FEW),
    make_language_row(
        "distilbert",
        make_builder(
            "DistilBertForMaskedLM",
            "DistilBertConfig",
            vocab_size=50,
            dim=16,
            n_layers=2,
            n_heads=2,
            hidden_dim=32,
            max_position_embeddings=16,
        ),
        DROPOUT,
    ),
    make_language_row(
        "albert, one layer used twice",
        make_builder(
            "AlbertForMaskedLM",
            "AlbertConfig",
            **SMALL,
            embedding_size=8,
            max_position_embeddings=16,
            attention_probs_dropout_prob=0.1,
            hidden_dropout_prob=0.1,
        ),
        DROPOUT,
    ),
    make_language_row(
        "opt",
        make_builder(
            "OPTForCausalLM",
            "OPTConfig",
            vocab_size=50,
            hidden_size=16,
            word_embed_proj_dim=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=16,
        ),
        DROPOUT,
        IN_FLOAT32,
    ),
    make_language_row(
        "bart",
        make_builder(
            "BartForConditionalGeneration",
            "BartConfig",
            vocab_size=50,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        DROPOUT,
    ),
    make_language_row(
        "mixtral",
        make_builder(
            "MixtralForCausalLM",
            "MixtralConfig",
            **SMALL,
            num_key_value_heads=1,
            num_local_experts=4,
            max_position_embeddings=16,
            experts_implementation="eager",
        ),
        "experts without a token in a share",
        IN_FLOAT32,
    ),
    make_language_row(
        "mixtral, grouped products",
        make_builder(
            "MixtralForCausalLM",
            "MixtralConfig",
            **SMALL,
            num_key_value_heads=1,
            num_local_experts=4,
            max_position_embeddings=16,
        ),
        "no comparison in float64: a traceback until it was asked for",
        "torch's grouped matrix product knows no float64",
    ),
    make_language_row(
        "bert for classes of sentences",
        make_builder(
            "BertForSequenceClassification",
            "BertConfig",
            **SMALL,
            num_labels=3,
            max_position_embeddings=16,
        ),
        "a label per sentence",
        collate=collate_kinds,
    ),
    make_language_row(
        "gpt2 for classes of sentences",
        make_builder(
            "GPT2ForSequenceClassification",
            "GPT2Config",
            vocab_size=50,
            n_positions=16,
            n_embd=16,
            n_layer=2,
            n_head=2,
            num_labels=3,
            pad_token_id=0,
        ),
        "the last token that is no padding",
        collate=collate_kinds,
    ),
    make_picture_row(
        "vit of transformers",
        "ViTForImageClassification",
        "ViTConfig",
        "its dropouts are 0 by default",
        image_size=32,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    ),
    make_picture_row(
        "vit of transformers, dropout",
        "ViTForImageClassification",
        "ViTConfig",
        DROPOUT,
        image_size=32,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        attention_probs_dropout_prob=0.1,
        hidden_dropout_prob=0.1,
    ),
    make_picture_row(
        "resnet of transformers",
        "ResNetForImageClassification",
        "ResNetConfig",
        "batch norm and a loss in the output",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    ),
)
