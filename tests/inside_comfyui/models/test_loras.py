"""LoRAs on a parallel MODEL against the same LoRAs on ComfyUI's own."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import comfy.sd
import pytest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import loras
from helpers.inside_fixtures import ksampler, parallel_sampler, relative_error
from natives import CASES, FIRST

CLOSE = 1e-4
LAYOUTS = ("ulysses=2", "tensor=2", "ulysses=2 shard_weights", "pipe=2 patches=1", "cfg=2")
NAMES = [name for name in FIRST if not name.startswith("mochi")]


def with_loras(model: Any, *changes: tuple[loras.Lora, float]) -> Any:
    """Return a MODEL behind LoraLoaders."""
    for lora, strength in changes:
        model, _ = comfy.sd.load_lora_for_models(model, None, dict(lora), strength, 0.0)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_two_loras_in_every_dialect_equal_comfyui(name: str, load_case: Callable[..., Any]) -> None:
    case = CASES[name]
    native = case.native()  # ComfyUI changes its weights in place
    dialects = sorted(loras.targets(native))
    latent = case.samples()
    options = {
        "positive": case.conditioning(1),
        "negative": case.conditioning(2, shorter=case.shorter),
        "cfg": case.cfg,
    }
    unchanged = ksampler(case.patch(native), latent, **options)
    for i, (first, second) in enumerate(pairwise([*dialects, dialects[0]])):
        changes = (
            (loras.plain(native, first, rank=4, seed=2 * i, alpha=3.0), 0.7),
            (loras.plain(native, second, rank=7, seed=2 * i + 1), -0.4),
        )
        reference = ksampler(case.patch(with_loras(native, *changes)), latent, **options)
        assert relative_error(unchanged, reference) > 100 * CLOSE
        layout = ParallelLayout.parse(LAYOUTS[(i + NAMES.index(name)) % len(LAYOUTS)])
        sample = parallel_sampler if i % 2 else ksampler
        model = case.patch(with_loras(load_case(name, layout), *changes))
        error = relative_error(sample(model, latent, **options), reference)
        assert error < CLOSE, f"{first} and {second}, {layout}: {error:.1e}"
