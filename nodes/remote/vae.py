"""ComfyUI's VAE class with the work done by the backend."""

import logging
import math
from collections.abc import Sequence
from typing import Any, NoReturn

import comfy.model_management
import comfy.sd
import torch
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.messages import Decode, Encode, Progress
from ...parallel_backend.vaes import SMALLEST_TILE, LatentScale
from ..backend.connection import Handle, OnProgress, progress_bar
from ..bridges.refusals import check_latent
from .patcher import RemotePatcher, enter
from .preflight import check_part

TILE = 512
"""Pixels of a tile's side where a node asks for tiles without saying of what size."""


class RemoteVAE(comfy.sd.VAE):  # type: ignore[misc]
    """Every way in and out of ComfyUI's VAE: latents ``[B, C, T, H, W]`` and pixels ``[B, T, H, W, 3]`` in 0..1.

    For pictures it is ``[B, C, H, W]`` and ``[B, H, W, 3]``.

    The tiled methods work on the whole picture, each rank on some of its rows, and in tiles only if that does not fit:
    tiles change the result. ``model`` is the patcher of the same checkpoint's MODEL.
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
        self._spatial = scale.spatial

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

    def decode_with(self, latent: Tensor, on_progress: OnProgress, tile: int = 0) -> Tensor:
        """``decode`` with somebody else's progress bar, and in tiles of so many pixels a side where ``tile`` is set."""
        self.throw_exception_if_invalid()
        check_latent(latent, self.latent_channels)
        if latent.ndim != self.latent_dim + 2:
            latent = latent.unsqueeze(2) if self.latent_dim == 3 else latent[:, :, 0]
        done = self._work(Decode(model=self.handle.spec, tile=tile), {"latent": latent}, latent.shape[-2], on_progress)
        return done["pixels"].to(self.output_device)

    def decode_tiled(self, samples: Tensor, tile_x: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """``decode``, and only where the ranks' memory is too small for it in tiles of ``tile_x`` of the latent."""
        try:
            return self.decode(samples)
        except comfy.model_management.OOM_EXCEPTION as full:
            tile = self._tile((tile_x or TILE // self._spatial) * self._spatial, samples.shape[-2:], full)
            return self.decode_with(samples, progress_bar(), tile)

    def encode(self, pixel_samples: Tensor) -> Tensor:
        """Latents ``[B, C, T, H, W]`` of pixels: frames ``[T, H, W, C]`` of one video, or ``[B, T, H, W, C]``.

        A VAE of pictures gives ``[B, C, H, W]`` for ``[B, H, W, C]``.

        Raises:
            InvalidRequest: no VAE, or pixels that are not RGB.
        """
        return self.encode_with(pixel_samples, progress_bar())

    def encode_with(self, pixel_samples: Tensor, on_progress: OnProgress, tile: int = 0) -> Tensor:
        """``encode`` with somebody else's progress bar, and in tiles of so many pixels a side where ``tile`` is set."""
        self.throw_exception_if_invalid()
        pixels = self._cropped(pixel_samples)
        if pixels.shape[-1] != 3:
            raise InvalidRequest(f"the VAE encodes RGB pictures, and these have {pixels.shape[-1]} channel(s)")
        rows = pixels.shape[-3] // self._spatial
        done = self._work(Encode(model=self.handle.spec, tile=tile), {"pixels": pixels.float()}, rows, on_progress)
        return done["latent"].to(self.output_device)

    def encode_tiled(self, pixel_samples: Tensor, tile_x: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """``encode``, and only where the ranks' memory is too small for it in tiles of ``tile_x`` pixels."""
        try:
            return self.encode(pixel_samples)
        except comfy.model_management.OOM_EXCEPTION as full:
            height, width = (size // self._spatial for size in pixel_samples.shape[-3:-1])
            tile = self._tile(tile_x or TILE, (height, width), full)
            return self.encode_with(pixel_samples, progress_bar(), tile)

    def _tile(self, pixels: int, latent: Sequence[int], full: Exception) -> int:
        """The size nearest to one that was asked for which the backend takes; says why tiles it is.

        ``latent`` are its height and width. Raises ``full`` itself where one tile would be the whole.
        """
        tile = max(SMALLEST_TILE, round(pixels / self._spatial)) * self._spatial
        if tile >= max(latent) * self._spatial:
            raise full
        logging.warning("Parallel DiT: %s; the VAE goes on in tiles of %d pixels, which is approximate", full, tile)
        return tile

    def _work(
        self, message: Decode | Encode, tensors: dict[str, Tensor], rows: int, on_progress: OnProgress
    ) -> dict[str, Tensor]:
        """The answer; what is other than one would expect stays on the loader's node. ``rows`` are the latent's."""
        notes = [""]

        def noted(progress: Progress, extra: dict[str, Tensor]) -> None:
            notes[:] = [progress.note]
            on_progress(progress, extra)

        enter(self._model, "vae", ranks=self.handle.ranks if message.tile else min(rows, self.handle.ranks))
        done = self.handle.call(message, tensors, on_progress=noted)
        self.handle.show(f"ready; {notes[0]}" if notes[0] else "ready")
        return done

    def _cropped(self, pixels: Tensor) -> Tensor:
        """The pixels as they are sent. Core's cropping cuts all dims between the first and the last."""
        if self.latent_dim == 2 and pixels.ndim != 4:
            raise InvalidRequest(f"the VAE encodes pictures, 4 dims, and these pixels have {pixels.ndim}")
        videos = pixels if pixels.ndim == 5 else pixels.unsqueeze(0)
        cropped: Tensor = self.vae_encode_crop_pixels(videos.flatten(0, 1))[..., :3].unflatten(0, videos.shape[:2])
        return cropped if self.latent_dim == 3 else cropped[0]

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
