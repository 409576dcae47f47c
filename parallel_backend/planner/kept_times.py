"""What came of trying layouts: the times of steps, on disk and for the next requests."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from ..engine.layout_trial import Seconds
from ..engine.planned import Planned
from ..layout.parallel_layout import ParallelLayout
from ..protocol.model_spec import ModelSpec
from . import record
from .agreed import AgreedPlan
from .reasons import tried

log = logging.getLogger(__name__)

_KINDS = 16
"""Kinds of work of a plan whose times are kept on disk."""


class KeptTimes:
    """What has been tried of a plan, on rank 0's disk, beside what has been measured."""

    def __init__(self, made: AgreedPlan, model: ModelSpec, folder: Path, ranks: int) -> None:
        devices = model.devices.first(ranks)
        self._facts, self._hardware = record.facts_of(devices), made.hardware
        self._path = record.file_of(devices, made.prompt, folder, model.attention)
        guidance = f"{made.prompt.branches} branches of {made.prompt.samples}"
        self._kind = f"{guidance}, {model.stamp}"

    def times(self) -> dict[str, float | None]:
        """Return the seconds of a step by layout; None for one whose first step was the ranks' last."""
        return record.read(self._path, self._facts).tried.get(self._kind, {})

    def add(self, times: Mapping[str, float | None], works: str = "") -> None:
        """Keep seconds, beside those of other layouts and of other work.

        Args:
            works: a layout whose first step has ended.
        """
        found = record.read(self._path, self._facts)
        tried = found.tried
        before = tried.pop(self._kind, {})
        if before.get(works, 0) is None:
            del before[works]
        tried = dict([*tried.items()][1 - _KINDS :]) | {self._kind: {**before, **times}}
        if note := record.write(self._path, self._facts, found.hardware or self._hardware, tried):
            log.warning("%s", note)


class TrialNotes:
    """Keeps what comes of trials, on disk where there is a ``kept``. Reasons begin with ``words``."""

    def __init__(self, kept: KeptTimes | None, settled: Callable[[Planned], None], words: str) -> None:
        self._kept, self._settled, self._words = kept, settled, words
        self._trying = ""

    def note(self, seconds: Seconds, trying: ParallelLayout | None) -> None:
        """Keep the seconds, and that a layout is tried now: if the ranks end with it, it is not tried again."""
        works, self._trying = self._trying, "" if trying is None else str(trying)
        if self._kept:
            times: dict[str, float | None] = {str(layout): each for layout, each in seconds.items()}
            self._kept.add(times | ({self._trying: None} if self._trying else {}), works)

    def settle(self, layout: ParallelLayout, seconds: Seconds) -> str:
        """Take a layout from now on."""
        reason = f"{self._words}{tried(layout, seconds)}"
        self._settled(Planned(layout=layout, reason=reason))
        self.note(seconds, None)
        return reason
