"""What saved pictures say of how they were made."""

from collections.abc import Mapping
from typing import Any


def label(hidden: Any, text: Mapping[str, Any]) -> None:
    """Have saved pictures say something of this node, if whoever queued the prompt wants metadata in them.

    ``hidden`` is the node's, with ``unique_id`` and ``extra_pnginfo``; None where no workflow runs.
    """
    if hidden is not None and isinstance(hidden.extra_pnginfo, dict):
        hidden.extra_pnginfo.setdefault("parallel_dit", {})[str(hidden.unique_id)] = dict(text)
