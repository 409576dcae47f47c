"""What compiled blocks save of a step, and whether they compute the same: ``bench compiled`` with one rank."""

import json
import sys

from lab.bench.compiled import HEADS, Case, measure
from lab.gpu_check.timing import device

SIDES = {"cuda": (64, 128), "cpu": (16,)}
"""Latent positions of a side. On the CPU, it shows that the measurement works and no more."""
WIDTH = {"cuda": HEADS, "cpu": 2}
ROUNDS = {"cuda": 15, "cpu": 1}


def main() -> int:
    """Print the figures as JSON, and fail if compiled blocks compute something else."""
    kind = device().type
    cases = [Case(family=family, side=side) for side in SIDES[kind] for family in ("flux", "wan")]
    steps = list(measure(cases, ROUNDS[kind], WIDTH[kind], "cuda:0" if kind == "cuda" else None))
    found = {
        step.case: {
            "seconds": step.seconds, "times as fast": step.ratio, "in the median": step.median,
            "seconds of the first step": step.first, "error": step.error,
        }
        for step in steps
    }  # fmt: skip
    print(json.dumps(found))
    return int(not all(step.same for step in steps))


if __name__ == "__main__":
    sys.exit(main())
