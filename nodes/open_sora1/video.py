"""The node that tells Open-Sora 1.2 of the video: its size, its frame rate and given frames."""

from typing import Any

import comfy.utils
import node_helpers
import torch
from comfy_api.latest import io
from comfy_extras.nodes_model_advanced import ModelSamplingSD3
from torch import Tensor
from typing_extensions import override

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.families.open_sora1.given_frames import Clip, placed
from ...parallel_backend.families.open_sora1.times import latent_frames, shift
from ..bridges.given_numbers import as_float, as_int
from ..families.open_sora1 import CHANNELS, FRAME_RATE, RESOLUTION, SPATIAL
from .learned_text import checkpoint_of, is_empty, learned_text

IMAGE_RATE = 120.0
"""The frame rate that stands for a single image."""

_EDIT_TOOLTIP = (
    "Which part of the sampling may change these frames: 0 keeps them as they are, 0.5 keeps their composition."
)


def _inputs() -> list[Any]:
    return [
        io.Model.Input("model", tooltip="Open-Sora 1.2."),
        io.Conditioning.Input("positive", tooltip="What the video should show."),
        io.Int.Input("width", default=426, min=16, max=8192, step=2, tooltip="In pixels. The video has 8 n of them."),
        io.Int.Input("height", default=240, min=16, max=8192, step=2, tooltip="In pixels. The video has 8 n of them."),
        io.Int.Input(
            "length", default=51, min=1, max=8192,
            tooltip="Frames: 17, 34, 51, ... or 1 for an image. 51 are two seconds.",
        ),
        io.Float.Input("frame_rate", default=24.0, min=1.0, max=240.0, step=1.0, tooltip="Frames a second."),
        io.Int.Input("batch_size", default=1, min=1, max=4096, tooltip="The number of videos."),
        io.Conditioning.Input(
            "negative", optional=True,
            tooltip="What the video should not show. If it is empty or not connected, the text that the model has "
            "learned for this.",
        ),
        io.Vae.Input("vae", optional=True, tooltip="Open-Sora 1.2's VAE, for given frames."),
        io.Image.Input("start", optional=True, tooltip="An image or a clip to start with."),
        io.Image.Input("end", optional=True, tooltip="An image or a clip to end with."),
        io.Float.Input(
            "start_edit", default=0.0, min=0.0, max=1.0, step=0.01, optional=True, tooltip=_EDIT_TOOLTIP
        ),
        io.Float.Input("end_edit", default=0.0, min=0.0, max=1.0, step=0.01, optional=True, tooltip=_EDIT_TOOLTIP),
    ]  # fmt: skip


class ParallelOpenSora1Video(io.ComfyNode):  # type: ignore[misc]
    """Sets times and conditioning for a size, and makes the latent."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelOpenSora1Video",
            display_name="Open-Sora 1.2 Video",
            category="Parallel DiT",
            description="Tells Open-Sora 1.2 the size and the frame rate of the video, and gives it frames to start or "
            "end with.",
            inputs=_inputs(),
            outputs=[
                io.Model.Output(tooltip="For a sampler, with the scheduler simple."),
                io.Conditioning.Output(display_name="positive", tooltip="For the sampler."),
                io.Conditioning.Output(display_name="negative", tooltip="For the sampler."),
                io.Latent.Output(tooltip="The latent to denoise."),
            ],
        )

    @classmethod
    @override
    def execute(
        cls, model: Any, positive: list[Any], width: int, height: int, length: int, frame_rate: float,
        batch_size: int, negative: list[Any] | None = None, vae: Any = None, start: Tensor | None = None,
        end: Tensor | None = None, start_edit: float = 0.0, end_edit: float = 0.0,
    ) -> io.NodeOutput:  # fmt: skip
        """Return all that a sampler needs."""
        checkpoint_of(model)
        width, height, length = as_int(width, "width"), as_int(height, "height"), as_int(length, "length")
        if negative is None or is_empty(negative):
            negative = learned_text(model, positive)
        rate = IMAGE_RATE if length == 1 else as_float(frame_rate, "frame_rate")
        entries = {FRAME_RATE: rate, RESOLUTION: (float(height), float(width))}
        prompts = [node_helpers.conditioning_set_values(prompt, entries) for prompt in (positive, negative)]
        size = (latent_frames(length), height // SPATIAL, width // SPATIAL)
        clips = (_clip(vae, start, start_edit, size, "start"), _clip(vae, end, end_edit, size, "end"))
        samples, mask = placed(*clips, size, CHANNELS)
        latent = {"samples": samples.repeat(as_int(batch_size, "batch_size"), 1, 1, 1, 1)}
        if any(clips):
            latent["noise_mask"] = mask
        (patched,) = ModelSamplingSD3().patch(model, shift(height, width, length))
        if any(0.0 < clip.edit < 1.0 for clip in clips if clip):
            patched.set_model_denoise_mask_function(generated_now)
        return io.NodeOutput(patched, *prompts, latent)


def generated_now(sigma: Tensor, denoise_mask: Tensor, extra_options: dict[str, Any]) -> Tensor:
    """Return the mask of a step: an edited frame is generated from its part of the times on."""
    time = sigma.max().clamp(max=1.0)
    return (denoise_mask >= time).to(denoise_mask.dtype)


def _clip(vae: Any, frames: Tensor | None, edit: float, size: tuple[int, ...], name: str) -> Clip | None:
    """Encode frames ``[T, H, W, C]``, scaled and cropped to the latent's size.

    Raises:
        InvalidRequest: there is no VAE, or it gives other latents.
    """
    if frames is None:
        return None
    if vae is None:
        raise InvalidRequest(f"{name} has frames, and they need a VAE: connect vae, with Open-Sora 1.2's")
    width, height = size[2] * SPATIAL, size[1] * SPATIAL
    pixels = comfy.utils.common_upscale(frames.movedim(-1, 1), width, height, "bilinear", "center").movedim(1, -1)
    latent: Tensor = vae.encode(pixels[..., :3])
    if latent.shape[:2] != (1, CHANNELS) or latent.shape[3:] != torch.Size(size[1:]):
        raise InvalidRequest(
            f"the VAE gives a latent of shape {list(latent.shape)}, and Open-Sora 1.2 takes [1, {CHANNELS}, frames, "
            f"{size[1]}, {size[2]}]: load OpenSora-VAE-v1.2"
        )
    return Clip(latent=latent, edit=as_float(edit, f"{name}_edit"))
