"""Wan's VAEs: 2.1, whose weights have the names and shapes of Qwen-Image's, and 2.2, which works on patches."""

import re
from collections.abc import Iterable

from ...families.architecture import Architecture, Config, Weights, substituted


def _config(weights: Weights) -> Config:
    has_patches = "encoder.down_blocks.0.resnets.0.conv1.weight" in weights
    patch = 2 if has_patches else 1
    levels = weights.count("decoder.up_blocks")
    resnets = weights.count("decoder.up_blocks.0.resnets") - 1
    encoder = _encoder(weights, levels, layers=1 if has_patches else resnets + 1, is_residual=has_patches)
    finest = weights.rows(f"decoder.up_blocks.{levels - 1}.resnets.0.conv2.weight")
    return encoder | {
        "decoder_base_dim": finest // encoder["dim_mult"][0],
        "z_dim": weights.rows("post_quant_conv.weight"),
        "num_res_blocks": resnets,
        "in_channels": weights.columns("encoder.conv_in.weight"),
        "out_channels": weights.rows("decoder.conv_out.weight"),
        "patch_size": patch if has_patches else None,
        "scale_factor_temporal": 2 ** sum(encoder["temperal_downsample"]),
        "scale_factor_spatial": 2 ** (levels - 1) * patch,
        "latents_mean": None,
        "latents_std": None,
    }


def _encoder(weights: Weights, levels: int, *, layers: int, is_residual: bool) -> Config:
    """Return the encoder's part of the config, from its list of blocks with ``layers`` blocks a level.

    In Wan 2.1's, a downsampling is the last block of each level but the last.
    """
    first, downsampling = (".resnets.0", ".downsampler") if is_residual else ("", "")
    starts = [level * layers for level in range(levels)]
    ends = [start + layers - 1 for start in starts[:-1]]
    width = weights.rows("encoder.conv_in.weight")
    return {
        "base_dim": width,
        "dim_mult": [weights.rows(f"encoder.down_blocks.{i}{first}.conv2.weight") // width for i in starts],
        "temperal_downsample": [f"encoder.down_blocks.{i}{downsampling}.time_conv.weight" in weights for i in ends],
        "is_residual": is_residual,
    }


_PATTERNS = (
    (r"^conv1\.", "quant_conv."), (r"^conv2\.", "post_quant_conv."), (r"coder\.conv1\.", "coder.conv_in."),
    (r"\.head\.0\.", ".norm_out."), (r"\.head\.2\.", ".conv_out."), (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."), (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.downsamples\.(\d+)\.downsamples\.\d+\.(resample|time_conv)\.", r".down_blocks.\1.downsampler.\2."),
    (r"\.upsamples\.(\d+)\.upsamples\.\d+\.(resample|time_conv)\.", r".up_blocks.\1.upsampler.\2."),
    (r"\.downsamples\.(\d+)\.downsamples\.", r".down_blocks.\1.resnets."),
    (r"\.upsamples\.(\d+)\.upsamples\.", r".up_blocks.\1.resnets."),
    (r"\.downsamples\.", ".down_blocks."), (r"\.shortcut\.", ".conv_shortcut."),
    (r"\.residual\.0\.", ".norm1."), (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."), (r"\.residual\.6\.", ".conv2."),
)  # fmt: skip
"""Patterns of the original names, and diffusers' names."""

_FLAT = re.compile(r"decoder\.upsamples\.(\d+)\.(?!upsamples\.)")
"""The layers of Wan 2.1's decoder, which are one list."""


def _names(names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    upsamplings = [int(found[1]) for name in names if (found := _FLAT.match(name)) and ".resample." in name]
    resnets = min(upsamplings, default=len(names))

    def layer(found: re.Match[str]) -> str:
        level, position = divmod(int(found[1]), resnets + 1)
        return f"decoder.up_blocks.{level}." + ("upsamplers.0." if position == resnets else f"resnets.{position}.")

    return {name: substituted(_FLAT.sub(layer, name), _PATTERNS) for name in names}


WAN_VAE = Architecture(
    class_name="AutoencoderKLWan",
    native=("decoder.middle.0.residual.0.gamma", "encoder.conv1.weight", "decoder.head.0.gamma"),
    diffusers=("encoder.mid_block.resnets.0.norm1.gamma", "decoder.up_blocks.0.resnets.0.norm1.gamma",
               "post_quant_conv.weight"),
    config=_config,
    in_diffusers=_names,
)  # fmt: skip
