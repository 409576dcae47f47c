"""The nodes that decode and encode in the backend."""

from typing import Any

import torch
from comfy_api.latest import io

from ..parallel_backend.errors import InvalidRequest
from .backend.connection import progress_bar
from .picture_metadata import label
from .remote.vae import RemoteVAE

TILE = (
    "0: the whole picture, exactly, each rank some of its rows. For what does not fit into memory even so: pixels of a "
    "side of tiles, which ranks work on by themselves and which are blended. That is approximate, and saved pictures "
    "say so."
)


def _inputs() -> list[Any]:
    return [
        io.Vae.Input("vae", tooltip="The VAE of ParallelLoader."),
        io.Int.Input("tile", default=0, min=0, max=8192, step=64, optional=True, tooltip=TILE),
    ]


class ParallelVAEDecode(io.ComfyNode):  # type: ignore[misc]
    """LATENT to IMAGE on all ranks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's name, inputs and outputs."""
        return io.Schema(
            node_id="ParallelVAEDecode",
            display_name="Parallel VAE Decode",
            category="Parallel DiT",
            description="Decodes latents into pictures on all ranks, exactly: each has some of the rows.",
            inputs=[io.Latent.Input("samples", tooltip="The latent to be decoded."), *_inputs()],
            outputs=[io.Image.Output(tooltip="The pictures; of a video, its frames in order.")],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(cls, samples: dict[str, Any], vae: Any, tile: int = 0) -> io.NodeOutput:
        """Decode on the ranks."""
        latent: torch.Tensor = samples["samples"]
        pixels = _checked(vae, cls, "VAEDecode").decode_with(latent, progress_bar(), tile)
        if tile and max(pixels.shape[-3:-1]) > tile:
            label(cls.hidden, {"tile": tile, "approximate": "tiles"})
        return io.NodeOutput(pixels.flatten(0, 1) if pixels.ndim == 5 else pixels)


class ParallelVAEEncode(io.ComfyNode):  # type: ignore[misc]
    """IMAGE to LATENT on all ranks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's name, inputs and outputs."""
        return io.Schema(
            node_id="ParallelVAEEncode",
            display_name="Parallel VAE Encode",
            category="Parallel DiT",
            description="Encodes pictures into latents on all ranks, exactly: each has some of the rows.",
            inputs=[
                io.Image.Input("pixels", tooltip="Pictures, or the frames of one video for a VAE of videos."),
                *_inputs(),
            ],
            outputs=[io.Latent.Output(tooltip="The latent.")],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(cls, pixels: torch.Tensor, vae: Any, tile: int = 0) -> io.NodeOutput:
        """Encode on the ranks."""
        latent = _checked(vae, cls, "VAEEncode").encode_with(pixels, progress_bar(), tile)
        if tile and max(latent.shape[-2:]) * vae.spacial_compression_encode() > tile:
            label(cls.hidden, {"tile": tile, "approximate": "tiles"})
        return io.NodeOutput({"samples": latent})


def _checked(vae: Any, node: type[Any], other: str) -> RemoteVAE:
    if isinstance(vae, RemoteVAE):
        return vae
    raise InvalidRequest(f"{node.__name__} needs the VAE of ParallelLoader; use {other} for any other")
