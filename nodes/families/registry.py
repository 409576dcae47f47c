"""The bridges by the transformer's class name."""

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from ..bridges.bridge import Bridge
from .cogvideox import CogVideoX
from .dit import DiT
from .flux import Flux
from .flux2 import Flux2
from .hunyuan_video import HunyuanVideo
from .latte import Latte
from .ltx import LTXVideo
from .mochi import Mochi
from .pixart import PixArt
from .qwen_image import QwenImage
from .sd3 import SD3
from .wan import Wan
from .z_image import ZImage

BRIDGES: dict[str, type[Bridge]] = {
    "CogVideoXTransformer3DModel": CogVideoX,
    "DiTTransformer2DModel": DiT,
    "Flux2Transformer2DModel": Flux2,
    "FluxTransformer2DModel": Flux,
    "HunyuanVideoTransformer3DModel": HunyuanVideo,
    "LTXVideoTransformer3DModel": LTXVideo,
    "LatteTransformer3DModel": Latte,
    "MochiTransformer3DModel": Mochi,
    "PixArtTransformer2DModel": PixArt,
    "QwenImageTransformer2DModel": QwenImage,
    "SD3Transformer2DModel": SD3,
    "WanTransformer3DModel": Wan,
    "ZImageTransformer2DModel": ZImage,
}


def bridge_for(checkpoint: Checkpoint) -> Bridge:
    """Return the bridge of a checkpoint's family, after its checks.

    Raises:
        InvalidRequest: the class is not listed (the message has the list), or the variant is not supported.
    """
    checkpoint.check_known("transformer")
    name = checkpoint.components.get("transformer")
    if name is None:
        raise InvalidRequest(
            f"{checkpoint.name} holds no diffusion model (its parts: {', '.join(checkpoint.components)}): choose "
            "a file with one, and load this one with Parallel VAE"
        )
    if name not in BRIDGES:
        raise InvalidRequest(f"{checkpoint.name}: transformer {name} is not supported; supported: {', '.join(BRIDGES)}")
    bridge = BRIDGES[name].of(checkpoint)
    bridge.check()
    return bridge
