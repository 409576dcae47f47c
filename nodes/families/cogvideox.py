"""CogVideoX (2B, 5B, 1.5; text and image to video), which ComfyUI lacks."""

from dataclasses import replace
from typing import Any

import comfy.latent_formats
import torch
from torch import Tensor

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import BackendText, split_channels, text_of
from ..bridges.own_model import SCHEDULER, OwnBridge, OwnModel
from ..bridges.refusals import INPAINTING_CONDS

CHANNELS = 16


class CogVideoXModel(OwnModel):
    """Takes an image's latent beside the noise where the transformer has channels for it."""

    concat_keys: tuple[str, ...]

    def concat_cond(self, **given: Any) -> Tensor | None:
        """The image's latent ``[B, 16, T, H, W]``, zero in the frames that are not given.

        ComfyUI's nodes give the latent of some frames, or of all with a mask that is 1 in those that are not given.

        Raises:
            InvalidRequest: an image that is missing, or that the model does not take.
        """
        image, bridge = given.get("concat_latent_image"), self.model_config.bridge
        if (image is None) == bridge.takes_image:
            raise InvalidRequest(
                f"{bridge.name} makes a video of an image: give the image to both prompts, for example with "
                "InstructPixToPixConditioning and the VAE of ParallelLoader"
                if bridge.takes_image
                else f"{bridge.name} makes a video of a prompt alone: remove the node that adds concat_latent_image"
            )
        if image is None:
            return None
        self.concat_keys = ("concat_image", "mask_inverted")
        given.setdefault("concat_mask", torch.zeros_like(given["noise"][:, :1]))
        both: Tensor = super().concat_cond(**given)
        concat: Tensor = both[:, :CHANNELS] * both[:, CHANNELS:] * bridge.image_factor
        return concat


class CogVideoX(OwnBridge):
    """1.5 takes frames in pairs; its image to video multiplies the image's latent with the inverse of the VAE's factor.

    ``takes_image`` and ``image_factor`` say that to the model.
    """

    model = CogVideoXModel
    # As in diffusers' CogVideoXDDIMScheduler.
    scheduler = SCHEDULER | {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "snr_shift_scale": 3.0,
    }
    factor = 1.15258426
    conds = INPAINTING_CONDS
    vaes = ("AutoencoderKLCogVideoX",)
    text = BackendText(key="t5xxl", length=226, encoder="T5EncoderModel", masked=False)

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.text = replace(type(self).text, length=self.config.get("max_text_seq_length", self.text.length))

    @property
    def takes_image(self) -> bool:
        """Whether it is a model that makes a video of an image."""
        return bool(self.config["in_channels"] > CHANNELS)

    @property
    def image_factor(self) -> float:
        """What an image's latent is multiplied with beyond what all latents are."""
        inverted = self.vae is not None and self.vae.config.get("invert_scale_latents")
        return self.scaling() ** -2 if inverted else 1.0

    def check(self) -> None:
        """See ``Bridge``."""
        super().check()
        channels = (self.config["in_channels"], self.config.get("out_channels", CHANNELS))
        if channels not in ((CHANNELS, CHANNELS), (2 * CHANNELS, CHANNELS)):
            raise InvalidRequest(
                f"{self.name} takes {channels[0]} channels and predicts {channels[1]}, and this CogVideoX is not "
                f"supported: {CHANNELS} or {2 * CHANNELS}, and {CHANNELS}, work"
            )

    def latent_format(self) -> Any:
        """See ``OwnBridge``."""
        found = comfy.latent_formats.LatentFormat()
        found.scale_factor, found.latent_channels, found.latent_dimensions = self.scaling(), CHANNELS, 3
        return found

    def inputs(self, x: Tensor, timestep: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``."""
        frames, step = x.shape[2], self.config.get("patch_size_t") or 1
        if frames % step:
            raise InvalidRequest(
                f"a latent of {frames} frames: {self.name} takes a multiple of {step}. Make a video of "
                f"{4 * (frames + step - frames % step) - 3} pictures, which are {frames + step - frames % step}"
            )
        return split_channels(x, CHANNELS) | {"timestep": timestep, "encoder_hidden_states": text_of(given)}

    def scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=CHANNELS, temporal=4, spatial=8)
