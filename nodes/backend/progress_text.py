"""A request's progress as the text of the loader's node."""

import logging
from collections.abc import Callable

import comfy.model_management
from torch import Tensor

from ...parallel_backend.protocol.messages import Progress

OnProgress = Callable[[Progress, dict[str, Tensor]], None]
TimeLeft = Callable[[float, float], str]
"""Returns how long the rest will take, by how much of how much is done, as it follows a text; "" if unknown."""

PLANNING = "planning"
"""The phase whose note is why a layout was chosen."""

WAIT_TEXTS: dict[str, str] = {
    "queued": "waiting for another request",
    "start": "starting ranks",
    PLANNING: "choosing a layout",
    "loading": "loading weights",
    "compiling": "compiling the model's blocks; kept on disk for the next start",
}


def duration(seconds: float) -> str:
    """Return a time as it is read: ``12 s``, ``3 min`` or ``1.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _unknown(done: float, total: float) -> str:
    return ""


def shown_progress(
    phase: str, show: Callable[[str], None], on_progress: OnProgress | None, left: TimeLeft = _unknown
) -> OnProgress:
    """Return a callback that shows all progress and passes on the progress of one phase.

    Args:
        phase: the phase.
        show: shows a text on the node.
        on_progress: takes the progress of the phase.
        left: see ``TimeLeft``.
    """

    said: set[str] = set()

    def progressed(progress: Progress, extra: dict[str, Tensor]) -> None:
        note = f" ({progress.note})" if progress.note else ""
        if progress.phase != phase:
            if progress.note and progress.note not in said:  # keepalives repeat it
                said.add(progress.note)
                logging.warning("Parallel DiT: %s", progress.note)
            if progress.phase in WAIT_TEXTS:
                ended = progress.phase in ("loading", PLANNING) and progress.value
                show((phase if ended else WAIT_TEXTS[progress.phase]) + note)
            return
        show(f"{phase} {progress.value}/{progress.total}{left(progress.value, progress.total)}{note}")
        # On an interrupt the call ends by itself; ComfyUI's progress bar would raise in the middle of it.
        if on_progress is not None and not comfy.model_management.processing_interrupted():
            on_progress(progress, extra)

    return progressed
