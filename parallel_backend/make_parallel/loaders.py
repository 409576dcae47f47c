"""Which nodes load a MODEL or a VAE, and which of them stay as they are."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .report import NODES, Kind, Reason

Readable = Callable[[str, str, Kind], str]
"""Takes a loader's class, the file that it names and a kind. Returns why the file cannot be parallel; "" if it can, or
if that is not known."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """A loader that may be followed.

    Attributes:
        outputs: the number of the output, by kind.
        file: the input that names the file.
    """

    outputs: Mapping[Kind, int]
    file: str


LOADERS: Mapping[str, Known] = {
    "UNETLoader": Known(outputs={"MODEL": 0}, file="unet_name"),
    "UnetLoaderGGUF": Known(outputs={"MODEL": 0}, file="unet_name"),
    "UnetLoaderGGUFAdvanced": Known(outputs={"MODEL": 0}, file="unet_name"),
    "CheckpointLoaderSimple": Known(outputs={"MODEL": 0, "VAE": 2}, file="ckpt_name"),
    "CheckpointLoader": Known(outputs={"MODEL": 0, "VAE": 2}, file="ckpt_name"),
    "ImageOnlyCheckpointLoader": Known(outputs={"MODEL": 0, "VAE": 2}, file="ckpt_name"),
    "unCLIPCheckpointLoader": Known(outputs={"MODEL": 0, "VAE": 2}, file="ckpt_name"),
    "VAELoader": Known(outputs={"VAE": 0}, file="vae_name"),
    "LTXVAudioVAELoader": Known(outputs={"VAE": 0}, file="ckpt_name"),
}
PARALLEL = frozenset({*NODES.values(), "ParallelLoader", "ParallelVAEDecode", "ParallelVAEEncode", "ParallelSampler"})
TEXT = re.compile("CLIPLoader|TextEncoderLoader")
"""Loaders of text encoders."""

_WEIGHTS = re.compile("merge|ModelSave|CheckpointSave|VAESave", re.IGNORECASE)
_AUDIO = re.compile("audio", re.IGNORECASE)
_NO_FILES = frozenset({"pixel_space", "taesd", "taesdxl", "taesd3", "taef1"})


def reason(loader: str, kind: Kind, file: str, near: Iterable[str], downstream: Iterable[str]) -> Reason | None:
    """Return why an output stays as it is; None if it can be parallel.

    Args:
        loader: the loader's class.
        kind: the output's.
        file: the name that the loader has.
        near: the classes of the nodes that take the output.
        downstream: the classes of all nodes that it reaches as a MODEL or VAE.
    """
    near, downstream = set(near), set(downstream)
    if downstream & PARALLEL:
        return "already"
    if kind == "VAE" and (_AUDIO.search(loader) or (near and all(map(_AUDIO.search, near))) or _AUDIO.search(file)):
        return "audio"
    if kind == "VAE" and file in _NO_FILES:
        return "builtin"
    return "weights" if any(map(_WEIGHTS.search, downstream)) else None


def no_check(loader: str, file: str, kind: Kind) -> str:
    """A ``Readable`` that knows no files."""
    return ""
