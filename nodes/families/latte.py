"""Latte (text to video), which ComfyUI lacks."""

from typing import Any

import comfy.latent_formats
from torch import Tensor

from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import BackendText, text_of
from ..bridges.own_model import OwnBridge


class Latte(OwnBridge):
    """Frames are latents of Stable Diffusion's VAE. A prompt is as long as its tokens: none of them is padding."""

    factor = 0.18215
    vaes = ("AutoencoderKL", "AutoencoderKLTemporalDecoder")
    text = BackendText(key="t5xxl", length=1, encoder="T5EncoderModel")

    def latent_format(self) -> Any:
        """See ``OwnBridge``. The tiny decoder for previews takes no video."""
        found = comfy.latent_formats.SD15(self.scaling())
        found.latent_dimensions, found.taesd_decoder_name = 3, None
        return found

    def inputs(self, x: Tensor, timestep: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``."""
        return {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": text_of(given)}

    def scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=4, spatial=8)
