"""Flux.1 (dev, schnell, Fill, Kontext): ComfyUI's Flux and diffusers' transformer."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import comfy.ldm.flux.model
from comfy.ldm.flux.model import FluxParams
from torch import Tensor

from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, guidance_of, layer, pooled_of, split_channels, text_of
from ..bridges.refusals import INPAINTING_CONDS


class Flux(Bridge):
    """diffusers counts packed channels: four of them are one of the latent's."""

    native = comfy.ldm.flux.model.Flux
    text = CoreText(
        components={"text_encoder": ("CLIPTextModel",), "text_encoder_2": ("T5EncoderModel",)}, clip_type="FLUX"
    )
    vaes = ("AutoencoderKL",)
    patch: ClassVar[int] = 2

    @property
    def conds(self) -> frozenset[str]:
        """See ``Bridge``."""
        unet_config = self.unet_config()
        fills = unet_config["in_channels"] > unet_config["out_channels"]
        return INPAINTING_CONDS | {"reference_latents"} if fills else frozenset({"reference_latents"})

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        return {
            "image_model": "flux",
            "in_channels": config["in_channels"] // self.patch**2,
            "out_channels": (config.get("out_channels") or config["in_channels"]) // self.patch**2,
            "patch_size": self.patch,
            "vec_in_dim": config["pooled_projection_dim"],
            "context_in_dim": config["joint_attention_dim"],
            "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
            "mlp_ratio": 4.0,
            "num_heads": config["num_attention_heads"],
            "depth": config["num_layers"],
            "depth_single_blocks": config["num_single_layers"],
            "axes_dim": list(config.get("axes_dims_rope", (16, 56, 56))),
            "theta": 10000,
            "qkv_bias": True,
            "guidance_embed": bool(config.get("guidance_embeds", False)),
            "txt_ids_dims": [],
            "yak_mlp": False,
            "txt_norm": False,
        }

    def inputs(self, x: Tensor, timestep: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``."""
        found = split_channels(x, self.unet_config()["out_channels"])
        found |= {"timestep": timestep, "encoder_hidden_states": text_of(given), "pooled_projections": pooled_of(given)}
        found |= guidance_of(given, distilled=self.unet_config()["guidance_embed"])
        return found | self.references(x, given)

    def references(self, x: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """Tokens and positions of reference images, as ComfyUI's own forward packs and places them."""
        names = ("ref_latents", "ref_latents_method")
        references: dict[str, Any] = {name: given.pop(name) for name in names if name in given}
        if "ref_latents" not in references:
            return {}
        seen = _Packing(self.native, self.unet_config())
        self.native._forward(seen, x, None, x.new_zeros(len(x), 0, 1), **references)
        own = math.prod(-(-side // self.patch) for side in x.shape[-2:])
        return {"reference": seen.tokens[:, own:], "reference_ids": seen.ids[:, own:]}

    def scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=16, spatial=8, video=False)

    def attributes(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """See ``Bridge``."""
        return {"patch_size": self.patch, "img_in": layer(weights, "img_in")}


class _Packing:
    """Stands for ComfyUI's transformer up to the point where tokens and their positions are known."""

    def __init__(self, native: type[Any], unet_config: Mapping[str, Any]) -> None:
        self.patch_size = unet_config["patch_size"]
        self.params = FluxParams(**{name: value for name, value in unet_config.items() if name != "image_model"})
        self.process_img = partial(native.process_img, self)

    def forward_orig(self, tokens: Tensor, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        """Keep what the layers would be given; nothing is computed."""
        self.tokens, self.ids = tokens, ids
        return tokens.new_zeros(*tokens.shape[:2], self.params.out_channels * self.patch_size**2)
