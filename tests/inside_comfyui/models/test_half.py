"""Weights in bfloat16: ComfyUI's own model against ours on a real backend."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers.inside_fixtures import ksampler, parallel_sampler, relative_error
from natives import CASES

CLOSE = 0.02
"""Rounding causes a third of it. A timestep or guidance rounded differently causes three times as much or more."""


@pytest.mark.parametrize("name", ["flux dev", "hunyuan_video t2v", "wan t2v"])
@pytest.mark.daily(1)
def test_sampling_in_bfloat16_equals_comfyui(
    name: str, load_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case, native = CASES[name], CASES[name].native(dtype=torch.bfloat16)
    options = {"positive": case.conditioning(1), "negative": case.conditioning(2), "cfg": 1.0, "steps": 2}
    reference = ksampler(native, case.samples(), **options)
    model = load_case(name, ParallelLayout(ulysses=2), dtype="bf16")
    for sample in (ksampler, parallel_sampler):
        assert relative_error(sample(model, case.samples(), **options), reference) < CLOSE
    forward = native.model.diffusion_model.forward

    def with_rounded_timestep(x: torch.Tensor, timestep: torch.Tensor, **call_args: Any) -> torch.Tensor:
        out: torch.Tensor = forward(x, timestep.bfloat16().float(), **call_args)
        return out

    monkeypatch.setattr(native.model.diffusion_model, "forward", with_rounded_timestep)
    assert relative_error(ksampler(native, case.samples(), **options), reference) > CLOSE
