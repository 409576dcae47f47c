"""Every sampler that KSampler lists, behind Parallel Sampler on two ranks, against KSampler on ComfyUI's own model."""

import time
from collections.abc import Callable
from typing import Any

import comfy.samplers
import pytest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, parallel_sampler, relative_error


@pytest.mark.parametrize("steps", [2, 3, 8])
def test_all(native: Any, load_remote: Callable[..., Loaded], steps: int) -> None:
    model = load_remote(ParallelLayout(ulysses=2)).model
    parallel_sampler(model, empty_latent(), steps=1)
    for name in comfy.samplers.KSampler.SAMPLERS:
        t0 = time.time()
        ref = ksampler(native, empty_latent(), sampler_name=name, steps=steps)
        t1 = time.time()
        ours = parallel_sampler(model, empty_latent(), sampler_name=name, steps=steps)
        t2 = time.time()
        print(f"RESULT {steps} {name:28s} {relative_error(ours, ref):.1e} native {t1-t0:.2f} ours {t2-t1:.2f} std {ref.std():.2f}")
