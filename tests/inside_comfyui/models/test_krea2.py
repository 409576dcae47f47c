"""Krea-2 beyond what all families have: versions of ComfyUI without it, its references, its text, its modulation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.supported_models
import pytest
import torch
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers.inside_fixtures import ksampler, native_case, parallel_sampler, relative_error
from natives import CASES, krea2

CLOSE = 1e-4
NAME, REFERENCES = "krea2 image", "krea2 references"
SAMPLERS = (ksampler, parallel_sampler)
with_class = pytest.mark.skipif(NAME not in CASES, reason="this version of ComfyUI has no Krea-2")
with_references = pytest.mark.skipif(REFERENCES not in CASES, reason="this version's Krea-2 has no references")


def test_a_comfyui_without_the_class_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(comfy.supported_models, "Krea2", raising=False)
    krea2.CASES["image"].describe(tmp_path, krea2.CONFIG)
    with pytest.raises(
        InvalidRequest, match=r"this version of ComfyUI has no Krea-2; ComfyUI 0.27.0 and newer have it"
    ):
        bridge_for(open_checkpoint(tmp_path))


@with_class
@pytest.mark.skipif(REFERENCES in CASES, reason="this version's Krea-2 has references")
def test_references_are_refused_where_comfyuis_class_drops_them(load_case: Callable[..., Any]) -> None:
    ((text, _),) = CASES[NAME].conditioning(1)
    prompt = [[text, {"reference_latents": [torch.zeros(1, 16, 1, 6, 4)]}]]
    for sample in SAMPLERS:
        with pytest.raises(InvalidRequest, match="conditioning with reference_latents is not supported"):
            sample(load_case(NAME, ParallelLayout()), CASES[NAME].samples(), positive=prompt, negative=prompt)


@with_references
def test_prompts_may_have_unlike_references(load_case: Callable[..., Any]) -> None:
    case = CASES[REFERENCES]
    ((text, extra),) = case.conditioning(2, shorter=3)
    first = extra["reference_latents"][:1]
    others = {
        "at timestep 0": {**extra, "reference_latents_method": "index_timestep_zero"},
        "fewer": {**extra, "reference_latents": first},
        "none": {},
    }
    results = {}
    for name, entries in others.items():
        options = {"positive": case.conditioning(1), "negative": [[text, entries]], "cfg": case.cfg}
        results[name] = ksampler(native_case(REFERENCES), case.samples(), **options)
        for sample in SAMPLERS:
            ours = sample(load_case(REFERENCES, ParallelLayout(ulysses=2)), case.samples(), **options)
            assert relative_error(ours, results[name]) < CLOSE, (name, sample.__name__)
    for one, other in (("at timestep 0", "fewer"), ("fewer", "none"), ("at timestep 0", "none")):
        assert relative_error(results[one], results[other]) > 100 * CLOSE


@with_class
def test_the_text_of_another_encoder_is_refused(load_case: Callable[..., Any]) -> None:
    prompt = [[torch.zeros(1, 11, 80), {}]]
    for sample in SAMPLERS:
        with pytest.raises(InvalidRequest, match=r"has 80 features, and .* takes 120, .* Load CLIP of type krea2"):
            sample(load_case(NAME, ParallelLayout()), CASES[NAME].samples(), positive=prompt, negative=prompt)


@with_class
def test_changes_of_flat_weights_equal_comfyuis(load_case: Callable[..., Any]) -> None:
    case, generator = CASES[NAME], torch.Generator().manual_seed(5)
    lora = {
        "diffusion_model.blocks.1.mod.lin.diff": torch.randn(6 * 768, generator=generator) * 0.3,
        "diffusion_model.last.modulation.lin.diff": torch.randn(2, 768, generator=generator) * 0.3,
        "diffusion_model.txtfusion.projector.diff": torch.randn(1, 3, generator=generator),
    }
    options = {"positive": case.conditioning(1), "negative": case.conditioning(2, shorter=3), "cfg": case.cfg}

    def changed(model: Any, strength: float) -> Any:
        return comfy.sd.load_lora_for_models(model, None, lora, strength, 0)[0]

    native = native_case(NAME)
    plain, reference = (ksampler(changed(native, strength), case.samples(), **options) for strength in (0.0, 0.8))
    assert relative_error(plain, reference) > 100 * CLOSE
    for layout in ("ulysses=2", "tensor=2", "ulysses=2 shard_weights"):
        model = load_case(NAME, ParallelLayout.parse(layout))
        for strength, wanted in ((0.8, reference), (0.0, plain)):
            assert relative_error(ksampler(changed(model, strength), case.samples(), **options), wanted) < CLOSE
