"""Weights that a request uses instead of those in the model's files."""

from pathlib import Path

from ..checkpoint import overlay_file
from ..protocol.messages import Overlay
from .weight_source import WeightSource


def overlaid(source: WeightSource, overlay: Overlay | None, component: str) -> WeightSource:
    """Return the source of a transformer's weights with the changed ones of an overlay."""
    if overlay is None:
        return source
    return source.with_overlay(overlay_file.read(Path(overlay.path), overlay.id, component))


def decompressed(source: WeightSource, changed: WeightSource) -> frozenset[str]:
    """Return the compressed parameters of a source whose changed weights are not compressed.

    Their layers are others, so a transformer with other ones has to be loaded again.
    """
    return frozenset(name for name in changed.overlaid if source.compression(name) is not None)
