"""Qwen-Image and Qwen-Image-Edit."""

from typing import Any

from natives.case import Case, Random, Sampling

CONFIG = {
    "num_layers": 2, "num_attention_heads": 3, "attention_head_dim": 16, "joint_attention_dim": 24,
    "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
SIZES = {"num_attention_heads": 3, "attention_head_dim": 16, "joint_attention_dim": 24, "axes_dims_rope": [4, 6, 6]}
UNET = {"image_model": "qwen_image", "in_channels": 64, "num_layers": 2, **SIZES}


def _edit(random: Random) -> dict[str, Any]:
    return {"reference_latents": [random(1, 16, 1, 10, 14), random(1, 16, 1, 5, 9)]}


def _offset(random: Random) -> dict[str, Any]:
    return {**_edit(random), "reference_latents_method": "offset"}


def _case(*, timestep_zero: bool = False, **options: Any) -> Case:
    kind = {"zero_cond_t": timestep_zero}
    return Case(
        unet={**UNET, "default_ref_method": "index_timestep_zero"} if timestep_zero else UNET,
        transformer="QwenImageTransformer2DModel", config={**CONFIG, **kind}, published=kind, fixed=frozenset(SIZES),
        converted=lambda weights: {name: tensor for name, tensor in weights.items() if "__" not in name},
        **{"latent": (2, 16, 1, 8, 12), "text": (11, 24), **options},
    )  # fmt: skip


WIDE = {"attention_head_dim": 128, "axes_dims_rope": [16, 56, 56]}
ASSUMED = {"num_attention_heads": 3, "joint_attention_dim": 24}
SAMPLING = Sampling(node="ModelSamplingAuraFlow", inputs={"shift": 3.1})
CASES = {
    "image": _case(),
    "odd sides": _case(latent=(2, 16, 1, 5, 10)),
    "edit": _case(extra=_edit),
    "edit, placed differently": _case(extra=_offset, cfg=1.0),
    "edit 2511": _case(timestep_zero=True, extra=_edit),
}
