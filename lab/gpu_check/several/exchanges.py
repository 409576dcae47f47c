"""Every kind of exchange on every axis of every layout: over NCCL on all GPUs and over gloo, with the right values.

Without two GPUs, CPU ranks exchange over gloo.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from lab.gpu_check.kept import Kept
from lab.gpu_check.several.exchanges_rank import LayoutRequest
from lab.gpu_check.several.ranks import Ranks, all_cards
from parallel_backend.errors import BackendError, InvalidRequest
from parallel_backend.layout.parallel_layout import AXES, ParallelLayout

CPU_RANKS = 4
SECONDS = 120.0
"""Seconds that one layout may take."""


def main() -> int:
    """Print wrong results as JSON, and fail if there are any."""
    devices, kept = all_cards(CPU_RANKS), Kept()
    wrong: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        ranks = Ranks("lab.gpu_check.several.exchanges_rank", devices, Path(folder))
        try:
            for layout in layouts(len(devices.indices)):
                outcome = kept.find(str(layout), partial(_outcome, ranks, layout))
                print(f"{layout}: {outcome}", flush=True)
                wrong |= {str(layout): outcome} if outcome != "right" else {}
        finally:
            ranks.close()
    how = "NCCL and gloo" if devices.kind == "cuda" else "gloo"
    print(json.dumps({f"layouts on {devices} over {how}": len(kept.found), "wrong": len(wrong)} | wrong))
    return int(bool(wrong))


def _outcome(ranks: Ranks, layout: ParallelLayout) -> str:
    try:
        ranks.run(LayoutRequest(layout=str(layout)), SECONDS)
    except BackendError as error:
        ranks.close()  # a GPU or a group may be unusable afterwards; the next layout gets new processes
        return str(error)
    return "right"


def layouts(ranks: int) -> list[ParallelLayout]:
    """Return every layout of ``ranks`` ranks, with single axes first, and a layout that leaves a rank idle."""
    axes = tuple(axis for axis in AXES if axis != "dsp")  # tokens of the model attend to all frames
    found = [layout for degrees in _degrees(ranks, axes) for layout in _variants(degrees)]
    found.sort(key=lambda layout: sum(degree > 1 for degree in layout.degrees.values()))
    idle = [ParallelLayout(ulysses=ranks - 1)] if ranks > 2 else []
    return [*idle, *found]


def _degrees(ranks: int, axes: tuple[str, ...]) -> Iterator[dict[str, int]]:
    """Yield every way to give ``axes`` degrees whose product is ``ranks``."""
    if not axes:
        yield from [{}] if ranks == 1 else []
        return
    for degree in (each for each in range(1, ranks + 1) if ranks % each == 0):
        for rest in _degrees(ranks // degree, axes[1:]):
            yield {axes[0]: degree, **rest}


def _variants(degrees: dict[str, int]) -> Iterator[ParallelLayout]:
    """Yield the layouts with these degrees: plain, with sharded weights, with keys and values of the last step."""
    for shard_weights, stale in ((False, ""), (True, ""), (False, "previous")):
        try:
            plain = ParallelLayout(**degrees)  # type: ignore[arg-type]
            yield replace(plain, shard_weights=shard_weights, stale=stale)
        except InvalidRequest:  # not all axes can be combined
            continue


if __name__ == "__main__":
    sys.exit(main())
