"""Parallel DiT: diffusion transformers on several GPUs, as ordinary ComfyUI nodes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy_api.latest import ComfyExtension

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> "ComfyExtension":
    """What ComfyUI calls to learn the nodes."""
    from .nodes import ParallelDiT

    return ParallelDiT()
