"""Chroma, with guidance that is not 0."""

from typing import Any

import comfy.utils
import diffusers
from torch import Tensor

from natives.case import Case, Random, Sampling, Weights, by_map

CONFIG = {
    "num_layers": 2, "num_single_layers": 2, "num_attention_heads": 3, "attention_head_dim": 16,
    "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6), "approximator_hidden_dim": 20, "approximator_layers": 2,
}  # fmt: skip
UNET = {
    "image_model": "chroma", "in_channels": 64, "out_channels": 64, "patch_size": 2, "vec_in_dim": None,
    "context_in_dim": 24, "hidden_size": 48, "mlp_ratio": 4.0, "num_heads": 3, "depth": 2, "depth_single_blocks": 2,
    "axes_dim": [4, 6, 6], "theta": 10000, "qkv_bias": True, "txt_ids_dims": [],
    "in_dim": 64, "out_dim": 48, "hidden_dim": 20, "n_layers": 2,
}  # fmt: skip

FIXED = frozenset({"num_heads", "axes_dim", "context_in_dim", "hidden_size", "out_dim", "hidden_dim", "n_layers"})
"""ComfyUI takes the published numbers for these, whatever a file holds."""


def _own_last_vectors(module: Any) -> None:
    """Let ComfyUI's class number the head's two vectors after those of its blocks, and not after 57 blocks'."""
    vectors = 3 * module.params.depth_single_blocks + 12 * module.params.depth + 2
    modulations = module.get_modulations

    def of_its_blocks(tensor: Tensor, *args: Any, **options: Any) -> Any:
        return modulations(tensor[:, :vectors], *args, **options)

    module.get_modulations = of_its_blocks


def _in_comfyui(name: str, weights: Weights) -> str:
    """Return ComfyUI's name of a weight of the approximator."""
    name = name.replace("linear_1", "in_layer").replace("linear_2", "out_layer")
    return name if name in weights else name.replace(".weight", ".scale")


def _case(guidance: float | None, *, blocks: tuple[int, int] = (2, 2), **options: Any) -> Case:
    def extra(random: Random) -> dict[str, Any]:
        pooled = {"pooled_output": None}  # what ComfyUI's CLIP node gives for T5
        return pooled if guidance is None else {**pooled, "guidance": guidance}

    config = CONFIG | {"num_layers": blocks[0], "num_single_layers": blocks[1]}
    unet = UNET | {"depth": blocks[0], "depth_single_blocks": blocks[1]}

    def converted(weights: Weights) -> Weights:
        names = diffusers.ChromaTransformer2DModel(**config).state_dict()
        own = {name: _in_comfyui(name, weights) for name in names if name.startswith("distilled_guidance_layer.")}
        sizes = unet | {"hidden_size": len(weights["img_in.weight"])}
        return by_map(weights, comfy.utils.flux_to_diffusers(sizes) | own, list(names))

    return Case(
        unet=unet, transformer="ChromaTransformer2DModel", config=config, published={}, converted=converted,
        fixed=FIXED, latent=(2, 16, 7, 5), text=(11, 24), extra=extra, **options,
    )  # fmt: skip


WIDE = {"hidden_size": 384, "axes_dim": [16, 56, 56], "out_dim": 384}
ASSUMED = {"num_heads": 3, "out_dim": 384, "hidden_dim": 20, "n_layers": 2}
SAMPLING = Sampling(node="ModelSamplingAuraFlow", inputs={"shift": 1.5})
CASES = {
    "guided": _case(2.5, repair=_own_last_vectors),
    "guidance 0": _case(None, repair=_own_last_vectors),
    "all blocks": _case(2.5, blocks=(19, 38)),
}
