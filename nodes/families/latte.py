"""The bridge to diffusers' Latte (text to video), with a custom model class, because ComfyUI lacks the family."""

from typing import Any

import comfy.latent_formats
from torch import Tensor

from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import BackendText, pop_text
from ..bridges.custom_model import CustomBridge


class Latte(CustomBridge):
    """Latte's bridge. Stable Diffusion's VAE encodes each frame. Prompts are not padded."""

    default_scaling_factor = 0.18215
    vaes = ("AutoencoderKL", "AutoencoderKLTemporalDecoder")
    text = BackendText(key="t5xxl", length=1, encoder="T5EncoderModel")

    def latent_format(self) -> Any:
        """See ``CustomBridge``. TAESD, the preview decoder, does not take video."""
        latent_format = comfy.latent_formats.SD15(self.scaling_factor())
        latent_format.latent_dimensions, latent_format.taesd_decoder_name = 3, None
        return latent_format

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``."""
        return {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": pop_text(call_args)}

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=4, spatial=8)
