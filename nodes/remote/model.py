"""ComfyUI's model class of a checkpoint's family, with our stand-in for the transformer."""

from typing import Any

from ..backend.connection import Handle
from ..bridges.bridge import Bridge
from .previews import fit_latent_format
from .transformer import RemoteTransformer


def parallel_model(handle: Handle, bridge: Bridge) -> Any:
    """Return a ``comfy.model_base.BaseModel`` of the family whose transformer runs on the ranks.

    Its schedule, latent format and conditioning are ComfyUI's own.
    """
    core_config = bridge.core_config()
    model = core_config.get_model({}, "")
    model.diffusion_model = RemoteTransformer(handle, bridge, core_config)
    fit_latent_format(model.latent_format, bridge)
    return model
