"""The interface to diffusers' VAE classes: shape and scale of the latents, and how to decode and encode one sample.

Nothing here imports diffusers, so the nodes in ComfyUI's process can ask for shapes and scales.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..errors import InvalidRequest

WriteFrames = Callable[[Tensor], None]
"""Takes the next decoded frames of a sample, ``[1, 3, t, H, W]`` in -1..1. May raise to stop decoding."""
UnitDone = Callable[[], None]
"""Called after each progress unit of a sample (see ``VAE.decode_progress_units``). May raise to stop the work."""


@dataclass(frozen=True, kw_only=True)
class ClipSteps:
    """Numbers of frames that fill all clips of a VAE that works in clips.

    ``frames * k + first_frames`` pixel frames are ``latents * k + first_latents`` latent frames.
    """

    frames: int
    latents: int
    first_frames: int
    first_latents: int


@dataclass(frozen=True, kw_only=True)
class LatentScale:
    """The channels of a VAE's latents, and how many pixels and frames one latent position covers.

    Latents are ``[B, C, T, H, W]`` for video and ``[B, C, H, W]`` for images. T latent frames stand for
    ``temporal * (T - 1) + 1`` pixel frames.

    Attributes:
        channels: latent channels.
        spatial: pixels per latent row, and per latent column.
        temporal: pixel frames per latent frame after the first.
        video: whether latents have a time dim.
        clips: how many frames fill all clips; None for a VAE whose frames follow the formula above.
    """

    channels: int
    spatial: int
    temporal: int = 1
    video: bool = True
    clips: ClipSteps | None = None

    def as_video(self) -> "LatentScale":
        """Return the scale of an image VAE that is applied to a video frame by frame."""
        return replace(self, video=True)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Maps a VAE's raw latent z to the model's: ``(z - shift) * factor``, or ``(z - mean) * factor / std``.

    Attributes:
        factor: the scale of both formulas.
        shift: subtracted in the first formula.
        mean: one value per latent channel. Empty selects the first formula.
        std: one value per latent channel, or empty like ``mean``.

    Raises:
        InvalidRequest: ``mean`` and ``std`` differ in length.
    """

    factor: float = 1.0
    shift: float = 0.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise InvalidRequest(
                f"the VAE's config has {len(self.mean)} latents_mean and {len(self.std)} latents_std; "
                "both need one value per latent channel"
            )


class VAE(ABC):
    """One VAE class of diffusers.

    Decoding and encoding call diffusers' module, untiled, one sample at a time. Latents follow the convention of
    ComfyUI's VAE of the same model.

    Args:
        config: the VAE's ``config.json``. Missing entries take diffusers' defaults.
    """

    min_latent_size: ClassVar[int] = 1
    """Smallest latent height and width that can be decoded. Reflection padding needs 2, since it mirrors rows."""

    min_encoded_size: ClassVar[int] = 1
    """Smallest height and width, in rows and columns of the latent, of pixels that can be encoded."""

    own_tile: ClassVar[int] = 0
    """Side in pixels of the tiles in which the VAE itself works; 0 if it works on whole frames (see ``TiledVAE``)."""

    working_dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    """In which half precision ComfyUI's VAE of this class computes, the preferred dtype first (``working_dtypes``)."""

    writes_each_unit: ClassVar[bool] = False
    """Whether ``decode`` writes frames in each progress unit. It writes all of them at the end otherwise."""

    own_module: ClassVar[str] = ""
    """The file beside this one that has the module's class; "" if diffusers has it."""

    since: ClassVar[str] = ""
    """The first version of diffusers that has its layers, if that is newer than ``requirements.txt`` asks for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @property
    @abstractmethod
    def scale(self) -> LatentScale:
        """Shape of the latents."""

    @property
    @abstractmethod
    def scaling(self) -> Scaling | None:
        """The map from latents to the model's input.

        None if ComfyUI's VAE gives the model's input directly, or if ComfyUI's latent format has the right scaling.
        """

    @property
    def colors(self) -> int:
        """Number of colour channels of an image."""
        return int(self.config.get("out_channels", 3))

    def pixel_frames(self, frames: int) -> int:
        """Return how many pixel frames ``frames`` latent frames decode to."""
        return self.scale.temporal * (frames - 1) + 1

    def encoded_frames(self, frames: int) -> int:
        """Return how many of a video's frames are encoded. An incomplete last group yields no latent frame."""
        return 1 + (frames - 1) // self.scale.temporal * self.scale.temporal

    def latent_frames(self, frames: int) -> int:
        """Return how many latent frames ``frames`` pixel frames are encoded to."""
        return 1 + (frames - 1) // self.scale.temporal

    def independent_frames(self, frames: int, *, encode: bool) -> tuple[int, ...]:
        """Return the lengths of the parts along time that are coded without one another. Here all frames are one.

        Args:
            frames: pixel frames to encode, or latent frames to decode.
        """
        return (frames,)

    def prepare(self, module: Any) -> None:  # noqa: B027 (most need nothing)
        """Make a freshly loaded diffusers module compute what ComfyUI's does."""

    def decode_progress_units(self, module: Any, frames: int) -> int:
        """Return the number of progress units: how often ``decode`` calls ``unit_done`` for ``frames`` latent frames.

        Here a unit is one convolution of the decoder, through which all frames pass at once.
        """
        return len(_convolutions(module.decoder))

    def encode_progress_units(self, module: Any, frames: int) -> int:
        """Return how often ``encode`` calls ``unit_done`` for ``frames`` pixel frames."""
        return len(_convolutions(module.encoder))

    def decode(self, module: Any, latent: Tensor, write: WriteFrames, unit_done: UnitDone) -> None:
        """Decode one latent, ``[1, C, T, H, W]`` of a video or ``[1, C, H, W]`` of an image."""
        with report_convolutions(module.decoder, unit_done):
            pixels = module.decode(latent, return_dict=False)[0]
        write(pixels)

    def encode(self, module: Any, pixels: Tensor, unit_done: UnitDone) -> Tensor:
        """Encode one video ``[1, 3, T, H, W]`` or image ``[1, 3, H, W]``, in -1..1.

        Returns:
            The posterior's mode, ``[1, C, T', H', W']`` or ``[1, C, H', W']``.
        """
        with report_convolutions(module.encoder, unit_done):
            latent: Tensor = module.encode(pixels, return_dict=False)[0].mode()
        return latent


