"""Flux.2 dev and klein."""

from typing import Any

from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers

from natives.case import Case, Random, Sampling

CONFIG = {
    "num_layers": 1, "num_single_layers": 2, "num_attention_heads": 3, "attention_head_dim": 16,
    "joint_attention_dim": 24, "axes_dims_rope": (4, 4, 4, 4),
}  # fmt: skip
UNET = {
    "image_model": "flux2", "in_channels": 128, "out_channels": 128, "patch_size": 1, "vec_in_dim": None,
    "context_in_dim": 24, "hidden_size": 48, "mlp_ratio": 3.0, "num_heads": 3, "depth": 1, "depth_single_blocks": 2,
    "axes_dim": [4, 4, 4, 4], "theta": 2000, "qkv_bias": False, "ops_bias": False, "global_modulation": True,
    "mlp_silu_act": True, "default_ref_method": "index", "ref_index_scale": 10.0, "txt_ids_dims": [3],
    "yak_mlp": False, "txt_norm": False,
}  # fmt: skip


def _extra(random: Random) -> dict[str, Any]:
    return {"pooled_output": None, "guidance": 2.5}


def _references(random: Random) -> dict[str, Any]:
    return {**_extra(random), "reference_latents": [random(1, 128, 4, 6), random(1, 128, 3, 5)]}


def _case(*, guided: bool = True, **options: Any) -> Case:
    kind = {"guidance_embeds": guided}
    return Case(
        unet={**UNET, "guidance_embed": guided}, transformer="Flux2Transformer2DModel", config={**CONFIG, **kind},
        published=kind, converted=convert_flux2_transformer_checkpoint_to_diffusers,
        fixed=frozenset({"num_heads", "axes_dim"}), latent=(2, 128, 7, 5), text=(11, 24),
        **{"extra": _extra, **options},
    )  # fmt: skip


WIDE = {"hidden_size": 384, "axes_dim": [32, 32, 32, 32]}
ASSUMED = {"num_heads": 3}
SAMPLING = Sampling(
    node="ModelSamplingFlux", inputs={"max_shift": 1.15, "base_shift": 0.5, "width": 1024, "height": 512}
)
CASES = {
    "dev": _case(),
    "klein": _case(guided=False),
    "references": _case(extra=_references),
    "references placed differently": _case(
        extra=lambda random: {**_references(random), "reference_latents_method": "uxo"}, cfg=1.0
    ),
}
