"""The bridge to Open-Sora 2.0 (text and image to video), with a custom model class, since ComfyUI lacks the family."""

from typing import Any

import comfy.conds
import comfy.latent_formats
import torch
from torch import Tensor
from typing_extensions import override

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.families.open_sora2.times import shift
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import CoreText, pop_pooled_text, pop_text, split_channels
from ..bridges.custom_model import CustomBridge, CustomModel, FlowSchedule
from ..bridges.refusals import INPAINTING_CONDS

CHANNELS = 16

_USUAL = (33, 24, 42)
"""The latent of 129 frames of 192 x 336 pixels, which the model's first stage was trained on."""


_MULTIPLIER = 1000.0
"""That of ComfyUI's *ModelSamplingSD3*."""


class OpenSora2Model(CustomModel):
    """Puts the latent of given frames, and where they are, beside the noise."""

    concat_keys: tuple[str, ...]  # type: ignore[assignment, unused-ignore]

    @override
    def transformer_conds(self, conditioning: dict[str, Any]) -> dict[str, Any]:
        """Return the text, the pooled text and the given frames."""
        conds = super().transformer_conds(conditioning)
        pooled = conditioning.get("pooled_output")
        return conds if pooled is None else conds | {"y": comfy.conds.CONDRegular(pooled)}

    @override
    def concat_cond(self, **conditioning: Any) -> Tensor | None:
        """Return the mask of given frames and their latent ``[B, 17, T, H, W]``; None if no frame is given.

        ComfyUI's nodes pass the latent of all frames with a mask that is 0 in given ones. An image, which is one
        latent frame, is never given.

        Raises:
            InvalidRequest: the mask is for another number of frames. ComfyUI would join tensors that do not fit.
        """
        noise = conditioning["noise"]
        if conditioning.get("concat_latent_image") is None or noise.shape[2] == 1:
            return None
        self.concat_keys = ("mask_inverted", "concat_image")
        unknown = conditioning.setdefault("concat_mask", torch.zeros_like(noise[:, :1]))
        if unknown.ndim == noise.ndim and unknown.shape[2] != noise.shape[2]:
            raise InvalidRequest(
                f"the given frames are for a latent of {unknown.shape[2]} frames, and the sampler's has "
                f"{noise.shape[2]}: sample the latent of the node that gives the frames"
            )
        given_and_latent: Tensor = super().concat_cond(**conditioning)
        given, latent = given_and_latent[:, :1], given_and_latent[:, 1:]
        return torch.cat([given, latent * given], dim=1)


class OpenSora2(CustomBridge):
    """Open-Sora 2.0's bridge. The VAE is HunyuanVideo's, and the text encoders are Flux.1's."""

    model_class = OpenSora2Model
    default_scaling_factor = 0.476986
    supported_conds = INPAINTING_CONDS
    vaes = ("AutoencoderKLHunyuanVideo",)
    text = CoreText(
        components={"text_encoder": ("CLIPTextModel",), "text_encoder_2": ("T5EncoderModel",)}, clip_type="FLUX"
    )

    def latent_format(self) -> Any:
        """See ``CustomBridge``."""
        latent_format = comfy.latent_formats.HunyuanVideo()
        latent_format.scale_factor = self.scaling_factor()
        return latent_format

    @override
    def schedule(self) -> FlowSchedule:
        return FlowSchedule(shift=shift(_USUAL), multiplier=_MULTIPLIER)

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``."""
        inputs = split_channels(x, CHANNELS)
        inputs |= {"timestep": timestep, "encoder_hidden_states": pop_text(call_args)}
        return inputs | {"pooled_projections": pop_pooled_text(call_args)}

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=CHANNELS, temporal=4, spatial=8)
