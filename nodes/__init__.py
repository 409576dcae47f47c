"""The ComfyUI nodes. Only this package imports ``comfy``."""

from comfy_api.latest import ComfyExtension, io
from typing_extensions import override

from ..parallel_backend.protocol.fingerprint import fingerprint
from .cache import ParallelCache
from .class_label import ParallelClassLabel
from .layout import ParallelLayoutNode
from .loader import ParallelLoader
from .model import ParallelModel
from .open_sora1.prompt import ParallelOpenSora1Prompt
from .open_sora1.video import ParallelOpenSora1Video
from .open_sora2.guider import ParallelOpenSora2Guider
from .open_sora2.prompt import ParallelOpenSora2Prompt
from .open_sora2.times import ParallelOpenSora2Sampling
from .open_sora2.video import ParallelOpenSora2Video
from .panel.routes import add_to_server
from .sampler import ParallelSampler
from .vae import ParallelVAE, ParallelVAEDecode, ParallelVAEEncode


class ParallelDiT(ComfyExtension):  # type: ignore[misc]
    """The extension that ComfyUI registers."""

    @override
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        # Fingerprint the code as imported: its files may be updated while ComfyUI runs.
        fingerprint()
        add_to_server()  # ComfyUI 0.8.0 does not call on_load
        return [
            ParallelLoader, ParallelModel, ParallelLayoutNode, ParallelSampler, ParallelVAEDecode, ParallelVAEEncode,
            ParallelVAE, ParallelCache, ParallelClassLabel, ParallelOpenSora1Prompt, ParallelOpenSora1Video,
            ParallelOpenSora2Prompt, ParallelOpenSora2Video, ParallelOpenSora2Sampling, ParallelOpenSora2Guider,
        ]  # fmt: skip
