"""diffusers' class of MiniMax-H3's video VAE, with the statistics of its latents, which published files hold."""

from functools import wraps
from typing import Any

import torch
from diffusers import AutoencoderKLMiniMaxH3 as _Published
from torch import Tensor


class AutoencoderKLMiniMaxH3(_Published):  # type: ignore[misc]
    """The class with mean and standard deviation of each latent channel as buffers.

    Weights are all in one dtype, as ComfyUI has them; diffusers keeps some in float32.

    Args:
        options: diffusers' own. ``latents_mean`` and ``latents_std`` None: they are among the weights.
    """

    latent_mean: Tensor
    latent_std: Tensor
    _keep_in_fp32_modules: Any = None

    @wraps(_Published.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in ("mean", "std"):
            values = self.config[f"latents_{name}"]
            known = torch.zeros(self.config.latent_channels) if values is None else torch.tensor(values)
            self.register_buffer(f"latent_{name}", known, persistent=values is None)
