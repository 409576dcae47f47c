"""PixArt-alpha and PixArt-Sigma."""

from typing import Any

import comfy.utils
import diffusers

from natives.case import Case, Random, Sampling, Weights, by_map

CONFIG = {
    "num_layers": 2, "num_attention_heads": 16, "attention_head_dim": 6, "cross_attention_dim": 96,
    "caption_channels": 24, "sample_size": 128,
}  # fmt: skip
UNET = {
    "image_model": "pixart_alpha", "num_heads": 16, "patch_size": 2, "hidden_size": 96, "in_channels": 4, "depth": 2,
    "model_max_length": 120, "micro_condition": True, "caption_channels": 24,
}  # fmt: skip
SIGMA = {"image_model": "pixart_sigma", "model_max_length": 300, "micro_condition": False}


def _sized(random: Random) -> dict[str, Any]:
    """Return what *CLIPTextEncodePixArtAlpha* adds."""
    return {"width": 640, "height": 896}


def _case(unet: dict[str, Any], size: tuple[int, int], *, extra: Any = lambda random: {}, **config: Any) -> Case:
    config, unet = CONFIG | config, UNET | unet

    def converted(weights: Weights) -> Weights:
        names = diffusers.PixArtTransformer2DModel(**config).state_dict()
        return by_map(weights, comfy.utils.pixart_to_diffusers(unet), list(names))

    return Case(
        unet=unet, transformer="PixArtTransformer2DModel", config=config,
        published={"caption_channels": 4096}, converted=converted,
        latent=(2, 4, *size), text=(11, 24), extra=extra, fixed=frozenset({"hidden_size", "caption_channels"}),
    )  # fmt: skip


ASSUMED = {"hidden_size": 96, "caption_channels": 24}
SAMPLING = Sampling(node="ModelSamplingDiscrete", inputs={"sampling": "eps", "zsnr": True})
CASES = {
    "alpha": _case({}, (34, 36)),
    "alpha sized": _case({}, (44, 30), extra=_sized),
    "sigma": _case(SIGMA, (30, 36), extra=_sized, use_additional_conditions=False),
}
"""ComfyUI's own transformer needs even sides, and latents of 33 or more on average for its positions."""
