"""The bridge between ComfyUI's Flux and diffusers' transformer, for Flux.1 (dev, schnell, Fill and Kontext)."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import comfy.ldm.flux.model
from comfy.ldm.flux.model import FluxParams
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, pop_guidance, pop_pooled_text, pop_text, split_channels
from ..bridges.refusals import INPAINTING_CONDS


class Flux(Bridge):
    """Flux.1's bridge. diffusers counts packed channels: each latent channel gives four.

    Attributes:
        patch: the side of a patch in latent pixels.
    """

    native_class: ClassVar[type[Any]] = comfy.ldm.flux.model.Flux
    text = CoreText(
        components={"text_encoder": ("CLIPTextModel",), "text_encoder_2": ("T5EncoderModel",)}, clip_type="FLUX"
    )
    vaes = ("AutoencoderKL",)
    patch: ClassVar[int] = 2

    @property
    def supported_conds(self) -> frozenset[str]:
        """See ``Bridge``."""
        unet_config = self.unet_config()
        inpaints = unet_config["in_channels"] > unet_config["out_channels"]
        return INPAINTING_CONDS | {"reference_latents"} if inpaints else frozenset({"reference_latents"})

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

    @property
    def replaceable_blocks(self) -> Mapping[str, int]:
        """See ``Bridge``."""
        return {"double_block": self.config["num_layers"], "single_block": self.config["num_single_layers"]}

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``."""
        inputs = split_channels(x, self.unet_config()["out_channels"])
        inputs |= {"timestep": timestep, "encoder_hidden_states": pop_text(call_args)}
        inputs |= {"pooled_projections": pop_pooled_text(call_args)}
        inputs |= pop_guidance(call_args, distilled=self.unet_config()["guidance_embed"])
        return inputs | self.pop_references(x, timestep, call_args)

    def pop_references(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """Remove the reference images from a call's arguments and return their tokens and positions.

        ComfyUI's own forward packs and places them.

        Raises:
            InvalidRequest: ComfyUI would give them a timestep of 0, and the backend has one timestep for all tokens.
        """
        names = ("ref_latents", "ref_latents_method")
        references: dict[str, Any] = {name: call_args.pop(name) for name in names if name in call_args}
        if "ref_latents" not in references:
            return {}
        probe: Any = _PackingProbe(self.native_class, self.unet_config())
        self.native_class._forward(probe, x, timestep, x.new_zeros(len(x), 0, 1), **references)
        if probe.timestep_zero:
            method = references.get("ref_latents_method", "index_timestep_zero")
            raise InvalidRequest(
                f"reference_latents_method {method}: {self.name} takes offset, index or uxo/uno, which give the "
                "reference images the timestep of the generated one"
            )
        image_tokens = math.prod(-(-side // self.patch) for side in x.shape[-2:])
        return {"reference": probe.tokens[:, image_tokens:], "reference_ids": probe.ids[:, image_tokens:]}

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=16, spatial=8, video=False)

    def attributes(self) -> dict[str, Any]:
        """See ``Bridge``."""
        return {"patch_size": self.patch}


class _PackingProbe:
    """Stub for ComfyUI's transformer that keeps the tokens and positions that its layers would get.

    Attributes:
        tokens: ``[B, S, C]``.
        ids: the positions ``[B, S, axes]``.
        timestep_zero: whether the layers would get the reference images with a timestep of 0.
    """

    def __init__(self, native_class: type[Any], unet_config: Mapping[str, Any]) -> None:
        self.patch_size = unet_config["patch_size"]
        self.params = FluxParams(**{name: value for name, value in unet_config.items() if name != "image_model"})
        self.process_img = partial(native_class.process_img, self)

    def forward_orig(
        self, tokens: Tensor, ids: Tensor, *_: Any, timestep_zero_index: list[list[int]] | None = None, **__: Any
    ) -> Tensor:
        """Keep tokens and positions without computing anything."""
        self.tokens, self.ids, self.timestep_zero = tokens, ids, timestep_zero_index is not None
        return tokens.new_zeros(*tokens.shape[:2], self.params.out_channels * self.patch_size**2)
