"""The nodes that decode and encode in the backend."""

from typing import Any

import torch
from comfy_api.latest import io
from einops import rearrange

from ..parallel_backend.errors import InvalidRequest
from .backend.connection import progress_bar
from .picture_metadata import label_saved_images
from .remote.vae import RemoteVAE

TILE_TOOLTIP = (
    "0: the whole image, exactly; each rank computes some of its rows. If that does not fit into memory: the side of a "
    "tile in pixels. Each rank computes whole tiles, which are then blended. That is approximate, and saved images say "
    "so."
)


def _shared_inputs() -> list[Any]:
    return [
        io.Vae.Input("vae", tooltip="The VAE of Parallel Loader."),
        io.Int.Input("tile", default=0, min=0, max=8192, step=64, optional=True, tooltip=TILE_TOOLTIP),
    ]


class ParallelVAEDecode(io.ComfyNode):  # type: ignore[misc]
    """LATENT to IMAGE on all ranks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's name, inputs and outputs."""
        return io.Schema(
            node_id="ParallelVAEDecode",
            display_name="Parallel VAE Decode",
            category="Parallel DiT",
            description="Decodes latents into images on all ranks. The result is exact: each rank computes some rows.",
            inputs=[io.Latent.Input("samples", tooltip="The latent to decode."), *_shared_inputs()],
            outputs=[io.Image.Output(tooltip="The images, or the frames of a video in order.")],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(cls, samples: dict[str, Any], vae: Any, tile: int = 0) -> io.NodeOutput:
        """Decode on the ranks."""
        latent: torch.Tensor = samples["samples"]
        pixels = _remote_vae(vae, "Parallel VAE Decode", "VAEDecode").decode_with(latent, progress_bar(), tile)
        if tile and max(pixels.shape[-3:-1]) > tile:
            label_saved_images(cls.hidden, {"tile": tile, "approximate": "tiles"})
        return io.NodeOutput(rearrange(pixels, "b t h w c -> (b t) h w c") if pixels.ndim == 5 else pixels)


class ParallelVAEEncode(io.ComfyNode):  # type: ignore[misc]
    """IMAGE to LATENT on all ranks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's name, inputs and outputs."""
        return io.Schema(
            node_id="ParallelVAEEncode",
            display_name="Parallel VAE Encode",
            category="Parallel DiT",
            description="Encodes images into latents on all ranks. The result is exact: each rank computes some rows.",
            inputs=[
                io.Image.Input("pixels", tooltip="Images, or the frames of one video for a video VAE."),
                *_shared_inputs(),
            ],
            outputs=[io.Latent.Output(tooltip="The latent.")],
            hidden=[io.Hidden.unique_id, io.Hidden.extra_pnginfo],
        )

    @classmethod
    def execute(cls, pixels: torch.Tensor, vae: Any, tile: int = 0) -> io.NodeOutput:
        """Encode on the ranks."""
        latent = _remote_vae(vae, "Parallel VAE Encode", "VAEEncode").encode_with(pixels, progress_bar(), tile)
        if tile and max(latent.shape[-2:]) * vae.spacial_compression_encode() > tile:
            label_saved_images(cls.hidden, {"tile": tile, "approximate": "tiles"})
        return io.NodeOutput({"samples": latent})


def _remote_vae(vae: Any, node: str, native_node: str) -> RemoteVAE:
    if isinstance(vae, RemoteVAE):
        return vae
    raise InvalidRequest(f"{node} needs the VAE of Parallel Loader; use {native_node} for any other")
