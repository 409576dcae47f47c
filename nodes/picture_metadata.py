"""Metadata in saved images about how they were made."""

import sys
from collections.abc import Mapping
from typing import Any

_EXECUTION, _EXTRA = "execution", "extra_data"
"""ComfyUI's module that runs prompts, and its variable with what was queued beside the running one."""


def label_saved_images(hidden: Any, entries: Mapping[str, Any]) -> None:
    """Add entries about a node to the metadata of saved images, if the prompt was queued with metadata.

    Args:
        hidden: the node's ``hidden`` with ``unique_id`` and ``extra_pnginfo``. None if no workflow runs.
        entries: what the metadata says under ``parallel_dit`` and the node's id.
    """
    if hidden is not None:
        _add(hidden.extra_pnginfo, str(hidden.unique_id), entries)


def label_running_prompt(node: str, entries: Mapping[str, Any]) -> None:
    """Do what ``label_saved_images`` does for a node of ComfyUI, whose ``hidden`` nobody has.

    ComfyUI hands the metadata to nodes that ask for it, and to no function that it calls while KSampler runs. So it is
    read where ComfyUI runs the node, further up in the stack of calls.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == _EXECUTION and isinstance(frame.f_locals.get(_EXTRA), dict):
            _add(frame.f_locals[_EXTRA].get("extra_pnginfo"), node, entries)
            return
        frame = frame.f_back


def _add(metadata: Any, node: str, entries: Mapping[str, Any]) -> None:
    if isinstance(metadata, dict):
        metadata.setdefault("parallel_dit", {})[node] = dict(entries)
