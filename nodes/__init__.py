"""The nodes; the only package that imports ``comfy``."""

from comfy_api.latest import ComfyExtension, io

from ..parallel_backend.protocol.fingerprint import fingerprint
from .class_label import ParallelClassLabel
from .layout import ParallelLayoutNode
from .loader import ParallelLoader
from .sampler import ParallelSampler
from .vae import ParallelVAEDecode, ParallelVAEEncode


class ParallelDiT(ComfyExtension):  # type: ignore[misc]
    """The extension as ComfyUI sees it."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        # Of the code that was just imported: its files may be updated while ComfyUI runs.
        fingerprint()
        return [
            ParallelLoader, ParallelLayoutNode, ParallelSampler, ParallelVAEDecode, ParallelVAEEncode,
            ParallelClassLabel,
        ]  # fmt: skip
