"""A probe of one or two GPUs, and what the planner predicts from it beside what is measured: ``plan measured``.

Without a GPU, two CPU ranks measure a small shape, which shows that it works and no more.
"""

import json
import sys

import torch

from lab.bench.ranks.cases import Case
from lab.planner.cells import timed
from lab.planner.machines import Machine
from parallel_backend.client.devices import parse_devices
from parallel_backend.protocol.model_spec import Devices

TOKENS = {"cuda": 4096, "cpu": 64}
ROUNDS = {"cuda": 5, "cpu": 1}


def main() -> int:
    """Print the figures as JSON."""
    here = parse_devices("all") if torch.cuda.is_available() else Devices(kind="cpu", indices=(0, 1))
    devices = here.first(min(2, len(here.indices)))  # more have too many layouts for the time of a part
    case = Case(family="flux", tokens=TOKENS[devices.kind], text_tokens=64, branches=1)
    found = timed(case, devices, Machine(), guided=False, rounds=ROUNDS[devices.kind])
    figures: dict[str, object] = {
        cell.layout: {"ms predicted": 1e3 * cell.predicted, "ms measured": 1e3 * cell.measured, "error": cell.error}
        for cell in found.cells
    }
    figures |= {
        "seconds of a probe": found.probing, "the planner takes": found.chosen, "when it has tried": found.settled,
        "without a plan": found.rule,
    }  # fmt: skip
    print(json.dumps({"ranks": str(devices)} | figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
