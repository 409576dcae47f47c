"""Krea-2, Raw and Turbo, and references in versions of ComfyUI that have them."""

import re
from inspect import signature
from typing import Any

import comfy.supported_models

from natives.case import Case, Random, Sampling, Weights

CONFIG = {
    "num_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "attention_head_dim": 128,
    "intermediate_size": 2048, "text_hidden_dim": 40, "num_text_layers": 3, "text_intermediate_size": 128,
}  # fmt: skip
UNET = {
    "image_model": "krea2", "features": 768, "channels": 16, "patch": 2, "layers": 2, "heads": 6, "kvheads": 3,
    "txtlayers": 3, "txtdim": 40,
}  # fmt: skip
NAMES = (
    (r"^first\.", "img_in."), (r"^tmlp\.0", "time_embed.linear_1"), (r"^tmlp\.2", "time_embed.linear_2"),
    (r"^tproj\.1", "time_mod_proj"), (r"^txtmlp\.0\.scale", "txt_in.norm.weight"), (r"^txtmlp\.1", "txt_in.linear_1"),
    (r"^txtmlp\.3", "txt_in.linear_2"), (r"^txtfusion", "text_fusion"), (r"^blocks", "transformer_blocks"),
    (r"^last\.modulation\.lin", "final_layer.scale_shift_table"), (r"^last", "final_layer"),
    (r"\.mod\.lin$", ".scale_shift_table"), (r"\.attn\.w([qkv])\.", r".attn.to_\1."), (r"\.wo\.", ".to_out.0."),
    (r"\.attn\.gate\.", ".attn.to_gate."), (r"\.qknorm\.([qk])norm\.scale", r".norm_\1.weight"),
    (r"\.mlp\.", ".ff."), (r"\.prenorm\.scale", ".norm1.weight"), (r"\.postnorm\.scale", ".norm2.weight"),
    (r"\.norm\.scale", ".norm.weight"),
)  # fmt: skip
"""Regular expressions that turn ComfyUI's names into diffusers'."""


def _converted(weights: Weights) -> Weights:
    """ComfyUI's class has the six modulation vectors of a block in one dim."""
    converted = {}
    for name, tensor in weights.items():
        tensor = tensor.reshape(6, -1) if name.endswith(".mod.lin") else tensor
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        converted[name] = tensor.clone()
    return converted


def _references(random: Random) -> dict[str, Any]:
    """Return what *ReferenceLatent*, twice, and *FluxKontextMultiReferenceLatentMethod* add."""
    latents = [random(1, 16, 1, 10, 14), random(1, 16, 1, 5, 9)]
    return {"reference_latents": latents, "reference_latents_method": "index"}


def _at_timestep_zero(random: Random) -> dict[str, Any]:
    return {**_references(random), "reference_latents_method": "index_timestep_zero"}


def _without_method(random: Random) -> dict[str, Any]:
    """Return what *ReferenceLatent* alone adds. ComfyUI's class leaves it out."""
    return {"reference_latents": _references(random)["reference_latents"]}


def _case(**options: Any) -> Case:
    return Case(
        unet=UNET, transformer="Krea2Transformer2DModel", config=CONFIG, published={}, converted=_converted,
        near_zero=(".bias", ".scale", ".lin"), **{"latent": (2, 16, 1, 7, 5), "text": (11, 120), **options},
    )  # fmt: skip


def _takes_references() -> bool:
    """Whether this version of ComfyUI has references for the family."""
    if not hasattr(comfy.supported_models, "Krea2"):
        return False
    from comfy.ldm.krea2.model import SingleStreamDiT

    return "ref_latents" in signature(SingleStreamDiT.forward).parameters


SINCE = "Krea2"
SAMPLING = Sampling(node="ModelSamplingFlux", inputs={"max_shift": 1.3, "base_shift": 0.4, "width": 512, "height": 640})
CASES = {
    "image": _case(),
    "turbo": _case(cfg=1.0, latent=(1, 16, 1, 8, 12)),
} | ({
    "references": _case(extra=_references),
    "references at 0": _case(extra=_at_timestep_zero),
    "references without method": _case(extra=_without_method),
} if _takes_references() else {})  # fmt: skip
