"""LTX-Video's VAEs, of all versions from 0.9.0 on, and LTX-2's and 2.3's.

Which layers the encoder and the decoder have follows from names and shapes, except for what metadata says.
"""

import re
from collections.abc import Iterable
from typing import Any

from ...families.architecture import Architecture, Config, Weights, not_supported, substituted

_STRIDES = {8: "spatiotemporal", 4: "spatial", 2: "temporal"}
"""diffusers' names of downsamplings and upsamplings, by how many positions they make one, or make of one."""


def _config(weights: Weights) -> Config:
    metadata = weights.described("vae")
    _refuse_other_layers(metadata)
    patch = round((weights.columns("encoder.conv_in.conv.weight") // 3) ** 0.5)
    encoder = _encoder(weights)
    kinds = [
        kind for kind, has in zip(encoder["downsample_type"], encoder["spatio_temporal_scaling"], strict=True) if has
    ]
    # diffusers ignores names that begin with an underscore.
    own = {f"_{name}": metadata[name] for name in _OWN if metadata.get(name) is not None}
    return encoder | _decoder(weights, metadata) | own | {
        "in_channels": 3,
        "out_channels": weights.rows("decoder.conv_out.conv.weight") // patch**2,
        "latent_channels": weights.columns("decoder.conv_in.conv.weight"),
        "patch_size": patch,
        "patch_size_t": 1,
        "timestep_conditioning": "decoder.timestep_scale_multiplier" in weights,
        "scaling_factor": 1.0,
        "encoder_causal": True,
        "decoder_causal": False,
        "spatial_compression_ratio": patch * 2 ** sum(kind != "temporal" for kind in kinds),
        "temporal_compression_ratio": 2 ** sum(kind != "spatial" for kind in kinds),
    }  # fmt: skip


def _encoder(weights: Weights) -> Config:
    blocks = [f"encoder.down_blocks.{i}" for i in range(weights.count("encoder.down_blocks"))]
    widths = [weights.rows(f"{block}.resnets.0.conv1.conv.weight") for block in [*blocks, "encoder.mid_block"]]
    # From 0.9.5 on, downsamplings change the width and move pixels to channels.
    moved = [f"{block}.downsamplers.0.conv.conv.weight" for block in blocks]
    moves = any(name in weights for name in moved)
    kinds = [
        _STRIDES[width // weights.rows(name)] if name in weights else "conv"
        for name, width in zip(moved, widths[1:], strict=True)
    ]
    scaled = [moves or f"{block}.downsamplers.0.conv.weight" in weights for block in blocks]
    return {
        "block_out_channels": widths if moves else widths[:-1],
        "down_block_types": ["LTXVideo095DownBlock3D" if moves else "LTXVideoDownBlock3D"] * len(blocks),
        "layers_per_block": [weights.count(f"{block}.resnets") for block in [*blocks, "encoder.mid_block"]],
        "spatio_temporal_scaling": scaled,
        "downsample_type": kinds,
    }


def _decoder(weights: Weights, metadata: dict[str, Any]) -> Config:
    """Return the decoder's part of the config, whose lists begin with the finest block."""
    blocks = [f"decoder.up_blocks.{i}" for i in range(weights.count("decoder.up_blocks"))][::-1]
    upsampling = [f"{block}.upsamplers.0.conv.conv.weight" for block in blocks]
    widths = [weights.rows(f"{block}.resnets.0.conv1.conv.weight") for block in blocks]
    factors = [
        weights.columns(name) // width if name in weights else 1 for name, width in zip(upsampling, widths, strict=True)
    ]
    kinds = [_upsampling(weights, name, factor) for name, factor in zip(upsampling, factors, strict=True)]
    stages = [*blocks, "decoder.mid_block"]
    return {
        "decoder_block_out_channels": [width * factor for width, factor in zip(widths, factors, strict=True)],
        "decoder_layers_per_block": [weights.count(f"{stage}.resnets") for stage in stages],
        "decoder_spatio_temporal_scaling": [name in weights for name in upsampling],
        "decoder_inject_noise": [f"{stage}.resnets.0.per_channel_scale1" in weights for stage in stages],
        "upsample_factor": factors,
        "upsample_type": kinds,
        "upsample_residual": _residual(metadata, [name in weights for name in upsampling], factors, kinds),
    }


def _upsampling(weights: Weights, name: str, factor: int) -> str:
    """Return what an upsampling makes more of, by its shape.

    Args:
        name: of its layer.
        factor: by how much it divides the width.

    Raises:
        InvalidRequest: neither time, nor rows and columns, nor all of them.
    """
    if name not in weights:
        return _STRIDES[8]
    positions, rest = divmod(weights.rows(name) * factor, weights.columns(name))
    if rest or positions not in _STRIDES:
        raise not_supported(
            f"the file holds an LTX VAE whose upsampling {name} has shape {list(weights.shape(name))}, which doubles "
            "neither time nor rows and columns"
        )
    return _STRIDES[positions]


def _residual(metadata: dict[str, Any], scaled: list[bool], factors: list[int], kinds: list[str]) -> list[bool]:
    """Return which upsamplings add their input: as the metadata says, or as in the published versions without it.

    In LTX-2.3, which upsamples space or time alone, none does.
    """
    blocks = metadata.get("decoder_blocks", metadata.get("blocks"))
    if blocks is None:
        apart = any(kind != _STRIDES[8] for kind in kinds)
        return [factor > 1 and not apart for factor in factors]
    said = [_adds(block) for block in blocks if block[0].startswith("compress_")]
    remaining = iter(said)
    return [next(remaining, False) if each else False for each in scaled]


def _adds(block: list[Any]) -> bool:
    """Whether an upsampling adds its input; ComfyUI takes no notice of what is said of space or time alone."""
    return block[0] == "compress_all" and bool(_options(block).get("residual", False))


_EXPECTED: dict[str, tuple[Any, ...]] = {
    "dims": (3,), "norm_layer": ("pixel_norm",), "latent_log_var": ("uniform",), "causal_decoder": (None, False),
    "spatial_padding_mode": (None, "zeros", "reflect", "replicate"),
}  # fmt: skip
"""The values that the metadata's ``config`` may have; None for absent."""

_OWN = ("spatial_padding_mode", "decode_noise_scale", "decode_timestep")
"""Entries of the metadata that our class takes, and diffusers' has not."""

_BLOCKS = {
    "encoder_blocks": {"res_x", "res_x_y", "compress_all", "compress_all_res", "compress_space_res",
                       "compress_time_res"},
    "decoder_blocks": {"res_x", "res_x_y", "compress_all", "compress_space", "compress_time"},
}  # fmt: skip
"""The kinds of blocks that our class has."""


def _refuse_other_layers(metadata: dict[str, Any]) -> None:
    """Refuse metadata that describes layers that our class lacks.

    Raises:
        InvalidRequest: names the entry.
    """
    if not metadata:
        return
    wrong = [f"{name} {metadata.get(name)!r}" for name, values in _EXPECTED.items() if metadata.get(name) not in values]
    for name, known in _BLOCKS.items():
        blocks = metadata.get(name, metadata.get("blocks", []))
        wrong += [f"{block[0]} in {name}" for block in blocks if block[0] not in known]
    if wrong:
        raise not_supported(f"the file's metadata describes an LTX VAE with {', '.join(wrong)}")


def _options(block: list[Any]) -> dict[str, Any]:
    return block[1] if isinstance(block[1], dict) else {}


_PATTERNS = (
    (r"\.res_blocks\.", ".resnets."), (r"\.conv_shortcut\.", ".conv_shortcut.conv."), (r"\.norm3\.norm\.", ".norm3."),
    (r"\.last_time_embedder\.", ".time_embedder."), (r"\.last_scale_shift_table$", ".scale_shift_table"),
    (r"^per_channel_statistics\.mean-of-means$", "latents_mean"),
    (r"^per_channel_statistics\.std-of-means$", "latents_std"),
)  # fmt: skip
"""Patterns of the original names, and diffusers' names."""

_LAYER = re.compile(r"(encoder\.down_blocks|decoder\.up_blocks)\.(\d+)\.")


def _names(names: Iterable[str]) -> dict[str, str]:
    """Return diffusers' names by the original ones, whose blocks are one list of stages and resamplings."""
    names = list(names)
    blocks = _down_blocks(_kinds(names, "encoder.down_blocks")) | _up_blocks(_kinds(names, "decoder.up_blocks"))
    renamed = {name: substituted(_LAYER.sub(lambda found: blocks[found[0]], name), _PATTERNS) for name in names}
    return {name: new for name, new in renamed.items() if not new.startswith("per_channel_statistics.")}


def _kinds(names: list[str], blocks: str) -> list[str]:
    """Return what each entry of a list is: a stage of residual blocks, one residual block, or a resampling.

    Raises:
        KeyError: an entry is missing. The ones after it would take its place.
    """
    inner: dict[int, set[str]] = {}
    for name in names:
        if name.startswith(f"{blocks}."):
            number, part = name.removeprefix(f"{blocks}.").split(".")[:2]
            inner.setdefault(int(number), set()).add(part)
    missing = next((number for number in range(len(inner)) if number not in inner), None)
    if missing is not None:
        raise KeyError(f"{blocks}.{missing}")
    kinds = [inner[number] for number in range(len(inner))]
    return ["stage" if "res_blocks" in kind else "block" if "conv1" in kind else "resampling" for kind in kinds]


def _down_blocks(kinds: list[str]) -> dict[str, str]:
    """Return diffusers' beginnings of names for the encoder: a block is a stage and what follows it."""
    found, block = {}, -1
    for i, kind in enumerate(kinds):
        block += kind == "stage"
        inner = {"stage": "", "resampling": "downsamplers.0.", "block": "conv_out."}[kind]
        found[f"encoder.down_blocks.{i}."] = f"encoder.down_blocks.{block}.{inner}"
    return found | {f"encoder.down_blocks.{len(kinds) - 1}.": "encoder.mid_block."}


def _up_blocks(kinds: list[str]) -> dict[str, str]:
    """Return diffusers' beginnings of names for the decoder: a block is a stage and what precedes it."""
    found, block = {"decoder.up_blocks.0.": "decoder.mid_block."}, 0
    for i, kind in enumerate(kinds[1:], start=1):
        inner = {"stage": "", "resampling": "upsamplers.0.", "block": "conv_in."}[kind]
        found[f"decoder.up_blocks.{i}."] = f"decoder.up_blocks.{block}.{inner}"
        block += kind == "stage"
    return found


LTX_VAE = Architecture(
    class_name="AutoencoderKLLTXVideo",
    native=("decoder.up_blocks.0.res_blocks.0.conv1.conv.weight", "encoder.conv_in.conv.weight",
            "per_channel_statistics.std-of-means"),
    diffusers=("encoder.down_blocks.0.resnets.0.conv1.conv.weight", "latents_mean",
               "decoder.mid_block.resnets.0.conv1.conv.weight"),
    config=_config,
    in_diffusers=_names,
)  # fmt: skip
