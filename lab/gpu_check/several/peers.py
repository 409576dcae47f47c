"""A step on several GPUs against one, against diffusers and against the projects that are installed: ``bench``.

Without two GPUs, CPU ranks run a small shape, which shows that it works and no more.
"""

import json
import sys
from typing import Any

from lab.bench.ranks.cases import Case
from lab.bench.ranks.peers import chosen_peers
from lab.bench.step.run import Table, measure
from lab.gpu_check.several.ranks import all_cards
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import DType

CPU_RANKS = 2
TOKENS = {"cuda": (4096, 16384), "cpu": (256,)}
ROUNDS = {"cuda": 10, "cpu": 2}
DTYPE: dict[str, DType] = {"cuda": "bfloat16", "cpu": "float32"}
LIMIT = {"cuda": 0.1, "cpu": 1e-3}
"""Largest error of a prediction that passes, relative to the largest value."""


def main() -> int:
    """Print the figures as JSON, and fail if one of our layouts did not run or is wrong."""
    devices = all_cards(CPU_RANKS)
    layouts = [ParallelLayout(ulysses=2), ParallelLayout(ring=2)]
    if (ranks := len(devices.indices)) > 2:
        layouts += [ParallelLayout(ulysses=ranks), ParallelLayout(ring=ranks)]
    cases = [Case(family="flux", tokens=tokens, text_tokens=128, branches=1) for tokens in TOKENS[devices.kind]]
    found: dict[str, Any] = {"ranks": str(devices)}
    wrong: list[str] = []
    tables = measure(
        cases, layouts, devices, rounds=ROUNDS[devices.kind], peers=chosen_peers(everyone=True),
        log=lambda text: print(text, flush=True), dtype=DTYPE[devices.kind],
    )  # fmt: skip
    for table in tables:
        found |= {f"{table.case}: {name}": figures for name, figures in _figures(table).items()}
        right = {row.name for row in table.rows if row.max_rel_error <= LIMIT[devices.kind]}
        wrong += [f"{table.case}: {layout}" for layout in layouts if str(layout) not in right]
    print(json.dumps(found | ({"WRONG": ", ".join(wrong)} if wrong else {})))
    return int(bool(wrong))


def _figures(table: Table) -> dict[str, Any]:
    """Return the times of everyone who ran, and why the others did not."""
    found: dict[str, Any] = {}
    for row in table.rows:
        found[row.name] = {"ms": 1e3 * row.seconds, "x of one process": row.speedup, "error": row.max_rel_error}
        if row.against_best is not None:
            found[row.name]["x of the fastest peer"] = row.against_best
    return found | {name: f"left out: {why}" for name, why in table.left_out.items()}


if __name__ == "__main__":
    sys.exit(main())
