"""ComfyUI's latent previews, with the scaling and colours of the checkpoint's own VAE."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import comfy.utils
import latent_preview
import torch
from torch import Tensor

from ...parallel_backend import env
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.packing import Shape, unpack
from ..bridges.bridge import Bridge
from ..bridges.latents import fit_scaling

Callback = Callable[[int, Any, Any, int], None]


def fit_latent_format(latent_format: Any, bridge: Bridge) -> None:
    """Set a latent format's scaling to that of the checkpoint's VAE, and its preview factors from ``latent2rgb.json``.

    The optional file holds ``factors`` ``[C][3]`` and ``bias`` ``[3]``, which map normalised latents to RGB in -1..1.

    Raises:
        InvalidRequest: the file is unreadable, its shapes do not fit the channels, or the scaling does not fit.
    """
    fit_scaling(latent_format, bridge.vae, bridge.name)
    file = bridge.checkpoint.path / "latent2rgb.json"
    if not file.is_file():
        return
    try:
        preview = json.loads(file.read_text(encoding="utf-8"))
        factors, bias = torch.tensor(preview["factors"]), torch.tensor(preview["bias"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{file} cannot be read as preview factors: {error!r}") from error
    if factors.shape != (latent_format.latent_channels, 3) or bias.shape != (3,):
        raise InvalidRequest(f"{file} needs {latent_format.latent_channels} factors of 3 and a bias of 3")
    latent_format.latent_rgb_factors, latent_format.latent_rgb_factors_bias = preview["factors"], preview["bias"]


def prepare_callback(patcher: Any, steps: int, latent: Any) -> tuple[Callback, bool]:
    """Return a sampling callback ``(step, x0, x, total)`` like ComfyUI's own, and whether previews are enabled.

    Args:
        latent: what is sampled. Of a nested one, the first tensor is shown.
    """
    shapes = [tuple(each.shape[1:]) for each in latent.unbind()] if latent.is_nested else []
    wanted = env.PREVIEWS.get() == "on"
    previewer = latent_preview.get_previewer(patcher.load_device, patcher.model.latent_format) if wanted else None
    bar = comfy.utils.ProgressBar(steps)

    def callback(step: int, x0: Any, x: Any, total: int) -> None:
        preview = None
        if previewer is not None and x0 is not None:
            x0 = _picture(x0, shapes)
            preview = previewer.decode_latent_to_preview_image("JPEG", x0.to(patcher.load_device))
        bar.update_absolute(step + 1, total, preview)

    return callback, previewer is not None


def _picture(x0: Any, shapes: Sequence[Shape]) -> Tensor:
    """Return the picture's latent. Versions of ComfyUI pass a nested one, or all its tensors packed."""
    picture: Tensor = x0.unbind()[0] if x0.is_nested else unpack(x0, shapes)[0] if shapes else x0
    return picture
