"""Every family with two LoRAs in every way of naming layers, and with every other kind of change, in every layout.

Each is compared with the same changes on ComfyUI's own model, in KSampler and Parallel Sampler in turn. Run it with
``bash scripts/test.sh --grid``.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import loras
from helpers.inside_fixtures import ksampler, parallel_sampler, relative_error
from natives import CASES, FIRST, HEAVY
from torch import Tensor

pytestmark = pytest.mark.grid
CLOSE = 1e-4
LAYOUTS = (
    "ulysses=1", "ulysses=2", "ulysses=3", "tensor=2", "ulysses=2 shard_weights", "pipe=2 patches=1", "cfg=2",
)  # fmt: skip
Changes = tuple[tuple[loras.Lora, float], ...]


def natively(name: str, *changes: tuple[loras.Lora, float]) -> Tensor:
    """Return what ComfyUI alone samples."""
    case = CASES[name]
    return ksampler(case.patch(loras.on_model(case.native(), *changes)), case.samples(), **loras.options_of(case))


def check(name: str, changes: Changes, load_case: Callable[..., Any], record: Callable[[str, object], None]) -> None:
    """Compare every layout with ComfyUI alone."""
    case, reference = CASES[name], natively(name, *changes)
    assert relative_error(natively(name), reference) > 100 * CLOSE
    errors = {}
    for i, text in enumerate(text for text in LAYOUTS if not (name in HEAVY and "pipe" in text)):
        model = load_case(name, ParallelLayout.parse(text), devices="0,1,2")
        sample = parallel_sampler if i % 2 else ksampler
        ours = sample(case.patch(loras.on_model(model, *changes)), case.samples(), **loras.options_of(case))
        errors[text] = relative_error(ours, reference)
    record("errors", errors)
    assert max(errors.values()) < CLOSE, errors


@pytest.mark.parametrize("name", FIRST)
def test_two_loras_in_every_dialect(
    name: str, load_case: Callable[..., Any], record_property: Callable[[str, object], None]
) -> None:
    native = CASES[name].native()
    dialects = sorted(loras.targets(native))
    for i, (first, second) in enumerate(pairwise([*dialects, dialects[0]])):
        changes = (
            (loras.plain(native, first, rank=4, seed=2 * i, alpha=3.0), 0.7),
            (loras.plain(native, second, rank=7, seed=2 * i + 1), -0.4),
        )
        check(name, changes, load_case, record_property)


@pytest.mark.parametrize("kind", loras.KINDS)
@pytest.mark.parametrize("name", FIRST)
def test_other_kinds_of_changes(
    name: str, kind: str, load_case: Callable[..., Any], record_property: Callable[[str, object], None]
) -> None:
    native = CASES[name].native()
    lora = loras.plain(native, "diffusion_model.", rank=3, seed=1)
    check(name, ((lora, 0.5), (loras.other(native, kind, seed=2), 0.8)), load_case, record_property)
