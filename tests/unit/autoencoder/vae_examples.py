"""Tiny random VAEs of every class, each with the ratios that are peculiar to it."""

from typing import Any

from lab.verify.vae.kinds import Kind

GROUPS = {"block_out_channels": [8, 8, 16, 16], "norm_num_groups": 4, "layers_per_block": 1}
WAN = {"base_dim": 4, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1}
LTX: dict[str, Any] = {
    "latent_channels": 8, "block_out_channels": [8, 16, 16, 16], "layers_per_block": [1] * 5,
    "decoder_block_out_channels": [8, 16, 16, 16], "decoder_layers_per_block": [1] * 5,
}  # fmt: skip
NOISY = {
    "timestep_conditioning": True, "decoder_inject_noise": [True, True, True, False],
    "decoder_block_out_channels": [8, 16, 32], "decoder_layers_per_block": [1] * 4,
    "decoder_spatio_temporal_scaling": [True] * 3, "upsample_residual": [True] * 3, "upsample_factor": [2] * 3,
}  # fmt: skip
APART = {
    "block_out_channels": [8, 8, 16, 16, 16], "down_block_types": ["LTXVideo095DownBlock3D"] * 4,
    "spatio_temporal_scaling": [True] * 4, "spatial_compression_ratio": 32, "temporal_compression_ratio": 8,
    "downsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
    "decoder_block_out_channels": [8, 16, 16, 32], "decoder_layers_per_block": [1] * 5,
    "decoder_spatio_temporal_scaling": [True] * 4, "decoder_inject_noise": [False] * 5,
    "upsample_residual": [False] * 4, "upsample_factor": [2, 2, 1, 2],
    "upsample_type": ["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
}  # fmt: skip
BLOCKS = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "image": ("AutoencoderKL", GROUPS | BLOCKS | {"latent_channels": 4}),
    "flux2": ("AutoencoderKLFlux2", GROUPS | BLOCKS | {"latent_channels": 4}),
    "temporal": (
        "AutoencoderKLTemporalDecoder",
        {"block_out_channels": [32] * 4, "latent_channels": 4, "down_block_types": BLOCKS["down_block_types"]},
    ),
    "wan21": ("AutoencoderKLWan", WAN),
    "wan22": (
        "AutoencoderKLWan",
        WAN | {
            "z_dim": 6, "decoder_base_dim": 8, "is_residual": True, "in_channels": 12, "out_channels": 12,
            "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": [0.1] * 6, "latents_std": [2.0] * 6,
        },
    ),
    "qwen_image": ("AutoencoderKLQwenImage", WAN),
    "cogvideox": ("AutoencoderKLCogVideoX", GROUPS | {"latent_channels": 5}),
    "hunyuan_video": ("AutoencoderKLHunyuanVideo", GROUPS | {"latent_channels": 6}),
    "ltx": ("AutoencoderKLLTXVideo", LTX),
    "ltx_noisy": ("AutoencoderKLLTXVideo", LTX | NOISY),
    "ltx2": ("AutoencoderKLLTXVideo", LTX | APART),
    "mochi": (
        "AutoencoderKLMochi",
        {
            "encoder_block_out_channels": [32] * 4, "decoder_block_out_channels": [32] * 4,
            "layers_per_block": [1] * 5,
        },
    ),
    "minimax_h3": (
        "AutoencoderKLMiniMaxH3",
        {
            "block_out_channels": [8] * 6, "layers_per_block": 1, "norm_num_groups": 4, "decoder_num_layers": 2,
            "decoder_num_attention_heads": 1, "latents_mean": [0.1] * 24, "latents_std": [1.5] * 24,
        },
    ),
    "open_sora1": (
        "VideoAutoencoderPipeline",
        {
            "block_out_channels": [8, 8, 16, 16], "layers_per_block": 1, "filters": 8, "num_res_blocks": 1,
            "norm_num_groups": 4,
        },
    ),
}  # fmt: skip
"""Class and config of each example, by name."""


def build(name: str) -> Any:
    """Return the module. Buffers such as running statistics are random, not 0 and 1."""
    class_name, config = CONFIGS[name]
    return Kind(class_name=class_name, config=lambda _: config).module(0)
