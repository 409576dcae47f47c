"""Z-Image and Z-Image-Turbo."""

from typing import Any

import comfy.utils
import diffusers
import torch

from natives.case import Case, Sampling, Weights, by_map

CONFIG = {
    "dim": 288, "n_heads": 3, "n_kv_heads": 3, "n_layers": 1, "n_refiner_layers": 1, "cap_feat_dim": 24,
    "axes_dims": (32, 32, 32), "axes_lens": (1536, 512, 512),
}  # fmt: skip
UNET = {
    "image_model": "lumina2", "patch_size": 2, "in_channels": 16, "dim": 288, "cap_feat_dim": 24, "n_layers": 1,
    "n_refiner_layers": 1, "qk_norm": True, "n_heads": 3, "n_kv_heads": 3, "axes_dims": [32, 32, 32],
    "axes_lens": [1536, 512, 512], "rope_theta": 256.0, "ffn_dim_multiplier": 8.0 / 3.0, "z_image_modulation": True,
    "time_scale": 1000.0, "pad_tokens_multiple": 32,
}  # fmt: skip
FIXED = frozenset({
    "n_refiner_layers", "n_heads", "n_kv_heads", "axes_dims", "axes_lens", "rope_theta", "ffn_dim_multiplier",
    "z_image_modulation", "time_scale", "pad_tokens_multiple",
})  # fmt: skip


def _converted(weights: Weights) -> Weights:
    """Zeros pad the timestep embedder, whose width depends on the model's only in ComfyUI."""
    expected = diffusers.ZImageTransformer2DModel(**CONFIG).state_dict()
    converted = by_map(weights, comfy.utils.z_image_to_diffusers(UNET), list(expected))
    for name in ("t_embedder.mlp.0.weight", "t_embedder.mlp.0.bias", "t_embedder.mlp.2.weight"):
        narrow, converted[name] = converted[name], torch.zeros_like(expected[name])
        converted[name][tuple(map(slice, narrow.shape))] = narrow
    return converted


def _case(**options: Any) -> Case:
    return Case(
        unet=UNET, transformer="ZImageTransformer2DModel", config=CONFIG, converted=_converted, fixed=FIXED,
        published={"axes_lens": (1536, 512, 512)}, latent=(2, 16, 7, 5), text=(11, 24), **options,
    )  # fmt: skip


WIDE = {"dim": 1152, "n_heads": 9, "n_kv_heads": 9, "axes_dims": [32, 48, 48]}
ASSUMED = {name: {**UNET, **WIDE}[name] for name in FIXED}
SAMPLING = Sampling(node="ModelSamplingAuraFlow", inputs={"shift": 2.0})
CASES = {"image": _case(), "turbo": _case(cfg=1.0)}