class Framewise(VAE):
    """A VAE whose diffusers module runs its decoder and encoder on a few frames at a time.

    Each decoded chunk is written and dropped at once, so memory never holds a video twice.
    """

    writes_each_unit = True

    def to_pixels(self, chunk: Tensor) -> Tensor:
        """Convert the decoder's output to pixels ``[1, 3, t, H, W]``."""
        return chunk

    def decode(self, module: Any, latent: Tensor, write: WriteFrames, unit_done: UnitDone) -> None:
        """Decode one latent ``[1, C, T, H, W]``, and write each chunk of frames as soon as it is decoded.

        A hook writes the chunk and hands the decoder's caller an empty one, so diffusers does not collect frames.
        """

        def write_chunk(_module: object, _inputs: object, output: Any) -> Any:
            # Some decoders also return their cache.
            chunk, *rest = output if isinstance(output, tuple) else (output,)
            write(self.to_pixels(chunk))
            unit_done()
            return (chunk[:, :, :0], *rest) if rest else chunk[:, :, :0]

        with module.decoder.register_forward_hook(write_chunk):
            module.decode(latent, return_dict=False)

    def encode(self, module: Any, pixels: Tensor, unit_done: UnitDone) -> Tensor:
        handle = module.encoder.register_forward_hook(lambda *_: unit_done())
        try:
            latent: Tensor = module.encode(pixels, return_dict=False)[0].mode()
        finally:
            handle.remove()
        return latent


@contextmanager
def report_convolutions(module: nn.Module, unit_done: UnitDone) -> Iterator[None]:
    """Call ``unit_done`` once per convolution of a module: after its first run, or on exit if it never ran."""
    handles: dict[nn.Module, Any] = {}

    def after_first_run(layer: nn.Module, _inputs: object, _output: object) -> None:
        handles.pop(layer).remove()
        unit_done()

    handles |= {layer: layer.register_forward_hook(after_first_run) for layer in _convolutions(module)}
    try:
        yield
        for _ in handles:
            unit_done()
    finally:
        for handle in handles.values():
            handle.remove()


def _convolutions(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Conv3d)]


def scaled_by_factor(config: Mapping[str, Any], default: float) -> Scaling | None:
    """Return the scaling of a config with a ``scaling_factor`` and perhaps a ``shift_factor``.

    ``scaling_factor`` None, as for a single file, which does not hold it, leaves the scaling to ComfyUI.
    """
    if config.get("scaling_factor", default) is None:
        return None
    return Scaling(factor=config.get("scaling_factor") or default, shift=config.get("shift_factor") or 0.0)


def scaled_by_channel(config: Mapping[str, Any], mean: tuple[float, ...], std: tuple[float, ...]) -> Scaling | None:
    """Return the scaling of a config with ``latents_mean`` and ``latents_std``; ``mean`` and ``std`` are defaults.

    ``latents_mean`` None, as for a single file, which does not hold it, leaves the scaling to ComfyUI.
    """
    if config.get("latents_mean", mean) is None:
        return None
    return Scaling(
        factor=config.get("scaling_factor") or 1.0,
        mean=tuple(config.get("latents_mean") or mean),
        std=tuple(config.get("latents_std") or std),
    )
