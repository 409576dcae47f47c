"""The bridge to Open-Sora 1.2 (text and image to video), with a custom model class, since ComfyUI lacks the family."""

from typing import Any

import comfy.conds
import comfy.latent_formats
import torch
from torch import Tensor
from typing_extensions import override

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.families.open_sora1.times import STEPS, shift
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import CoreText, pop_text
from ..bridges.custom_model import CustomBridge, CustomModel, FlowSchedule

CHANNELS, SPATIAL = 4, 8
FRAME_RATE, RESOLUTION = "frame_rate", "resolution"
"""Entries of CONDITIONING: frames a second, and height and width in pixels."""

_USUAL = (480, 854, 51)
"""Height, width and frames of a video of two seconds in 480p."""


class OpenSora1Model(CustomModel):
    """Passes on the frame rate, the size in pixels, and which frames the latent's mask gives."""

    @override
    def transformer_conds(self, conditioning: dict[str, Any]) -> dict[str, Any]:
        """Return the text, the numbers of the video and the frames that are generated."""
        conds = super().transformer_conds(conditioning)
        values: dict[str, Tensor] = {}
        if conditioning.get("attention_mask") is not None:
            values["attention_mask"] = conditioning["attention_mask"]
        if conditioning.get(FRAME_RATE) is not None:
            values[FRAME_RATE] = torch.tensor([float(conditioning[FRAME_RATE])])
        if conditioning.get(RESOLUTION) is not None:
            values[RESOLUTION] = torch.tensor([conditioning[RESOLUTION]], dtype=torch.float32)
        if conditioning.get("denoise_mask") is not None:
            values["generated"] = generated_frames(conditioning["denoise_mask"])
        return conds | {name: comfy.conds.CONDRegular(value) for name, value in values.items()}

    @override
    def scale_latent_inpaint(self, sigma: Tensor, noise: Tensor, latent_image: Tensor, **kwargs: Any) -> Tensor:
        """The model gets given frames without noise."""
        return latent_image


def generated_frames(mask: Tensor) -> Tensor:
    """Return the mask of a latent ``[B, C, T, H, W]`` as one number a frame, ``[B, T]``.

    Raises:
        InvalidRequest: it covers a part of a frame.
    """
    by_frame = mask[:, 0].flatten(2)
    if bool((by_frame.amax(2) - by_frame.amin(2) > 1e-3).any()):
        raise InvalidRequest(
            "the latent's mask covers a part of a frame, and Open-Sora keeps or generates whole frames: use a mask "
            "that has one value in each frame, as Open-Sora 1.2 Video makes it"
        )
    return by_frame.mean(2)


class OpenSora1(CustomBridge):
    """Open-Sora 1.2's bridge. Its latents are what its VAE gives. The text encoder is PixArt's."""

    model_class = OpenSora1Model
    text = CoreText(components={"text_encoder": ("T5EncoderModel",)}, clip_type="PIXART")
    vaes = ("VideoAutoencoderPipeline",)

    def latent_format(self) -> Any:
        """See ``CustomBridge``. Nothing previews these latents."""
        latent_format = comfy.latent_formats.LatentFormat()
        latent_format.latent_channels, latent_format.latent_dimensions = CHANNELS, 3
        return latent_format

    @override
    def schedule(self) -> FlowSchedule:
        return FlowSchedule(shift=shift(*_USUAL), multiplier=STEPS)

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``."""
        inputs = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": pop_text(call_args)}
        for name in (FRAME_RATE, RESOLUTION, "generated"):
            if call_args.get(name) is not None:
                inputs[name] = call_args.pop(name)
        if call_args.get("attention_mask") is not None:
            inputs["encoder_hidden_states_mask"] = call_args.pop("attention_mask").bool()
        return inputs

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=CHANNELS, temporal=4, spatial=SPATIAL)
