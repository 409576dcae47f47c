"""DiT (classes to images), which ComfyUI lacks."""

from typing import Any

import comfy.conds
import comfy.latent_formats
import torch
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..bridges.bridge import CoreText
from ..bridges.own_model import OwnBridge, OwnModel

NO_CLASS = -1
"""The label that stands for none of the model's classes."""
LABEL = "class_labels"
"""The label's name in CONDITIONING."""


class DiTModel(OwnModel):
    """Takes a class where others take a prompt."""

    def own_conds(self, given: dict[str, Any]) -> dict[str, Any]:
        """See ``OwnModel``."""
        if given.get(LABEL) is None:
            raise InvalidRequest("this model draws a class, not a prompt: use Parallel Class Label for both prompts")
        return {LABEL: comfy.conds.CONDRegular(torch.tensor([given[LABEL]]))}


class DiT(OwnBridge):
    """Latents are of Stable Diffusion's VAE."""

    model = DiTModel
    factor = 0.18215
    vaes = ("AutoencoderKL",)
    text = CoreText(components={}, clip_type="STABLE_DIFFUSION")

    def latent_format(self) -> Any:
        """See ``OwnBridge``."""
        return comfy.latent_formats.SD15(self.scaling())

    def inputs(self, x: Tensor, timestep: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``. The last row of the model's table is for no class."""
        labels = given.pop(LABEL)
        none = torch.full_like(labels, self.config.get("num_embeds_ada_norm", 1000))
        labels = torch.where(labels == NO_CLASS, none, labels)
        return {"hidden_states": x, "timestep": timestep, LABEL: labels}

    def scale(self) -> LatentScale:
        """See ``Bridge``."""
        return LatentScale(channels=4, spatial=8, video=False)
