"""The bridge between ComfyUI's PixArtMS and diffusers' transformer, for PixArt-alpha and PixArt-Sigma."""

from typing import Any

import comfy.ldm.pixart.pixartms
from torch import Tensor

from ...parallel_backend.checkpoint.single_file import SingleFile
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, pop_text

SIZE_CONDITIONED = 128
"""The ``sample_size`` of the models that take the image's size, for configs that do not say."""

_STEP = 64
"""Latent rows and columns of an image of 512 pixels."""


class PixArt(Bridge):
    """PixArt's bridge.

    ComfyUI tells alpha and Sigma apart by their embedder for the image's size. Their latents differ.
    """

    native_class = comfy.ldm.pixart.pixartms.PixArtMS
    text = CoreText(components={"text_encoder": ("T5EncoderModel",)}, clip_type="PIXART")
    vaes = ("AutoencoderKL",)

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        return {
            "image_model": "pixart_alpha" if self.takes_size else "pixart_sigma",
            "num_heads": config["num_attention_heads"],
            "patch_size": config["patch_size"],
            "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
            "in_channels": config["in_channels"],
            "depth": config["num_layers"],
            "model_max_length": 120 if self.takes_size else 300,
            "micro_condition": self.takes_size,
            "caption_channels": config["caption_channels"],
        }

    def check(self) -> None:
        """See ``Bridge``."""
        if not self.config.get("caption_channels"):
            raise InvalidRequest(
                f"{self.name} has no caption_channels, so it takes a class label; PixArt models that take text are "
                "supported"
            )
        super().check()

    @property
    def takes_size(self) -> bool:
        """Whether the model takes the image's size."""
        configured = self.config.get("use_additional_conditions")
        return bool(self.config["sample_size"] == SIZE_CONDITIONED if configured is None else configured)

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. A model that does not take the image's size ignores it, as in ComfyUI."""
        inputs = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": pop_text(call_args)}
        for native_name, name in (("c_size", "resolution"), ("c_ar", "aspect_ratio")):
            value = call_args.pop(native_name, None)
            if value is not None and self.takes_size:
                inputs[name] = value
        return inputs | self._position_range(x)

    def _position_range(self, x: Tensor) -> dict[str, Tensor]:
        """Return the range of ComfyUI's positions, which depends on the size of the latent ``x`` ``[B, 4, H, W]``.

        ComfyUI fits it to the size in whole steps of 512 pixels, and divides it by a factor that it derives from a
        file's stored positions. Otherwise the two cancel out. It computes no positions for images under 264 pixels, or
        for alpha at 256: these keep the published range.
        """
        factor, steps = self.config.get("interpolation_scale"), round((x.shape[2] + x.shape[3]) // 2 / _STEP)
        published = self.config["sample_size"] < _STEP
        if not isinstance(self.checkpoint, SingleFile) or factor is None or published or not steps:
            return {}
        return {"position_range": x.new_full((len(x),), steps * _STEP // self.config["patch_size"] / factor)}

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=self.config["in_channels"], spatial=8, video=False)
