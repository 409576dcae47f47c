"""ComfyUI's VAE class with the work done by the backend."""

import math
from typing import Any, NoReturn

import comfy.sd
import torch
from torch import Tensor

from ..parallel_backend.errors import InvalidRequest
from ..parallel_backend.messages import Decode, Encode
from ..parallel_backend.vaes import LatentScale
from .connection import Handle, OnProgress, progress_bar
from .foresight import check_part
from .guards import check_latent
from .patcher import RemotePatcher, enter


class RemoteVAE(comfy.sd.VAE):  # type: ignore[misc]
    """Every way in and out of ComfyUI's VAE: latents ``[B, C, T, H, W]`` and pixels ``[B, T, H, W, 3]`` in 0..1.

    For pictures it is ``[B, C, H, W]`` and ``[B, H, W, 3]``.

    The tiled methods work on the whole picture: tiling exists to save memory on a card that does nothing here,
    and it changes the result. ``model`` is the patcher of the same checkpoint's MODEL.
    """

    def __init__(self, handle: Handle, scale: LatentScale, model: RemotePatcher) -> None:
        # The smallest VAE that ComfyUI knows sets every default of the running version.
        super().__init__(sd={"pixel_space_vae": torch.tensor(1.0)})
        self.handle, self._model = handle, model
        self.first_stage_model = _NotHere()
        self.patcher = RemotePatcher(self.first_stage_model, load_device=self.device, offload_device=self.device)
        self.size = 0
        self.memory_used_encode = self.memory_used_decode = lambda shape, dtype: 0
        self.latent_channels, self.latent_dim, self.output_channels = scale.channels, 3 if scale.video else 2, 3
        self._set_ratios(scale.temporal, scale.spatial)

    def _set_ratios(self, stride: int, spatial: int) -> None:
        """As ComfyUI's own VAEs have them."""
        self.upscale_ratio: Any = spatial
        self.downscale_ratio: Any = spatial
        self.upscale_index_formula = self.downscale_index_formula = None
        if self.latent_dim == 3:
            self.upscale_ratio = (lambda frames: max(0, (frames - 1) * stride + 1), spatial, spatial)
            self.downscale_ratio = (lambda frames: max(0, math.floor((frames + stride - 1) / stride)), spatial, spatial)
            self.upscale_index_formula = self.downscale_index_formula = (stride, spatial, spatial)

    def throw_exception_if_invalid(self) -> None:
        """Refuse to work without weights.

        Raises:
            InvalidRequest: the checkpoint has no VAE.
        """
        check_part(self.handle.checkpoint, 2)

    def decode(self, samples_in: Tensor, vae_options: Any = None) -> Tensor:
        """Pixels ``[B, T, H, W, 3]`` of latents ``[B, C, T, H, W]``, ``[B, H, W, 3]`` where the VAE is one of pictures.

        A VAE of videos takes ``[B, C, H, W]`` as videos of one frame, one of pictures the first frame of a video,
        both as ComfyUI's own.

        Raises:
            InvalidRequest: no VAE, or a latent that does not fit it.
        """
        return self.decode_with(samples_in, progress_bar())

    def decode_with(self, latent: Tensor, on_progress: OnProgress) -> Tensor:
        """``decode`` with somebody else's progress bar."""
        self.throw_exception_if_invalid()
        check_latent(latent, self.latent_channels)
        if latent.ndim != self.latent_dim + 2:
            latent = latent.unsqueeze(2) if self.latent_dim == 3 else latent[:, :, 0]
        enter(self._model, "vae")
        done = self.handle.call(Decode(model=self.handle.spec), {"latent": latent}, on_progress=on_progress)
        self.handle.show("ready")
        return done["pixels"].to(self.output_device)

    def decode_tiled(self, samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``decode``, untiled."""
        return self.decode(samples)

    def encode(self, pixel_samples: Tensor) -> Tensor:
        """Latents ``[B, C, T, H, W]`` of pixels: frames ``[T, H, W, C]`` of one video, or ``[B, T, H, W, C]``.

        A VAE of pictures gives ``[B, C, H, W]`` for ``[B, H, W, C]``.

        Raises:
            InvalidRequest: no VAE, or pixels that are not RGB.
        """
        self.throw_exception_if_invalid()
        pixels = self._cropped(pixel_samples)
        if pixels.shape[-1] != 3:
            raise InvalidRequest(f"the VAE encodes RGB pictures, and these have {pixels.shape[-1]} channel(s)")
        enter(self._model, "vae")
        done = self.handle.call(Encode(model=self.handle.spec), {"pixels": pixels.float()}, on_progress=progress_bar())
        self.handle.show("ready")
        return done["latent"].to(self.output_device)

    def _cropped(self, pixels: Tensor) -> Tensor:
        """The pixels as they are sent. Core's cropping cuts all dims between the first and the last."""
        if self.latent_dim == 2 and pixels.ndim != 4:
            raise InvalidRequest(f"the VAE encodes pictures, 4 dims, and these pixels have {pixels.ndim}")
        videos = pixels if pixels.ndim == 5 else pixels.unsqueeze(0)
        cropped: Tensor = self.vae_encode_crop_pixels(videos.flatten(0, 1))[..., :3].unflatten(0, videos.shape[:2])
        return cropped if self.latent_dim == 3 else cropped[0]

    def encode_tiled(self, pixel_samples: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``encode``, untiled."""
        return self.encode(pixel_samples)

    def get_sd(self) -> NoReturn:
        """Saving needs weights, and they are not here.

        Raises:
            InvalidRequest: always.
        """
        raise InvalidRequest("this VAE cannot be saved: its weights live in the backend's processes")


class _NotHere(torch.nn.Module):
    """Stands for the module inside a VAE, which some nodes reach for directly."""

    def __getattr__(self, name: str) -> Any:
        if name in ("encode", "decode", "per_channel_statistics", "encoder", "decoder"):
            raise InvalidRequest(f"a node wants the VAE's own {name}, which lives in the backend's processes")
        return super().__getattr__(name)
