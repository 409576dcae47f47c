"""The bridge to diffusers' DiT (class to image), with a custom model class, because ComfyUI lacks the family."""

from typing import Any

import comfy.conds
import comfy.latent_formats
import torch
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import CoreText
from ..bridges.custom_model import CustomBridge, CustomModel

NO_CLASS = -1
"""The label that means no class."""
LABEL = "class_labels"
"""The key of the label in CONDITIONING."""


class DiTModel(CustomModel):
    """A model class that takes a class instead of a prompt."""

    def transformer_conds(self, conditioning: dict[str, Any]) -> dict[str, Any]:
        """See ``CustomModel``."""
        if conditioning.get(LABEL) is None:
            raise InvalidRequest("this model takes a class, not a prompt: use Parallel Class Label for both prompts")
        return {LABEL: comfy.conds.CONDRegular(torch.tensor([conditioning[LABEL]]))}


class DiT(CustomBridge):
    """DiT's bridge. The VAE is Stable Diffusion's."""

    model_class = DiTModel
    default_scaling_factor = 0.18215
    vaes = ("AutoencoderKL",)
    text = CoreText(components={}, clip_type="STABLE_DIFFUSION")

    def latent_format(self) -> Any:
        """See ``CustomBridge``."""
        return comfy.latent_formats.SD15(self.scaling_factor())

    def inputs(self, x: Tensor, timestep: Tensor, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. The last row of the model's class embedding means no class."""
        labels = call_args.pop(LABEL)
        no_class = torch.full_like(labels, self.config.get("num_embeds_ada_norm", 1000))
        labels = torch.where(labels == NO_CLASS, no_class, labels)
        return {"hidden_states": x, "timestep": timestep, LABEL: labels}

    def family_latent_scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=4, spatial=8, video=False)
