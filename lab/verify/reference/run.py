"""``python -m lab verify --reference FOLDER``."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from parallel_backend.errors import InvalidRequest

from . import open_sora1, open_sora1_sampling, open_sora1_vae, open_sora2, open_sora2_sampling
from .difference import Difference
from .part import Part
from .recipe import NAMES

Kind = Callable[[Part], Iterator[Difference]]
"""Compares all cells of a part."""

KINDS: Mapping[str, Kind] = {
    "v12_forward": open_sora1.forward,
    "v12_prompts": open_sora1.prompts,
    "v12_sampling": open_sora1_sampling.sampling,
    "v12_vae_small": open_sora1_vae.compare,
    "v12_vae_full": open_sora1_vae.compare,
    "v20_dcae": open_sora2.refusal,
    "v20_forward": open_sora2.forward,
    "v20_prompts": open_sora2_sampling.prompts,
    "v20_sampling": open_sora2_sampling.sampling,
}
"""By what the names of the part's files begin with."""


def compare(folder: Path) -> Iterator[Difference]:
    """Compare every part of a folder, in one process and in float32.

    Raises:
        InvalidRequest: there is no part of a known kind, or one cannot be read.
    """
    parts = [part for part in map(Part, sorted(folder.glob("*.json"))) if "tensors" in part.described]
    if not any(kind_of(part) for part in parts):
        raise InvalidRequest(f"{folder} has no reference of a known kind; known: {', '.join(KINDS)} (.json)")
    with torch.no_grad():
        for part in parts:
            if kind := kind_of(part):
                yield from _compared(part, kind)
            else:
                yield Difference(cell=part.name, skipped=f"another kind than {', '.join(KINDS)}")


def kind_of(part: Part) -> Kind | None:
    """Return what compares a part, such as ``v12_forward`` or ``v12_forward_odd``; None if nothing does."""
    if part.name.endswith(NAMES):
        return None
    names = [name for name in KINDS if part.name == name or part.name.startswith(f"{name}_")]
    return KINDS[max(names, key=len)] if names else None


def _compared(part: Part, kind: Kind) -> Iterator[Difference]:
    """Yield a part's comparisons, of which there is one at least."""
    compared = 0
    try:
        for difference in kind(part):
            compared += not difference.skipped
            yield difference
    except KeyError as error:
        raise InvalidRequest(f"{part.file} or the tensors beside it lack {error}") from error
    if not compared:
        raise InvalidRequest(f"{part.file} has nothing to compare")
