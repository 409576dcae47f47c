"""Metadata in saved images about how they were made."""

from collections.abc import Mapping
from typing import Any


def label_saved_images(hidden: Any, entries: Mapping[str, Any]) -> None:
    """Add entries about a node to the metadata of saved images, if the prompt was queued with metadata.

    Args:
        hidden: the node's ``hidden`` with ``unique_id`` and ``extra_pnginfo``. None if no workflow runs.
        entries: what the metadata says under ``parallel_dit`` and the node's id.
    """
    if hidden is not None and isinstance(hidden.extra_pnginfo, dict):
        hidden.extra_pnginfo.setdefault("parallel_dit", {})[str(hidden.unique_id)] = dict(entries)
