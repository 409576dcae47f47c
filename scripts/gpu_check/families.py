"""Every family in every layout on two ranks: float32 against diffusers' forward, bfloat16 against one rank.

The ranks share the first GPU; without one they are CPU ranks.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from parallel_backend.errors import BackendError
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.verify.forward import examples, real
from parallel_backend.verify.forward.cells import SmallModels
from parallel_backend.verify.forward.matrix import Cell
from parallel_backend.verify.forward.run import Comparison, Verifier, forward_request, verifier
from parallel_backend.verify.full_float32 import disable_tf32
from scripts.gpu_check.two_ranks import two_ranks

LAYOUTS = ("ulysses=2", "ring=2", "tensor=2", "ulysses=2 shard_weights", "pipe=2", "cfg=2")


def main() -> int:
    """Print the largest errors as JSON, and fail if one is too large."""
    disable_tf32()
    devices, wrong = two_ranks(), 0
    largest: dict[str, dict[str, float]] = {text: {"float32": 0.0, "bfloat16": 0.0} for text in LAYOUTS}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder, verifier(devices) as checker:
        models = SmallModels(Path(folder), torch.device(devices.of_rank(0)))
        for class_name in dict.fromkeys(name for name, _ in examples.variants()):
            variant = next(name for each, name in examples.variants() if each == class_name)
            for text in LAYOUTS:
                cell = Cell(class_name=class_name, variant=variant, layout=ParallelLayout.parse(text))
                errors = _errors(models.comparison(cell), checker, devices)
                for dtype, (error, limit) in errors.items():
                    largest[text][dtype] = max(largest[text][dtype], error)
                    if not error <= limit:
                        print(f"{cell} in {dtype}: {error:.1e}, and {limit:.1e} would pass", flush=True)
                        wrong += 1
    print(json.dumps(largest))
    return int(wrong > 0)


def _errors(comparison: Comparison, checker: Verifier, devices: Devices) -> dict[str, tuple[float, float]]:
    """Return the error and the largest one that passes, by dtype; nothing for a layout that cannot be."""
    try:
        report = checker.compare(comparison)
        if report.skipped:
            print(f"left out: {report.cell}: {report.skipped}", flush=True)
            return {}
        if report.failed:
            print(f"{report.cell}: sent {report.bytes_sent_per_rank}, formula {report.bytes_formula_per_rank}")
        half = _in_half(comparison, checker, devices)
    except BackendError as error:
        print(f"{comparison.title}: {error}", flush=True)
        return {"float32": (float("inf"), 0.0)}
    single = float("inf") if report.failed else report.max_rel_error
    return {"float32": (single, report.tolerance), "bfloat16": (half, real.tolerance(torch.bfloat16, blocks=64))}


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
