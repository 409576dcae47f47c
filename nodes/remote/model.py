"""ComfyUI's model class of a checkpoint's family, with our stand-in for the transformer inside."""

from typing import Any

from ..backend.connection import Handle
from ..bridges.bridge import Bridge
from .previews import fit_latent_format
from .transformer import RemoteModel


def core_model(handle: Handle, bridge: Bridge) -> Any:
    """A ``comfy.model_base.BaseModel`` of the family, whose schedule, latent format and conditioning are core's own."""
    core = bridge.core_config()
    model = core.get_model({}, "")
    model.diffusion_model = RemoteModel(handle, bridge, core)
    fit_latent_format(model.latent_format, bridge)
    return model
