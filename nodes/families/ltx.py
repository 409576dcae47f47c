"""LTX-Video: ComfyUI's LTXVModel and diffusers' transformer."""

from collections.abc import Mapping
from typing import Any

import comfy.ldm.lightricks.model
import torch
from comfy.ldm.lightricks.symmetric_patchifier import SymmetricPatchifier, latent_to_pixel_coords
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import Bridge, CoreText, text_of

PATCHIFIER = SymmetricPatchifier(1)

SCALE = (8, 32, 32)
"""Frames, rows and columns of the video to one of the latent."""

HEADS = 32
"""ComfyUI counts the heads by this number."""


class LTXVideo(Bridge):
    """From 0.9.5 on a video begins with a single frame, which only the pipeline and the VAE tell."""

    native = comfy.ldm.lightricks.model.LTXVModel
    text = CoreText(components={"text_encoder": ("T5EncoderModel",)}, clip_type="LTXV")
    vaes = ("AutoencoderKLLTXVideo",)

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``. Beside what is in the weights, what ComfyUI reads from the metadata of a single file."""
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
        """Whether the latent's first frame is one frame of the video."""
        config = self.vae.config if self.vae else {}
        blocks = config.get("down_block_types", ())
        return self.checkpoint.pipeline == "LTXConditionPipeline" or "LTXVideo095DownBlock3D" in blocks

    def check(self) -> None:
        """See ``Bridge``."""
        super().check()
        channels = self.core_config().latent_format.latent_channels
        found = (self.config.get("in_channels"), self.config["num_attention_heads"])
        if found != (channels, HEADS):
            raise InvalidRequest(
                f"{self.name} has {found[0]} channels and {found[1]} heads; ComfyUI's LTX-Video has {channels} and "
                f"{HEADS}"
            )

    def inputs(self, x: Tensor, timestep: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. A mask says by how much of the timestep each token is still noise."""
        mask = given.pop("denoise_mask", None)
        found = {
            "hidden_states": x,
            "timestep": timestep,
            "encoder_hidden_states": text_of(given),
            "frame_rate": torch.full((len(x),), float(given.pop("frame_rate"))),
            "video_coords": self._places(x, given.pop("keyframe_idxs", None), mask),
        }
        if mask is not None:
            weights = PATCHIFIER.patchify(mask[:, :1])[0].flatten(1)
            found |= {"timestep": _unweighted(timestep.flatten(1), weights), "token_weights": weights}
        if "attention_mask" in given:
            found["encoder_attention_mask"] = given.pop("attention_mask").bool()
        return found

    def _places(self, x: Tensor, keyframes: Tensor | None, mask: Tensor | None) -> Tensor:
        """Where each token begins in the video, ``[B, 3, S]``; the last ones are those of the keyframes."""
        _, latent_coords = PATCHIFIER.patchify(x)
        places: Tensor = latent_to_pixel_coords(latent_coords, SCALE, causal_fix=self.causal).float()
        if keyframes is None:
            return places
        if mask is not None and bool((mask < 0).any()):
            raise InvalidRequest(
                "a keyframe with a mask of its own is not supported: give the whole image as the guide"
            )
        begins = keyframes[..., 0] if keyframes.ndim == 4 else keyframes
        count = begins.shape[2]
        return torch.cat([places[..., :-count], begins.to(places.dtype)], dim=2)

    def scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=self.config["in_channels"], temporal=SCALE[0], spatial=SCALE[1])

    def attributes(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """See ``Bridge``."""
        return {"patchifier": PATCHIFIER}


def _unweighted(timestep: Tensor, weights: Tensor) -> Tensor:
    """The timestep ``[B]`` before ComfyUI multiplied it by the tokens' weights; both are ``[B, S]``."""
    weight, token = weights.max(dim=1)
    return torch.where(weight > 0, timestep.gather(1, token[:, None])[:, 0] / weight, 0.0)
