"""What a family's bridge gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...parallel_backend.checkpoint import Checkpoint
from ..connection import Handle


@dataclass(frozen=True, kw_only=True)
class VideoScale:
    """How a VAE's latents are smaller than its pixels: T latent frames are ``temporal * (T - 1) + 1`` frames."""

    channels: int
    temporal: int
    spatial: int


@dataclass(frozen=True, kw_only=True)
class Bridge:
    """A family as ComfyUI sees it. Everything is read from a checkpoint's JSON files.

    ``check`` raises InvalidRequest for a variant that is not supported; ``model`` makes ComfyUI's model class with a
    ``RemoteModel`` inside; ``scale`` describes the latents; ``text_key`` is ComfyUI's name of the text encoder and
    ``text_length`` the number of tokens that shorter prompts are padded to; ``vaes`` and ``text_encoders`` are the
    classes that the backend can run for it.
    """

    check: Callable[[Checkpoint], None]
    model: Callable[[Handle], Any]
    scale: Callable[[Checkpoint], VideoScale]
    text_key: str
    text_length: int
    vaes: tuple[str, ...]
    text_encoders: tuple[str, ...]
