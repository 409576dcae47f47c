"""Weights in bfloat16: ComfyUI's own model against ours on a real backend."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers.inside_fixtures import ksampler, parallel_sampler, relative_error
from natives import CASES

CLOSE = 0.02
"""Rounding gives a third of it here, a timestep or a guidance that is rounded otherwise three times as much or more."""


@pytest.mark.parametrize("name", ["flux dev", "hunyuan_video t2v", "wan t2v"])
def test_sampling_in_bfloat16_equals_comfyui(
    name: str, load_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, half = CASES[name], CASES[name].native(dtype=torch.bfloat16)
    options = {"positive": case.conditioning(1), "negative": case.conditioning(2), "cfg": 1.0, "steps": 2}
    reference = ksampler(half, case.samples(), **options)
    model = load_case(name, ParallelLayout(ulysses=2), dtype="bf16")
    for sample in (ksampler, parallel_sampler):
        assert relative_error(sample(model, case.samples(), **options), reference) < CLOSE
    forward = half.model.diffusion_model.forward

    def rounding(x: torch.Tensor, timestep: torch.Tensor, **given: Any) -> torch.Tensor:
        out: torch.Tensor = forward(x, timestep.bfloat16().float(), **given)
        return out

    monkeypatch.setattr(half.model.diffusion_model, "forward", rounding)
    assert relative_error(ksampler(half, case.samples(), **options), reference) > CLOSE
