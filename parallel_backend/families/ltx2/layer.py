"""One layer of LTX-2, with what ComfyUI changes in it for a call."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...interfaces.geometry import AUDIO, IMAGE
from ...interfaces.state import State
from .across_shares import AcrossShares
from .later_keys import LaterKeys

CHANGES = ("heard_share", "attending_layers", "across_shares")
"""Inputs that say what a call changes in layers."""


class Layer:
    """Runs a block of diffusers' transformer.

    Args:
        layer: the block. Its self-attention gets diffusers' own processor that can pass values on.
        number: its place in the model.
        arguments: returns the block's arguments for a state.
    """

    def __init__(self, layer: Any, number: int, arguments: Callable[[State], dict[str, Any]]) -> None:
        from diffusers.models.transformers.transformer_ltx2 import LTX2PerturbedAttnProcessor

        self.layer, self.number, self.arguments = layer, number, arguments
        layer.perturbed_attn = True
        for attention in (layer.attn1, layer.audio_attn1):
            attention.set_processor(LTX2PerturbedAttnProcessor())
        self.shares, self.keys = AcrossShares(layer), LaterKeys(layer)  # keys are of what the picture does hear

    def run(self, state: State) -> State:
        """Return the state after this layer."""
        arguments, context = self.arguments(state), state.context
        across, gate = arguments["temb_ca_scale_shift"], arguments["temb_ca_gate"]
        with self.shares.by(context.get("across_shares")), self.keys.by(context.get("heard_share"), across, gate):
            picture, sound = self.layer(**arguments, **self._attending(context, across))
        return state.with_streams(**{IMAGE: picture[:, : state.streams[IMAGE].shape[1]], AUDIO: sound})

    def _attending(self, context: Mapping[str, Tensor], like: Tensor) -> dict[str, Any]:
        if "attending_layers" not in context:
            return {}
        mask = context["attending_layers"][:, self.number, None, None].to(like.dtype)
        return {"perturbation_mask": mask, "all_perturbed": False}  # to look for zeros, the host would wait for a GPU
