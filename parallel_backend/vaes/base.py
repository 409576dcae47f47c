"""What a VAE class of diffusers is to us: shape and scale of its latents, and how one sample is decoded and encoded.

Nothing here imports diffusers, so that the nodes in ComfyUI's process can ask for shapes and scales.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from ..errors import InvalidRequest

Write = Callable[[Tensor], None]
"""Takes the next frames of a sample, ``[1, 3, t, H, W]`` in -1..1. May raise to end the work."""
Done = Callable[[], None]
"""Called at the end of each part of the work on a sample. May raise to end it."""


@dataclass(frozen=True, kw_only=True)
class LatentScale:
    """How a VAE's latents are smaller than its pixels: T latent frames are ``temporal * (T - 1) + 1`` frames.

    Those of a ``video`` are ``[B, C, T, H, W]``, those of a picture ``[B, C, H, W]``.
    """

    channels: int
    spatial: int
    temporal: int = 1
    video: bool = True

    def as_video(self) -> "LatentScale":
        """That of a VAE of pictures that is used frame by frame."""
        return replace(self, video=True)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """From a VAE's raw latent z to the model's: ``(z - shift) * factor``, with a mean ``(z - mean) * factor / std``."""

    factor: float = 1.0
    shift: float = 0.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise InvalidRequest(f"the VAE's config has {len(self.mean)} latents_mean and {len(self.std)} latents_std")


class VAE(ABC):
    """One VAE class. ``config`` is its ``config.json``; what that leaves out is diffusers' default.

    Decoding and encoding are diffusers' own, of one sample at a time, untiled. Latents are those of ComfyUI's VAE.
    """

    smallest: ClassVar[int] = 1
    """Height and width from which on a latent can be decoded: a picture of 1 has no mirror image."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @property
    @abstractmethod
    def scale(self) -> LatentScale:
        """Shape of the latents."""

    @property
    @abstractmethod
    def scaling(self) -> Scaling | None:
        """What lies between latents and model; None where ComfyUI's VAE itself gives what the model takes."""

    @property
    def colors(self) -> int:
        """Number of colour channels of a picture."""
        return int(self.config.get("out_channels", 3))

    def pixel_frames(self, frames: int) -> int:
        """How many frames come out of so many latent frames."""
        return self.scale.temporal * (frames - 1) + 1

    def kept_frames(self, frames: int) -> int:
        """How many of a video's frames are encoded: those beyond the last whole group make no latent frame."""
        return 1 + (frames - 1) // self.scale.temporal * self.scale.temporal

    def prepare(self, module: Any) -> None:  # noqa: B027 (most need nothing)
        """Have diffusers' module compute as ComfyUI's does, right after it was loaded."""

    def decode_parts(self, module: Any, frames: int) -> int:
        """How many parts ``decode`` has, by the number of latent frames: convolutions, where all pass at once."""
        return len(_convolutions(module.decoder))

    def encode_parts(self, module: Any, frames: int) -> int:
        """The same of ``encode``, by the number of frames."""
        return len(_convolutions(module.encoder))

    def decode(self, module: Any, latent: Tensor, write: Write, done: Done) -> None:
        """Decode one latent ``[1, C, T, H, W]``, or a picture's ``[1, C, H, W]``."""
        with told(module.decoder, done):
            pixels = module.decode(latent, return_dict=False)[0]
        write(pixels)

    def encode(self, module: Any, pixels: Tensor, done: Done) -> Tensor:
        """The latent of one video ``[1, 3, T, H, W]``, or picture ``[1, 3, H, W]``, in -1..1: the posterior's mode."""
        with told(module.encoder, done):
            latent: Tensor = module.encode(pixels, return_dict=False)[0].mode()
        return latent


class Framewise(VAE):
    """A VAE whose own ``decode`` and ``encode`` run decoder and encoder on a few frames at a time.

    Decoded frames are written and dropped at once, so that a video is never held twice.
    """

    def frames_of(self, chunk: Tensor) -> Tensor:
        """The decoder's output as pixels ``[1, 3, t, H, W]``."""
        return chunk

    def decode(self, module: Any, latent: Tensor, write: Write, done: Done) -> None:
        """Decode one latent ``[1, C, T, H, W]``, and write each part's frames at once, which the decoder then drops."""

        def take(_module: object, _inputs: object, output: Any) -> Any:
            # Some decoders give their cache too.
            chunk, *rest = output if isinstance(output, tuple) else (output,)
            write(self.frames_of(chunk))
            done()
            return (chunk[:, :, :0], *rest) if rest else chunk[:, :, :0]

        handle = module.decoder.register_forward_hook(take)
        try:
            module.decode(latent, return_dict=False)
        finally:
            handle.remove()

    def encode(self, module: Any, pixels: Tensor, done: Done) -> Tensor:
        handle = module.encoder.register_forward_hook(lambda *_: done())
        try:
            latent: Tensor = module.encode(pixels, return_dict=False)[0].mode()
        finally:
            handle.remove()
        return latent


@contextmanager
def told(module: nn.Module, done: Done) -> Iterator[None]:
    """Call ``done`` once for each convolution of a module: when it has run first, or at the end, if it never does."""
    waiting: dict[nn.Module, Any] = {}

    def first(layer: nn.Module, _given: object, _made: object) -> None:
        waiting.pop(layer).remove()
        done()

    waiting |= {layer: layer.register_forward_hook(first) for layer in _convolutions(module)}
    try:
        yield
        for _ in waiting:
            done()
    finally:
        for handle in waiting.values():
            handle.remove()


def _convolutions(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Conv2d | nn.Conv3d)]


def scaled_by_factor(config: Mapping[str, Any], default: float) -> Scaling:
    """The scaling of the configs that have a ``scaling_factor`` and perhaps a ``shift_factor``."""
    return Scaling(factor=config.get("scaling_factor") or default, shift=config.get("shift_factor") or 0.0)


def scaled_by_channel(config: Mapping[str, Any], mean: tuple[float, ...], std: tuple[float, ...]) -> Scaling:
    """The scaling of the configs that have ``latents_mean`` and ``latents_std``."""
    return Scaling(
        factor=config.get("scaling_factor") or 1.0,
        mean=tuple(config.get("latents_mean") or mean),
        std=tuple(config.get("latents_std") or std),
    )
