"""Flux.1 dev, schnell, Fill and Kontext."""

from typing import Any

import comfy.utils
import diffusers

from natives.case import Case, Random, Sampling, Weights, by_map

CONFIG = {
    "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 3, "attention_head_dim": 16,
    "joint_attention_dim": 24, "pooled_projection_dim": 20, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
UNET = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "patch_size": 2, "vec_in_dim": 20,
    "context_in_dim": 24, "hidden_size": 48, "mlp_ratio": 4.0, "num_heads": 3, "depth": 2, "depth_single_blocks": 2,
    "axes_dim": [4, 6, 6], "theta": 10000, "qkv_bias": True, "txt_ids_dims": [], "yak_mlp": False, "txt_norm": False,
}  # fmt: skip

FIXED = frozenset({"num_heads", "axes_dim", "context_in_dim", "hidden_size"})


def _extra(random: Random) -> dict[str, Any]:
    return {"pooled_output": random(1, 20), "guidance": 2.5}


def _fill(random: Random) -> dict[str, Any]:
    mask = (random(1, 1, 56, 40) > 0).float()
    return _extra(random) | {"concat_latent_image": random(1, 16, 7, 5), "concat_mask": mask}


def _kontext(random: Random) -> dict[str, Any]:
    return _extra(random) | {"reference_latents": [random(1, 16, 4, 6), random(1, 16, 3, 5)]}


def _case(*, guided: bool = True, channels: int = 16, **options: Any) -> Case:
    kind = {"guidance_embeds": guided, "in_channels": 4 * channels, "out_channels": 64}
    config = {**CONFIG, **kind}
    unet = {**UNET, "guidance_embed": guided, "in_channels": channels}

    def converted(weights: Weights) -> Weights:
        names = diffusers.FluxTransformer2DModel(**config).state_dict()
        return by_map(weights, comfy.utils.flux_to_diffusers(unet), list(names))

    return Case(
        unet=unet, transformer="FluxTransformer2DModel", config=config, published=kind, converted=converted,
        fixed=FIXED, latent=(2, 16, 7, 5), text=(11, 24), **{"extra": _extra, **options},
    )  # fmt: skip


WIDE = {"hidden_size": 384, "axes_dim": [16, 56, 56]}
ASSUMED = {"num_heads": 3}
SAMPLING = Sampling(
    node="ModelSamplingFlux", inputs={"max_shift": 1.15, "base_shift": 0.5, "width": 1024, "height": 512}
)
CASES = {
    "dev": _case(),
    "schnell": _case(guided=False, cfg=1.0),
    "fill": _case(channels=96, extra=_fill),
    "kontext": _case(extra=_kontext),
}
