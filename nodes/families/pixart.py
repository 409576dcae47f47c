"""PixArt-alpha and PixArt-Sigma: ComfyUI's PixArtMS and diffusers' transformer."""

from typing import Any

import comfy.ldm.pixart.pixartms
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, text_of

SIZED = 128
"""``sample_size`` of the models that were trained with the size of the image, where the config does not say."""


class PixArt(Bridge):
    """ComfyUI tells the two, whose latents differ, by whether there is an embedder for the size of the image."""

    native = comfy.ldm.pixart.pixartms.PixArtMS
    text = CoreText(components={"text_encoder": ("T5EncoderModel",)}, clip_type="PIXART")
    vaes = ("AutoencoderKL",)

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``."""
        config = self.config
        return {
            "image_model": "pixart_alpha" if self.sized else "pixart_sigma",
            "num_heads": config["num_attention_heads"],
            "patch_size": config["patch_size"],
            "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
            "in_channels": config["in_channels"],
            "depth": config["num_layers"],
            "model_max_length": 120 if self.sized else 300,
            "micro_condition": self.sized,
            "caption_channels": config["caption_channels"],
        }

    def check(self) -> None:
        """See ``Bridge``."""
        if not self.config.get("caption_channels"):
            raise InvalidRequest(
                f"{self.name} has no caption_channels: it takes a class label; PixArt models with text work"
            )
        super().check()

    @property
    def sized(self) -> bool:
        """Whether the model takes the size of the image."""
        given = self.config.get("use_additional_conditions")
        return bool(self.config["sample_size"] == SIZED if given is None else given)

    def inputs(self, x: Tensor, timestep: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. A model that was not trained with the size of the image ignores it, as in ComfyUI."""
        found = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": text_of(given)}
        for name, ours in (("c_size", "resolution"), ("c_ar", "aspect_ratio")):
            value = given.pop(name, None)
            if value is not None and self.sized:
                found[ours] = value
        return found

    def scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=self.config["in_channels"], spatial=8, video=False)
