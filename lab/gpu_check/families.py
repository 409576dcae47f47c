"""Every family in every layout on two ranks: float32 against diffusers' forward, bfloat16 against one rank.

The ranks share the first GPU; without one they are CPU ranks.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lab.gpu_check.kept import Kept
from lab.gpu_check.two_ranks import two_ranks
from lab.verify.forward.cells import SmallModels
from lab.verify.forward.matrix import Cell
from parallel_backend.errors import BackendError
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.verify import examples, real
from parallel_backend.verify.full_float32 import disable_tf32
from parallel_backend.verify.run import Comparison, Verifier, forward_request, verifier

LAYOUTS = ("ulysses=2", "ring=2", "tensor=2", "ulysses=2 shard_weights", "pipe=2", "cfg=2")


Found = dict[str, tuple[float, float]]
"""The error and its limit, by dtype; nothing for an impossible layout."""


def main() -> int:
    """Print the largest errors as JSON, and fail if one is too large."""
    disable_tf32()
    devices, kept = two_ranks(), Kept()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder, verifier(devices) as checker:
        models = SmallModels(Path(folder), torch.device(devices.of_rank(0)))
        for cell in _cells():
            kept.find(str(cell), partial(_compare, models, cell, checker, devices))
    print(json.dumps(_largest(kept.found)))
    return int(any(not error <= limit for found in kept.found.values() for error, limit in found.values()))


def _cells() -> list[Cell]:
    """Return every family's first variant in every layout."""
    first = dict(reversed(list(examples.variants())))
    layouts = [ParallelLayout.parse(text) for text in LAYOUTS]
    classes = dict.fromkeys(class_name for class_name, _ in examples.variants())
    return [Cell(class_name=name, variant=first[name], layout=layout) for name in classes for layout in layouts]


def _largest(found: Mapping[str, Found]) -> dict[str, dict[str, float]]:
    """Return the largest errors by layout and dtype."""
    largest: dict[str, dict[str, float]] = {text: {"float32": 0.0, "bfloat16": 0.0} for text in LAYOUTS}
    for cell in _cells():
        for dtype, (error, _) in found[str(cell)].items():
            by_dtype = largest[str(cell.layout)]
            by_dtype[dtype] = max(by_dtype[dtype], error)
    return largest


def _compare(models: SmallModels, cell: Cell, checker: Verifier, devices: Devices) -> Found:
    comparison = models.comparison(cell)
    try:
        report = checker.compare(comparison)
        if report.skipped:
            print(f"left out: {report.cell}: {report.skipped}", flush=True)
            return {}
        if report.failed:
            print(f"{report.cell}: sent {report.bytes_sent_per_rank}, formula {report.bytes_formula_per_rank}")
        half = _in_half(comparison, checker, devices)
    except BackendError as reason:
        print(f"{comparison.title}: {reason}", flush=True)
        return {"float32": (float("inf"), 0.0)}
    single = float("inf") if report.failed else report.max_rel_error
    found = {"float32": (single, report.tolerance), "bfloat16": (half, real.tolerance(torch.bfloat16, blocks=64))}
    for dtype, (error, limit) in found.items():
        print(f"{comparison.title} in {dtype}: {error:.1e}, and {limit:.1e} passes", flush=True)
    return found


def _in_half(comparison: Comparison, checker: Verifier, devices: Devices) -> float:
    """Return the largest relative error of the layout in bfloat16 against one rank."""
    request = forward_request(comparison.model, "bfloat16", comparison.layout, devices, len(comparison.inputs))
    alone = replace(request, model=replace(request.model, layout=ParallelLayout()))
    tensors = examples.branches(comparison.inputs)
    one, two = (checker.client.call(message, tensors) for message in (alone, request))
    errors = []
    for branch in map(str, range(len(comparison.inputs))):
        expected = one[branch].float()
        errors.append(float((two[branch].float() - expected).norm() / expected.norm()))
    return max(errors)


if __name__ == "__main__":
    sys.exit(main())
