"""The bridge between ComfyUI's LTXVModel and diffusers' transformer, for LTX-Video."""

from collections.abc import Mapping, Sequence
from typing import Any

import comfy.ldm.lightricks.model
import torch
from comfy.ldm.lightricks.symmetric_patchifier import SymmetricPatchifier, latent_to_pixel_coords
from einops import rearrange
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, pop_text
from ..bridges.given_numbers import as_float

PATCHIFIER = SymmetricPatchifier(1)

SCALE = (8, 32, 32)
"""Frames, rows and columns of the video per latent frame, row and column."""

HEADS = 32
"""The number of heads that ComfyUI assumes when it detects the head width."""


class LTXVideo(Bridge):
    """LTX-Video's bridge.

    From 0.9.5 on, a latent's first frame is a single video frame. Only the pipeline and the VAE show that.
    """

    native_class = comfy.ldm.lightricks.model.LTXVModel
    text = CoreText(components={"text_encoder": ("T5EncoderModel",)}, clip_type="LTXV")
    vaes = ("AutoencoderKLLTXVideo",)

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``. Includes what ComfyUI reads from a single file's metadata."""
        config = self.config
        return {
            "image_model": "ltxv",
            "num_layers": config["num_layers"],
            "attention_head_dim": config["attention_head_dim"],
            "cross_attention_dim": config["cross_attention_dim"],
            "num_attention_heads": config["num_attention_heads"],
            "caption_channels": config["caption_channels"],
            "causal_temporal_positioning": self.causal,
        }

    @property
    def causal(self) -> bool:
        """Whether the latent's first frame is a single video frame."""
        config = self.vae.config if self.vae else {}
        blocks = config.get("down_block_types", ())
        return self.checkpoint.pipeline == "LTXConditionPipeline" or "LTXVideo095DownBlock3D" in blocks

    @property
    def replaceable_blocks(self) -> Mapping[str, int]:
        """See ``Bridge``."""
        return {"double_block": self.config["num_layers"]}

    def check(self) -> None:
        """See ``Bridge``."""
        super().check()
        channels = self.core_config().latent_format.latent_channels
        in_channels, heads = self.config.get("in_channels"), self.config["num_attention_heads"]
        if (in_channels, heads) != (channels, HEADS):
            raise InvalidRequest(
                f"{self.name} has {in_channels} channels and {heads} heads; ComfyUI's LTX-Video has {channels} and "
                f"{HEADS}"
            )

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. A mask gives the factor of each token's timestep."""
        mask = call_args.pop("denoise_mask", None)
        _check_guides(call_args.pop("guide_attention_entries", None) or ())
        call_args.pop("generated_keyframes", None)  # marks tokens for LTX-2 alone
        inputs = {
            "hidden_states": x,
            "timestep": timestep,
            "encoder_hidden_states": pop_text(call_args),
            "frame_rate": frame_rates(call_args, len(x)),
            "video_coords": self._video_coords(x, call_args.pop("keyframe_idxs", None), mask),
        }
        if mask is not None:
            weights = rearrange(PATCHIFIER.patchify(mask[:, :1])[0], "b s 1 -> b s")
            timesteps = rearrange(timestep, "b s 1 -> b s")
            inputs |= {"timestep": unweighted(timesteps, weights), "token_weights": weights}
        if "attention_mask" in call_args:
            inputs["encoder_attention_mask"] = call_args.pop("attention_mask").bool()
        return inputs

    def _video_coords(self, x: Tensor, keyframes: Tensor | None, mask: Tensor | None) -> Tensor:
        """Return where each token begins in the video, ``[B, 3, S]``. The keyframes' tokens come last."""
        _, latent_coords = PATCHIFIER.patchify(x)
        coords: Tensor = latent_to_pixel_coords(latent_coords, SCALE, causal_fix=self.causal).float()
        if keyframes is None:
            return coords
        if mask is not None and bool((mask < 0).any()):
            raise InvalidRequest(
                "a keyframe with a mask of its own is not supported: give the whole image as the guide"
            )
        begins = keyframes[..., 0] if keyframes.ndim == 4 else keyframes
        count = begins.shape[2]
        return torch.cat([coords[..., : coords.shape[2] - count], begins.to(coords.dtype)], dim=2)

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=self.config["in_channels"], temporal=SCALE[0], spatial=SCALE[1])

    def attributes(self) -> dict[str, Any]:
        """See ``Bridge``."""
        return {"patchifier": PATCHIFIER}


def frame_rates(call_args: dict[str, Any], batch: int) -> Tensor:
    """Return the frame rate of each sample, ``[B]``. It is removed from the arguments.

    Raises:
        InvalidRequest: it is no number, or 0, by which ComfyUI's class cannot divide either.
    """
    rate = as_float(call_args.pop("frame_rate", 25), "frame_rate")
    if rate == 0.0:
        raise InvalidRequest("frame_rate is 0: set that of the video, such as 25, in LTXVConditioning")
    return torch.full((batch,), rate)


def _check_guides(entries: Sequence[Mapping[str, Any]]) -> None:
    """Refuse LTXVAddGuide's attention to a guide other than full attention to the whole guide.

    Raises:
        InvalidRequest: a guide has another strength, or an attention mask.
    """
    for entry in entries:
        if entry["strength"] != 1.0 or entry.get("pixel_mask") is not None:
            raise InvalidRequest(
                f"a guide of strength {entry['strength']:g} or with an attention mask is not supported: set the "
                "strength of LTXVAddGuide to 1.0 and disconnect its attention_mask"
            )


def unweighted(timesteps: Tensor, weights: Tensor) -> Tensor:
    """Return the timestep ``[B]`` that ComfyUI multiplied by the tokens' weights. Both arguments are ``[B, S]``."""
    largest, token = weights.max(dim=1)
    return torch.where(largest > 0, timesteps.gather(1, token[:, None])[:, 0] / largest, 0.0)
