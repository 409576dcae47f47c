"""Every family that ComfyUI has: its own model alone against our nodes on a real backend of two ranks."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from any_folder_name.parallel_backend.layout import ParallelLayout
from inside_fixtures import Loaded, ksampler, parallel_sampler, relative_error
from natives import CASES

CLOSE = 1e-4


@cache
def _native(name: str) -> Any:
    return CASES[name].native()


@pytest.fixture
def load_case(models: Path, load_remote: Callable[..., Loaded]) -> Callable[..., Any]:
    """The MODEL of a case's checkpoint under a layout."""

    def run(name: str, layout: ParallelLayout) -> Any:
        if not (models / name).exists():
            CASES[name].write(models / name, _native(name))
        return load_remote(layout, name=name).model

    return run


@pytest.mark.parametrize("name", CASES)
def test_sampling_equals_comfyui(name: str, load_case: Callable[..., Any]) -> None:
    case = CASES[name]
    if not case.known():
        pytest.skip("this version of ComfyUI does not know the family")
    latent = {"samples": torch.zeros(case.latent)}
    options = {"positive": case.conditioning(1), "negative": case.conditioning(2, shorter=3), "cfg": case.cfg}
    reference = ksampler(_native(name), latent, **options)
    for layout in [ParallelLayout(ulysses=2), *([ParallelLayout(cfg=2)] if case.cfg != 1.0 else [])]:
        model = load_case(name, layout)
        for sample in (ksampler, parallel_sampler):
            error = relative_error(sample(model, latent, **options), reference)
            assert error < CLOSE, f"{sample.__name__}, {layout}: {error:.1e}"
