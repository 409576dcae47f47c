"""ComfyUI's VAE class whose work the backend does."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import comfy.model_management
import comfy.sd
import torch
from einops import rearrange
from torch import Tensor
from typing_extensions import override

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.messages import Decode, Encode, Progress
from ...parallel_backend.protocol.model_spec import DType
from ...parallel_backend.vaes import MIN_TILE, LatentScale, vae_of
from ...parallel_backend.vaes.base import ClipSteps
from ..backend.connection import Handle, progress_bar
from ..backend.progress_text import OnProgress
from ..bridges.given_numbers import as_int
from ..bridges.refusals import Unavailable, check_latent
from .latent_statistics import LatentStatistics, statistics_of
from .patcher import RemotePatcher, prepare_component, remote_patcher
from .weightless_patcher import WeightlessPatcher

DEFAULT_TILE = 512
"""The side of a tile in pixels if a node asks for tiles without a size."""


class RemoteVAE(comfy.sd.VAE):  # type: ignore[misc]
    """ComfyUI's VAE interface. Pixels are in 0..1.

    A video VAE maps latents ``[B, C, T, H, W]`` to pixels ``[B, T, H, W, 3]``, an image VAE latents ``[B, C, H, W]``
    to pixels ``[B, H, W, 3]``.

    All methods, tiled ones too, process the whole image, each rank some of its rows. Like ComfyUI's own VAE they fall
    back to tiles, which change the result, if a rank runs out of memory.

    Attributes:
        used_tile: the side of the tiles, in pixels, in which the last result was computed; 0 for the whole image.
    """

    def __init__(
        self,
        handle: Handle,
        scale: LatentScale,
        model: RemotePatcher,
        dtype: DType = "auto",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the VAE of a checkpoint.

        Args:
            scale: the VAE's latent channels, and how many pixels and frames one latent position covers.
            model: the patcher with which ComfyUI unloads the weights.
            dtype: that the ranks compute in.
            check: raises ``InvalidRequest`` if the checkpoint has no VAE that the backend can run.
        """
        # The smallest VAE that ComfyUI can detect sets all attributes to the running version's defaults.
        super().__init__(sd={"pixel_space_vae": torch.tensor(1.0)})
        self.handle, self._model, self._dtype, self._check = handle, model, dtype, check
        self.first_stage_model: Any = _AbsentModule(statistics_of(handle.checkpoint, dtype))
        self.patcher = WeightlessPatcher(self.first_stage_model, load_device=self.device, offload_device=self.device)
        self.size = 0
        self.memory_used_encode = self.memory_used_decode = lambda shape, dtype: 0
        self.latent_channels, self.latent_dim, self.output_channels = scale.channels, 3 if scale.video else 2, 3
        self._set_ratios(scale)
        self._spatial, self.used_tile = scale.spatial, 0

    def _set_ratios(self, scale: LatentScale) -> None:
        """Set ratios and index formulas in the form of ComfyUI's own VAEs."""
        temporal, spatial, clips = scale.temporal, scale.spatial, scale.clips
        self.upscale_ratio: Any = spatial
        self.downscale_ratio: Any = spatial
        self.upscale_index_formula = self.downscale_index_formula = None
        if self.latent_dim == 3:
            self.upscale_ratio = (lambda frames: max(0, (frames - 1) * temporal + 1), spatial, spatial)
            self.downscale_ratio = (
                lambda frames: max(0, math.floor((frames + temporal - 1) / temporal)), spatial, spatial,
            )  # fmt: skip
            self.upscale_index_formula = self.downscale_index_formula = (temporal, spatial, spatial)
        if clips:
            self.upscale_ratio = (partial(_pixel_frames, clips), spatial, spatial)
            self.downscale_ratio = (partial(_latent_frames, clips), spatial, spatial)

    @override
    def throw_exception_if_invalid(self) -> None:
        """Refuse to work without a supported VAE.

        Raises:
            InvalidRequest: the checkpoint has no VAE that the backend can run.
        """
        self._check()

    @override
    def decode(self, samples_in: Tensor, vae_options: Any = None) -> Tensor:
        """Return the pixels of latents ``[B, C, T, H, W]``: ``[B, T, H, W, 3]``, or ``[B, H, W, 3]`` of an image VAE.

        As in ComfyUI, a video VAE takes ``[B, C, H, W]`` as videos of one frame, and an image VAE takes the first
        frame of a video.

        Raises:
            InvalidRequest: there is no VAE, or the latent does not fit it.
        """
        return self.decode_with(samples_in, progress_bar())

    def decode_with(
        self, latent: Tensor, on_progress: OnProgress, tile: int = 0, fallback: int = DEFAULT_TILE
    ) -> Tensor:
        """Decode with a given progress callback.

        Args:
            latent: see ``decode``. Of any dtype, as in ComfyUI.
            tile: the side of a tile in pixels. 0 decodes the whole image exactly.
            fallback: the side of the tiles that follow if a rank runs out of memory. Halved while it still does.
        """
        self.throw_exception_if_invalid()
        tile, fallback = as_int(tile, "tile"), as_int(fallback, "the tile size")
        check_latent(latent, self.latent_channels, "this VAE")
        if latent.ndim != self.latent_dim + 2:
            latent = latent.unsqueeze(2) if self.latent_dim == 3 else latent[:, :, 0]
        message = Decode(model=self.handle.spec, tile=tile, dtype=self._dtype)
        answer = self._request(message, {"latent": latent.float()}, latent.shape[-2:], on_progress, fallback)
        return answer["pixels"].to(self.output_device, _kept_dtype())

    @override
    def decode_tiled(self, samples: Tensor, tile_x: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Decode like ``decode``; if a rank runs out of memory, in tiles of ``tile_x`` latent columns."""
        fallback = (tile_x or DEFAULT_TILE // self._spatial) * self._spatial
        return self.decode_with(samples, progress_bar(), fallback=fallback)

    @override
    def encode(self, pixel_samples: Tensor) -> Tensor:
        """Return latents ``[B, C, T, H, W]`` of the frames ``[T, H, W, C]`` of one video, or of ``[B, T, H, W, C]``.

        An image VAE returns ``[B, C, H, W]`` for ``[B, H, W, C]``.

        Raises:
            InvalidRequest: there is no VAE, or the pixels are not RGB.
        """
        return self.encode_with(pixel_samples, progress_bar())

    def encode_with(
        self, pixel_samples: Tensor, on_progress: OnProgress, tile: int = 0, fallback: int = DEFAULT_TILE
    ) -> Tensor:
        """Encode with a given progress callback.

        Args:
            tile: the side of a tile in pixels. 0 encodes the whole image exactly.
        """
        self.throw_exception_if_invalid()
        tile, fallback = as_int(tile, "tile"), as_int(fallback, "the tile size")
        pixels = self._cropped_rgb(pixel_samples)
        if pixels.shape[-1] != 3:
            raise InvalidRequest(
                f"the VAE encodes RGB images, and these have {pixels.shape[-1]} channel(s): convert them to RGB"
            )
        size = tuple(pixels_along // self._spatial for pixels_along in pixels.shape[-3:-1])
        message = Encode(model=self.handle.spec, tile=tile, dtype=self._dtype)
        answer = self._request(message, {"pixels": pixels.float()}, size, on_progress, fallback)
        return answer["latent"].to(self.output_device, _kept_dtype())

    @override
    def encode_tiled(self, pixel_samples: Tensor, tile_x: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        """Encode like ``encode``; if a rank runs out of memory, in tiles of ``tile_x`` pixels."""
        return self.encode_with(pixel_samples, progress_bar(), fallback=tile_x or DEFAULT_TILE)

    def _tiles(self, wanted: int, latent_size: Sequence[int]) -> Iterator[int]:
        """Yield tile sizes in pixels that the backend supports and that are smaller than the whole image.

        Args:
            wanted: the first one, about.
            latent_size: the latent's height and width.
        """
        tile = max(MIN_TILE, round(wanted / self._spatial))
        while tile >= MIN_TILE:
            if tile < max(latent_size):
                yield tile * self._spatial
            tile //= 2

    def _has_own_tiles(self) -> bool:
        """Whether the VAE works in tiles of its own: others would give another result."""
        return vae_of(self.handle.checkpoint).own_tile > 0

    def _request(
        self,
        message: Decode | Encode,
        tensors: dict[str, Tensor],
        latent_size: Sequence[int],
        on_progress: OnProgress,
        fallback: int,
    ) -> dict[str, Tensor]:
        """Return the backend's answer, of smaller and smaller tiles while a rank runs out of memory.

        Args:
            fallback: the side of the first tiles in pixels.
        """
        try:
            return self._ask(message, tensors, latent_size[0], on_progress)
        except comfy.model_management.OOM_EXCEPTION as error:
            first = last = error.with_traceback(None)  # which would keep the tensors
        possible = () if self._has_own_tiles() else self._tiles(fallback, latent_size)
        smaller = [tile for tile in possible if not 0 < message.tile <= tile]
        for tile in smaller:
            self.handle.tell(f"going on in VAE tiles of {tile} pixels, which is approximate, since {last}")
            try:
                return self._ask(replace(message, tile=tile), tensors, latent_size[0], on_progress)
            except comfy.model_management.OOM_EXCEPTION as error:
                last = error.with_traceback(None)
        raise first

    def _ask(
        self, message: Decode | Encode, tensors: dict[str, Tensor], rows: int, on_progress: OnProgress
    ) -> dict[str, Tensor]:
        """Return the backend's answer. Its note on anything unusual stays on the loader's node.

        Args:
            rows: the latent's rows. Not more ranks than rows take part.
        """
        last_note = ""

        def progressed(progress: Progress, extra: dict[str, Tensor]) -> None:
            nonlocal last_note
            last_note = progress.note
            on_progress(progress, extra)

        in_tiles = message.tile or self._has_own_tiles()
        ranks = self.handle.ranks if in_tiles else min(rows, self.handle.ranks)
        prepare_component(self._model, "vae", ranks=ranks)
        answer = self.handle.call(message, tensors, on_progress=progressed)
        self.used_tile = message.tile
        self.handle.show(f"ready; {last_note}" if last_note else "ready")
        return answer

    def _cropped_rgb(self, pixels: Tensor) -> Tensor:
        """Crop pixels to whole latent pixels and drop an alpha channel.

        ComfyUI's cropping crops every dim between the first and the last, so it gets frames, not videos.
        """
        if self.latent_dim == 2 and pixels.ndim != 4:
            raise InvalidRequest(f"the VAE encodes images, which have 4 dims, and these pixels have {pixels.ndim}")
        videos = pixels if pixels.ndim == 5 else rearrange(pixels, "t h w c -> 1 t h w c")
        frames = self.vae_encode_crop_pixels(rearrange(videos, "b t h w c -> (b t) h w c"))[..., :3]
        cropped: Tensor = rearrange(frames, "(b t) h w c -> b t h w c", b=len(videos))
        return cropped if self.latent_dim == 3 else cropped[0]

    @override
    def get_sd(self) -> NoReturn:
        """Refuse to save the VAE, for which ComfyUI calls this.

        Raises:
            InvalidRequest: always.
        """
        raise InvalidRequest("this VAE cannot be saved: its weights live in the backend's processes")


def vae_alone(handle: Handle, scale: LatentScale, dtype: DType = "auto") -> RemoteVAE:
    """Return a VAE that ComfyUI unloads by itself, because no MODEL of its checkpoint does."""
    return RemoteVAE(handle, scale, remote_patcher(_HandleOwner(handle)), dtype)


def _pixel_frames(clips: ClipSteps, latents: int) -> int:
    """Return ComfyUI's number of pixel frames, which is that of full clips."""
    return max(1, (latents - clips.first_latents) // clips.latents * clips.frames + clips.first_frames)


def _latent_frames(clips: ClipSteps, frames: int) -> int:
    """Return ComfyUI's number of latent frames, which is that of full clips."""
    return (
        max(1, (frames - clips.first_frames) // clips.frames * clips.latents + clips.first_latents) if frames > 1 else 1
    )


def _kept_dtype() -> torch.dtype:
    """Return what ComfyUI keeps images and latents in. Versions before 0.27 know nothing but float32."""
    intermediate_dtype = getattr(comfy.model_management, "intermediate_dtype", lambda: torch.float32)
    dtype: torch.dtype = intermediate_dtype()
    return dtype


class _HandleOwner(torch.nn.Module):
    """Stands for a model without a transformer. A patcher finds the handle where a model has it."""

    def __init__(self, handle: Handle) -> None:
        super().__init__()
        self.diffusion_model: Any = SimpleNamespace(handle=handle)


class _AbsentModule(torch.nn.Module):
    """Stub for the module inside a VAE, which some nodes use directly.

    Args:
        statistics: what normalises the latent; None if the module has nothing of that kind.
    """

    def __init__(self, statistics: LatentStatistics | None) -> None:
        super().__init__()
        if statistics is not None:
            self.per_channel_statistics = statistics

    def __getattr__(self, name: str) -> Any:
        if name in ("encode", "decode", "per_channel_statistics", "encoder", "decoder"):
            raise Unavailable(
                f"a node uses the VAE's own {name}, which is in the backend's processes: remove that node, or load the "
                "VAE with ComfyUI's Load VAE"
            )
        return super().__getattr__(name)

    def __deepcopy__(self, memo: Any) -> "_AbsentModule":
        return self
