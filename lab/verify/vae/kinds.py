"""Small random VAEs of every supported kind, with the proportions of published ones."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel_backend.vaes import module_class_of

WIDTH = 32
"""Channels of the first level; published VAEs have 128 (Wan 96)."""

_SHARES = (".scale1", ".scale2")
"""Ends of the names of what a layer of MiniMax-H3's decoder is multiplied by, which begins at 0."""

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One form of a VAE class of diffusers.

    Attributes:
        class_name: class of diffusers.
        config: returns the config, given the channels of the first level.
    """

    class_name: str
    config: Callable[[int], Config]

    def module(self, width: int) -> Any:
        """Return the module with random weights; latent statistics, if it has any, differ from 0 and 1."""
        torch.manual_seed(0)
        module = module_class_of(self.class_name)(**self.config(width)).eval().requires_grad_(False)
        for name, parameter in module.named_parameters():
            parameter.add_(float(name.endswith(_SHARES)) + 0.05 * torch.randn_like(parameter))
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
        return module


def _pictures(width: int) -> dict[str, Any]:
    return {
        "block_out_channels": [width, 2 * width, 4 * width, 4 * width], "norm_num_groups": _groups(width),
        "down_block_types": ["DownEncoderBlock2D"] * 4,
    }  # fmt: skip


def _groups(width: int) -> int:
    return min(32, width // 2)


def _image(width: int, channels: int) -> Config:
    return _pictures(width) | {
        "up_block_types": ["UpDecoderBlock2D"] * 4, "layers_per_block": 2, "latent_channels": channels,
    }  # fmt: skip


def _temporal(width: int) -> Config:
    wide = max(32, width)  # it always has 32 groups
    return {
        "block_out_channels": [wide, 2 * wide, 4 * wide, 4 * wide], "latent_channels": 4, "layers_per_block": 2,
        "down_block_types": ["DownEncoderBlock2D"] * 4,
    }  # fmt: skip


def _wan21(width: int) -> Config:
    return {"base_dim": width * 3 // 4}


def _wan22(width: int) -> Config:
    return {
        "base_dim": width * 5 // 4, "decoder_base_dim": width * 2, "z_dim": 48, "is_residual": True, "in_channels": 12,
        "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": [0.1] * 48,
        "latents_std": [2.0] * 48,
    }  # fmt: skip


def _cogvideox(width: int) -> Config:
    return {
        "block_out_channels": [width, 2 * width, 2 * width, 4 * width], "norm_num_groups": _groups(width),
        "layers_per_block": 2, "latent_channels": 16,
    }  # fmt: skip


def _hunyuan_video(width: int) -> Config:
    return {
        "block_out_channels": [width, 2 * width, 4 * width, 4 * width], "norm_num_groups": _groups(width),
        "layers_per_block": 2,
    }  # fmt: skip


def _ltx(width: int) -> Config:
    levels = [width, 2 * width, 4 * width, 4 * width]
    return {"block_out_channels": levels, "decoder_block_out_channels": levels}


def _ltx_noisy(width: int) -> Config:
    return {
        "block_out_channels": [width, 2 * width, 4 * width, 8 * width, 8 * width], "layers_per_block": [2] * 5,
        "down_block_types": ["LTXVideo095DownBlock3D"] * 4, "spatio_temporal_scaling": [True] * 4,
        "downsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
        "spatial_compression_ratio": 32, "temporal_compression_ratio": 8,
        "timestep_conditioning": True, "decoder_inject_noise": [True, True, True, False],
        "decoder_block_out_channels": [2 * width, 4 * width, 8 * width], "decoder_layers_per_block": [2] * 4,
        "decoder_spatio_temporal_scaling": [True] * 3, "upsample_residual": [True] * 3, "upsample_factor": [2] * 3,
    }  # fmt: skip


def _ltx2(width: int) -> Config:
    """LTX-2.3's: upsamplings of space and time, together and apart, that add no input."""
    return {
        **_ltx_noisy(width),
        "timestep_conditioning": False, "decoder_inject_noise": [False] * 5, "decoder_layers_per_block": [2] * 5,
        "decoder_block_out_channels": [2 * width, 4 * width, 4 * width, 8 * width],
        "decoder_spatio_temporal_scaling": [True] * 4, "upsample_factor": [2, 2, 1, 2],
        "upsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"], "upsample_residual": [False] * 4,
    }  # fmt: skip


def _mochi(width: int) -> Config:
    wide = max(32, width)  # it always has 32 groups
    return {
        "encoder_block_out_channels": [wide, wide, 2 * wide, 3 * wide],
        "decoder_block_out_channels": [wide, 2 * wide, 4 * wide, 6 * wide], "layers_per_block": [2] * 5,
    }  # fmt: skip


def _open_sora1(width: int) -> Config:
    wide = max(32, width)  # single files do not show the number of groups, which is 32
    return {
        "block_out_channels": [wide, 2 * wide, 4 * wide, 4 * wide], "layers_per_block": 2, "filters": wide,
        "num_res_blocks": 2,
    }  # fmt: skip


def _minimax_h3(width: int) -> Config:
    return {
        "block_out_channels": [width * factor for factor in (1, 2, 2, 4, 4, 8)], "norm_num_groups": _groups(width),
        "layers_per_block": 2, "decoder_num_layers": 2, "decoder_num_attention_heads": max(1, width // 4),
        "latents_mean": [0.1] * 24, "latents_std": [1.5] * 24,
    }  # fmt: skip


KINDS: dict[str, Kind] = {
    "image": Kind(class_name="AutoencoderKL", config=lambda width: _image(width, 16)),
    "flux2": Kind(class_name="AutoencoderKLFlux2", config=lambda width: _image(width, 32)),
    "temporal": Kind(class_name="AutoencoderKLTemporalDecoder", config=_temporal),
    "wan21": Kind(class_name="AutoencoderKLWan", config=_wan21),
    "wan22": Kind(class_name="AutoencoderKLWan", config=_wan22),
    "qwen_image": Kind(class_name="AutoencoderKLQwenImage", config=_wan21),
    "cogvideox": Kind(class_name="AutoencoderKLCogVideoX", config=_cogvideox),
    "hunyuan_video": Kind(class_name="AutoencoderKLHunyuanVideo", config=_hunyuan_video),
    "ltx": Kind(class_name="AutoencoderKLLTXVideo", config=_ltx),
    "ltx_noisy": Kind(class_name="AutoencoderKLLTXVideo", config=_ltx_noisy),
    "ltx2": Kind(class_name="AutoencoderKLLTXVideo", config=_ltx2),
    "mochi": Kind(class_name="AutoencoderKLMochi", config=_mochi),
    "minimax_h3": Kind(class_name="AutoencoderKLMiniMaxH3", config=_minimax_h3),
    "open_sora1": Kind(class_name="VideoAutoencoderPipeline", config=_open_sora1),
}
"""By the name on the command line."""


def write(folder: Path, module: Any) -> Path:
    """Write a checkpoint in diffusers layout that holds only a VAE, and return its folder."""
    module.save_pretrained(folder / "vae")
    parts = {"transformer": ["diffusers", "WanTransformer3DModel"], "vae": ["diffusers", type(module).__name__]}
    (folder / "model_index.json").write_text(
        json.dumps({"_class_name": "DiffusionPipeline", **parts}), encoding="utf-8"
    )
    return folder
