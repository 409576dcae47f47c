"""How much of an exchange's time passes under computation: ring, shard_weights and pipe, on all GPUs.

The computation alone, the exchange alone and both together take turns in one run. Without two GPUs, CPU ranks run
small shapes, which shows that it works and no more: a core that exchanges does not compute.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.gpu_check.several.overlap_rank import WorkRequest
from lab.gpu_check.several.overlap_work import WORKS
from lab.gpu_check.several.ranks import Ranks, all_cards
from parallel_backend.errors import BackendError

CPU_RANKS = 2
SECONDS = 120.0
"""Seconds that one kind of work may take."""


def main() -> int:
    """Print the figures as JSON, and fail if a measurement does."""
    devices, failed = all_cards(CPU_RANKS), False
    found: dict[str, Any] = {"ranks": str(devices)}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        output = Path(folder) / "seconds.json"
        ranks = Ranks("lab.gpu_check.several.overlap_rank", devices, Path(folder))
        try:
            for name in WORKS:
                try:
                    ranks.run(WorkRequest(name=name, output=str(output)), SECONDS)
                except BackendError as error:
                    found[name], failed = str(error), True
                else:
                    found[name] = figures(**json.loads(output.read_text(encoding="utf-8")))
        finally:
            ranks.close()
    print(json.dumps(found))
    return int(failed)


def figures(*, share: float, busy: float, seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the medians in milliseconds and the hidden part of the exchange.

    Args:
        share: the part of the exchange that could pass under computation.
        busy: the part of the computation under which it could.
        seconds: by round, of ``both``, ``compute`` and ``exchange``.
    """
    both, compute, exchange = (statistics.median(seconds[name]) for name in ("both", "compute", "exchange"))
    rounds = zip(seconds["both"], seconds["compute"], seconds["exchange"], strict=True)
    return {
        "ms together": 1e3 * both,
        "ms of computation alone": 1e3 * compute,
        "ms of exchange alone": 1e3 * exchange,
        "hidden part of the exchange": statistics.median((b + c - a) / c for a, b, c in rounds),
        "what could be hidden": min(share, busy * compute / exchange),
    }


if __name__ == "__main__":
    sys.exit(main())
