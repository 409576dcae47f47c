"""Where tokens of LTX-2's picture are in the video."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...interfaces.geometry import LATENT

_FRAME_RATE = 25.0
"""Default frames per second, as in ComfyUI."""


def video_coords(inputs: Mapping[str, Tensor], config: Mapping[str, Any]) -> Tensor:
    """Return where each token of the picture starts and ends, ``[B, 3, S, 2]``, with time in seconds."""
    latent, device = inputs[LATENT], inputs[LATENT].device
    rate = inputs["frame_rate"] if "frame_rate" in inputs else latent.new_full((len(latent),), _FRAME_RATE)
    coords = inputs.get("video_coords")
    if coords is None:
        axes = [torch.arange(length, dtype=torch.float32, device=device) for length in latent.shape[2:]]
        starts = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)
        frame, *others = torch.stack([starts, starts + 1], dim=2)
        per_frame, *scales = config["vae_scale_factors"]
        frame = (frame * per_frame + config["causal_offset"] - per_frame).clamp(min=0)
        scaled = [each * scale for each, scale in zip(others, scales, strict=True)]
        coords = torch.stack([frame, *scaled]).expand(len(latent), -1, -1, -1)
    frame, row, column = coords.float().unbind(1)
    # As ComfyUI rounds: the highest frequency turns a last bit into 0.001 of an angle.
    return torch.stack([frame * rate.double().reciprocal().float()[:, None, None], row, column], dim=1)
