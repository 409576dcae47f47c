"""The node that gives frames to Open-Sora 2.0."""

from typing import Any

import comfy.utils
import node_helpers
import torch
from comfy_api.latest import io
from torch import Tensor
from typing_extensions import override

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.families.open_sora2.given_frames import given_frames
from ..bridges.given_numbers import as_int

CHANNELS, TEMPORAL, SPATIAL = 16, 4, 8


class ParallelOpenSora2Video(io.ComfyNode):  # type: ignore[misc]
    """Adds frames at the start, at the end, or both, to both prompts."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelOpenSora2Video",
            display_name="Open-Sora 2.0 Image to Video",
            category="Parallel DiT",
            description="Gives Open-Sora 2.0 an image or a clip that the video starts with, ends with, or both.",
            inputs=[
                io.Conditioning.Input("positive", tooltip="What the video should show."),
                io.Conditioning.Input("negative", tooltip="What the video should not show."),
                io.Vae.Input("vae", tooltip="HunyuanVideo's VAE."),
                io.Int.Input("width", default=336, min=16, max=8192, step=16, tooltip="In pixels."),
                io.Int.Input("height", default=192, min=16, max=8192, step=16, tooltip="In pixels."),
                io.Int.Input("length", default=129, min=1, max=8192, step=4, tooltip="Frames of the video."),
                io.Int.Input("batch_size", default=1, min=1, max=4096, tooltip="The number of videos."),
                io.Image.Input(
                    "start", optional=True, tooltip="An image, or a clip of 4n + 1 frames such as 33, to start with."
                ),
                io.Image.Input(
                    "end", optional=True, tooltip="An image, or a clip of 4n + 1 frames such as 33, to end with."
                ),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive", tooltip="For a sampler or Open-Sora 2.0 Guider."),
                io.Conditioning.Output(display_name="negative", tooltip="For a sampler or Open-Sora 2.0 Guider."),
                io.Latent.Output(tooltip="The empty latent to denoise."),
            ],
        )

    @classmethod
    @override
    def execute(
        cls, positive: list[Any], negative: list[Any], vae: Any, width: int, height: int, length: int, batch_size: int,
        start: Tensor | None = None, end: Tensor | None = None,
    ) -> io.NodeOutput:  # fmt: skip
        """Encode the frames and add them to the conditioning."""
        width, height = as_int(width, "width"), as_int(height, "height")
        size = ((as_int(length, "length") - 1) // TEMPORAL + 1, height // SPATIAL, width // SPATIAL)
        latent = {"samples": torch.zeros(as_int(batch_size, "batch_size"), CHANNELS, *size)}
        if start is None and end is None:
            return io.NodeOutput(positive, negative, latent)
        clips = [_encoded(vae, clip, width, height, name) for clip, name in ((start, "start"), (end, "end"))]
        frames = given_frames(clips[0], clips[1], size, CHANNELS)
        entries = {"concat_latent_image": frames.latent, "concat_mask": 1 - frames.given}
        given = (node_helpers.conditioning_set_values(prompt, entries) for prompt in (positive, negative))
        return io.NodeOutput(*given, latent)


def _encoded(vae: Any, clip: Tensor | None, width: int, height: int, name: str) -> Tensor | None:
    """Return the latent ``[1, C, t, h, w]`` of frames ``[T, H, W, C]``, scaled and cropped to the video's size."""
    if clip is None:
        return None
    if (len(clip) - 1) % TEMPORAL:
        raise InvalidRequest(
            f"{name} has {len(clip)} frames, and HunyuanVideo's VAE encodes 1, 5, 9, ...: give "
            f"{len(clip) - (len(clip) - 1) % TEMPORAL} frames"
        )
    pixels = comfy.utils.common_upscale(clip.movedim(-1, 1), width, height, "bilinear", "center").movedim(1, -1)
    latent: Tensor = vae.encode(pixels[:, :, :, :3])
    if latent.shape[:2] != (1, CHANNELS):
        raise InvalidRequest(
            f"the VAE gives a latent of shape {list(latent.shape)}, and Open-Sora 2.0 takes HunyuanVideo's, of "
            f"{CHANNELS} channels: load hunyuan_vae.safetensors"
        )
    return latent
