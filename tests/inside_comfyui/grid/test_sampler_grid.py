"""Every sampler that KSampler lists, behind Parallel Sampler on two ranks, with models that predict flow, noise or v.

Layouts take turns over samplers. Where ComfyUI's own result depends on rounding, as that of ``dpm_adaptive``, which
chooses its steps by small differences, it says how far ours may be from it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import comfy.samplers
import pytest
import torch
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers.inside_fixtures import ksampler, native_case, parallel_sampler, relative_error
from helpers.sensitivity import CLOSE, limit
from natives import CASES, FIRST

pytestmark = pytest.mark.grid
STEPS = 5
FAMILIES = [name for name in FIRST if name.split()[0] in ("wan", "pixart", "cogvideox")]
NAMES = comfy.samplers.KSampler.SAMPLERS
LAYOUTS = ("ulysses=2", "data=2", "tensor=2", "pipe=2 patches=1", "ulysses=2 shard_weights", "ring=2")
FEATURES: dict[str, dict[str, Any]] = {
    "text": {}, "without guidance": {"cfg": 1.0}, "a mask": {"denoise": 0.6}, "a batch of 3": {},
}  # fmt: skip


def latent_of(name: str, feature: str) -> dict[str, Any]:
    """Return LATENT."""
    latent = CASES[name].samples()
    samples, random = latent["samples"], torch.Generator().manual_seed(11)
    if feature == "a batch of 3":
        return {**latent, "samples": samples[:1].repeat(3, *[1] * (samples.ndim - 1))}
    if feature == "a mask":
        mask = torch.rand(1, 1, *samples.shape[2:], generator=random)
        return {**latent, "samples": torch.randn(samples.shape, generator=random), "noise_mask": mask}
    return latent


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_sampler(name: str, feature: str, load_case: Callable[..., Any]) -> None:
    case, too_large = CASES[name], {}
    prompts = {"positive": case.conditioning(1), "negative": case.conditioning(2, shorter=case.shorter)}
    native, latent = case.patch(native_case(name)), latent_of(name, feature)
    for i, sampler in enumerate(NAMES):
        layout = LAYOUTS[(i + list(FEATURES).index(feature)) % len(LAYOUTS)]
        model = case.patch(load_case(name, ParallelLayout.parse(layout)))
        options = {"cfg": case.cfg, "steps": STEPS, "sampler_name": sampler, **prompts, **FEATURES[feature]}
        sample = partial(ksampler, latent=latent, **options)
        reference = sample(native)
        error = relative_error(parallel_sampler(model, latent, **options), reference)
        if not error < CLOSE and not error < limit(native, sample, reference):
            too_large[sampler] = f"{layout}: {error:.1e}"
    assert too_large == {}
