"""ComfyUI's latent previews, with the scaling and colours of the checkpoint's own VAE."""

import json
from collections.abc import Callable
from typing import Any

import comfy.utils
import latent_preview
import torch
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ..bridges.bridge import Bridge
from ..bridges.latents import fit_scaling

Callback = Callable[[int, Tensor | None, Any, int], None]


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


def prepare_callback(patcher: Any, steps: int) -> tuple[Callback, bool]:
    """Return a sampling callback ``(step, x0, x, total)`` like ComfyUI's own, and whether previews are enabled."""
    previewer = latent_preview.get_previewer(patcher.load_device, patcher.model.latent_format)
    bar = comfy.utils.ProgressBar(steps)

    def callback(step: int, x0: Tensor | None, x: Any, total: int) -> None:
        preview = None
        if previewer is not None and x0 is not None:
            preview = previewer.decode_latent_to_preview_image("JPEG", x0.to(patcher.load_device))
        bar.update_absolute(step + 1, total, preview)

    return callback, previewer is not None
