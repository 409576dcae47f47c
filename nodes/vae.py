"""The node that decodes in the backend."""

from typing import Any

import torch
from comfy_api.latest import io

from ..parallel_backend.errors import InvalidRequest
from .connection import progress_bar
from .remote_vae import RemoteVAE


class ParallelVAEDecode(io.ComfyNode):  # type: ignore[misc]
    """LATENT to IMAGE, video frames one after another."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """The node's name, inputs and outputs."""
        return io.Schema(
            node_id="ParallelVAEDecode",
            display_name="Parallel VAE Decode",
            category="Parallel DiT",
            description="Decodes latents into pictures in the backend's processes.",
            inputs=[
                io.Latent.Input("samples", tooltip="The latent to be decoded."),
                io.Vae.Input("vae", tooltip="The VAE of ParallelLoader."),
            ],
            outputs=[io.Image.Output(tooltip="The pictures; of a video, its frames in order.")],
        )

    @classmethod
    def execute(cls, samples: dict[str, Any], vae: Any) -> io.NodeOutput:
        """Decode on the ranks."""
        if not isinstance(vae, RemoteVAE):
            raise InvalidRequest("ParallelVAEDecode needs the VAE of ParallelLoader; use VAEDecode for any other")
        latent: torch.Tensor = samples["samples"]
        pixels = vae.decode_with(latent, progress_bar())
        return io.NodeOutput(pixels.flatten(0, 1) if pixels.ndim == 5 else pixels)
