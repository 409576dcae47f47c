"""Mochi's VAE."""

import re
from collections.abc import Iterable

from ...families.architecture import Architecture, Config, Tensors, Weights, substituted


def _config(weights: Weights) -> Config:
    downs = [f"encoder.down_blocks.{i}" for i in range(weights.count("encoder.down_blocks"))]
    ups = [f"decoder.up_blocks.{i}" for i in range(weights.count("decoder.up_blocks"))]
    stages = ["encoder.block_in", *downs, "encoder.block_out"]
    reductions = [weights.shape(f"{down}.conv_in.conv.weight") for down in downs]
    decoder = [weights.rows(f"{each}.resnets.0.conv1.conv.weight") for each in (*ups, "decoder.block_out")]
    return {
        "in_channels": weights.columns("encoder.proj_in.weight"),
        "out_channels": weights.rows("decoder.proj_out.weight"),
        "encoder_block_out_channels": [weights.rows("encoder.proj_in.weight"), *(shape[0] for shape in reductions)],
        "decoder_block_out_channels": decoder[::-1],
        "latent_channels": weights.columns("decoder.conv_in.weight"),
        "layers_per_block": [weights.count(f"{stage}.resnets") for stage in stages],
        "temporal_expansions": [shape[2] for shape in reductions],
        "spatial_expansions": [shape[3] for shape in reductions],
        "add_attention_block": [f"{stage}.norms.0.norm_layer.weight" in weights for stage in stages],
        "latents_mean": None,
        "latents_std": None,
    }


_PATTERNS = (
    (r"\.resnets\.(\d+)\.attn_block\.norm\.", r".norms.\1.norm_layer."),
    (r"\.resnets\.(\d+)\.attn_block\.attn\.qkv\.", r".attentions.\1.to_qkv."),
    (r"\.resnets\.(\d+)\.attn_block\.attn\.out\.", r".attentions.\1.to_out.0."),
    (r"\.stack\.0\.", ".norm1.norm_layer."), (r"\.stack\.2\.", ".conv1.conv."),
    (r"\.stack\.3\.", ".norm2.norm_layer."), (r"\.stack\.5\.", ".conv2.conv."),
    (r"\.output_norm\.", ".norm_out.norm_layer."), (r"\.output_proj\.", ".proj_out."),
)  # fmt: skip
"""Patterns of the original names inside a stage, and diffusers' names."""

_ENCODER = re.compile(r"encoder\.layers\.(\d+)\.(?:layers\.(\d+)\.)?")
"""One list: a projection, the first stage's layers, a list for each downsampling, and the last stage's layers."""

_DECODER = re.compile(r"decoder\.blocks\.(\d+)\.(?:blocks\.)?(\d+\.|proj\.)")
"""A list of stages. The first one begins with a convolution."""


def _names(names: Iterable[str]) -> dict[str, str]:
    """Return diffusers' names by the original ones; ``to_qkv`` stands for the three layers that it is split into."""
    names = list(names)
    encoder = [found for name in names if (found := _ENCODER.match(name))]
    downs = sorted({int(found[1]) for found in encoder if found[2]})
    last = max((int(found[1]) for name in names if (found := _DECODER.match(name))), default=0)
    return {
        name: substituted(
            _DECODER.sub(
                lambda found: _decoder(int(found[1]), found[2], last),
                _ENCODER.sub(lambda found: _encoder(int(found[1]), found[2], downs), name),
            ),
            _PATTERNS,
        )
        for name in names
    }


def _encoder(number: int, position: str | None, downs: list[int]) -> str:
    if number == 0:
        return "encoder.proj_in."
    if position is not None:
        inner = "conv_in.conv." if position == "0" else f"resnets.{int(position) - 1}."
        return f"encoder.down_blocks.{downs.index(number)}.{inner}"
    if not downs or number < downs[0]:
        return f"encoder.block_in.resnets.{number - 1}."
    return f"encoder.block_out.resnets.{number - downs[-1] - 1}."


def _decoder(stage: int, inner: str, last: int) -> str:
    if stage == 0:
        return "decoder.conv_in." if inner == "0." else f"decoder.block_in.resnets.{int(inner[:-1]) - 1}."
    if stage == last:
        return f"decoder.block_out.resnets.{inner}"
    return f"decoder.up_blocks.{stage - 1}.{inner if inner == 'proj.' else f'resnets.{inner}'}"


def _convert(tensors: Tensors) -> Tensors:
    converted: Tensors = {}
    for name, new in _names(tensors).items():
        if ".to_qkv." in new:
            parts = zip(("to_q", "to_k", "to_v"), tensors[name].chunk(3), strict=True)
            converted |= {new.replace("to_qkv", layer): part for layer, part in parts}
        else:
            converted[new] = tensors[name]
    return converted


MOCHI_VAE = Architecture(
    class_name="AutoencoderKLMochi",
    native=("encoder.output_proj.weight", "decoder.blocks.0.0.weight", "decoder.output_proj.weight"),
    diffusers=("encoder.block_in.resnets.0.conv1.conv.weight", "decoder.block_out.resnets.0.conv1.conv.weight"),
    config=_config,
    convert=_convert,
    in_diffusers=_names,
)
