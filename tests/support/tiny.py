"""Tiny pipelines with seeded random weights, in diffusers layout, for tests that need a model but no real image."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

WORDS = ("a", "the", "red", "green", "blue", "circle", "square", "on", "background", "moving", "left", "right")
PAD, EOS, UNKNOWN = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """Sizes of a tiny Wan pipeline. Latents have the channels and ratios of Wan's VAE, which ComfyUI expects."""

    heads: int = 4
    head_dim: int = 12
    layers: int = 2
    channels: int = 16
    text_dim: int = 32
    patch: tuple[int, int, int] = (1, 2, 2)
    seed: int = 0
    vae: bool = True
    dtype: torch.dtype = torch.float32


def write(folder: Path, tiny: Tiny | None = None) -> Path:
    """Write a pipeline into ``folder`` and return it."""
    tiny = tiny or Tiny()
    index: dict[str, Any] = {"_class_name": "WanPipeline", "_diffusers_version": "0.42.1"}
    _save(transformer(tiny), folder / "transformer", tiny)
    index["transformer"] = ["diffusers", "WanTransformer3DModel"]
    if tiny.vae:
        _save(vae(tiny), folder / "vae", tiny)
        index["vae"] = ["diffusers", "AutoencoderKLWan"]
    _save(text_encoder(tiny), folder / "text_encoder", tiny)
    index["text_encoder"] = ["transformers", "UMT5EncoderModel"]
    _write_tokenizer(folder / "tokenizer")
    index["tokenizer"] = ["transformers", "T5TokenizerFast"]
    _write_scheduler(folder / "scheduler")
    index["scheduler"] = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return folder


def transformer(tiny: Tiny) -> Any:
    """Return the transformer, with weights so large that every part of it affects the output."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(tiny.seed)
    model = WanTransformer3DModel(
        patch_size=tiny.patch,
        num_attention_heads=tiny.heads,
        attention_head_dim=tiny.head_dim,
        in_channels=tiny.channels,
        out_channels=tiny.channels,
        text_dim=tiny.text_dim,
        freq_dim=32,
        ffn_dim=64,
        num_layers=tiny.layers,
        rope_max_seq_len=64,
    )
    return _spread(model)


def vae(tiny: Tiny) -> Any:
    """Return a VAE with Wan's ratios: 1/8 in space, 1/4 in time."""
    from diffusers import AutoencoderKLWan

    torch.manual_seed(tiny.seed + 1)
    return AutoencoderKLWan(
        base_dim=4,
        z_dim=tiny.channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()


def text_encoder(tiny: Tiny) -> Any:
    """Return a one-layer UMT5 encoder."""
    from transformers import UMT5Config, UMT5EncoderModel

    torch.manual_seed(tiny.seed + 2)
    config = UMT5Config(
        vocab_size=len(WORDS) + 3, d_model=tiny.text_dim, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        pad_token_id=PAD, eos_token_id=EOS, dropout_rate=0.0,
    )  # fmt: skip
    return _spread(UMT5EncoderModel(config))


def _spread(model: nn.Module) -> nn.Module:
    """Scale matrices to unit gain and randomise vectors, so that rounding hides no part of the model."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def _save(model: Any, folder: Path, tiny: Tiny) -> None:
    model.to(tiny.dtype).save_pretrained(str(folder), safe_serialization=True)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder.mkdir(parents=True)
    vocabulary = {"<pad>": PAD, "</s>": EOS, "<unk>": UNKNOWN} | {word: i + 3 for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "T5TokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2), encoding="utf-8")


def _write_scheduler(folder: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    FlowMatchEulerDiscreteScheduler(shift=8.0).save_pretrained(str(folder))
