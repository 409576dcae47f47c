"""Conditioning that workflows may have besides a prompt: ComfyUI alone against our nodes on a real backend."""

from collections.abc import Callable
from typing import Any

import pytest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers.inside_fixtures import ksampler, native_case, parallel_sampler, relative_error
from natives import CASES
from natives.case import seeded
from natives.wan import clip_vision

import nodes as core_nodes

CLOSE = 1e-4
FAR = 1e-2
Extra = dict[str, Any]


def _unchanged(extra: Extra) -> Extra:
    return extra


def _one_image(extra: Extra) -> Extra:
    return {**extra, "clip_vision_output": clip_vision(seeded(7)(1, 257, 1280))}


def _no_guidance_node(extra: Extra) -> Extra:
    return {name: value for name, value in extra.items() if name != "guidance"}


OTHER = {
    "a text of more than 512 tokens": ("wan i2v 2.1", 600, _unchanged),
    "a text of fewer": ("wan i2v 2.1", 11, _unchanged),
    "first image only": ("wan flf2v 2.1", 512, _one_image),
    "a pair in a model for one image": ("wan i2v 2.1", 512, lambda extra: CASES["wan flf2v 2.1"].extra(seeded(7))),
    "default guidance": ("flux dev", 11, _no_guidance_node),
    "default guidance, HunyuanVideo": ("hunyuan_video t2v", 11, _no_guidance_node),
}


@pytest.mark.parametrize(("name", "tokens", "changed"), OTHER.values(), ids=OTHER.keys())
def test_sampling_equals_comfyui(
    name: str, tokens: int, changed: Callable[[Extra], Extra], load_case: Callable[..., Any]
) -> None:
    case = CASES[name]
    ((_, extra),) = case.conditioning(1)
    text = seeded(4)(1, tokens, case.text[1])
    options = {"positive": [[text, changed(extra)]], "negative": case.conditioning(2), "steps": 1}
    reference = ksampler(native_case(name), case.samples(), **options)
    usual = ksampler(native_case(name), case.samples(), **{**options, "positive": case.conditioning(1)})
    assert relative_error(usual, reference) > FAR
    model = load_case(name, ParallelLayout(ulysses=2))
    for sample in (ksampler, parallel_sampler):
        assert relative_error(sample(model, case.samples(), **options), reference) < CLOSE


def test_a_clip_vision_output_is_ignored_without_an_embedder_as_in_comfyui(load_case: Callable[..., Any]) -> None:
    case = CASES["wan i2v 2.2"]
    ((text, extra),) = case.conditioning(1)
    options = {"positive": [[text, _one_image(extra)]], "negative": case.conditioning(2), "steps": 1}
    reference = ksampler(native_case("wan i2v 2.2"), case.samples(), **options)
    plain = ksampler(native_case("wan i2v 2.2"), case.samples(), **{**options, "positive": case.conditioning(1)})
    assert relative_error(plain, reference) < CLOSE
    model = load_case("wan i2v 2.2", ParallelLayout(ulysses=2))
    for sample in (ksampler, parallel_sampler):
        assert relative_error(sample(model, case.samples(), **options), reference) < CLOSE


def several(name: str) -> list[Any]:
    """Return a conditioning of three prompts: for the whole image, for a part of it, and for the first steps."""
    whole, part, early = (CASES[name].conditioning(seed, shorter=seed) for seed in (1, 4, 5))
    (part,) = core_nodes.ConditioningSetArea().append(part, 24, 40, 8, 0, 0.7)
    (early,) = core_nodes.ConditioningSetTimestepRange().set_range(early, 0.0, 0.5)
    (two,) = core_nodes.ConditioningCombine().combine(whole, part)
    (three,) = core_nodes.ConditioningCombine().combine(two, early)
    return list(three)


@pytest.mark.parametrize("name", ["sd3 medium", "wan t2v"])
def test_several_prompts_equal_comfyui(name: str, load_case: Callable[..., Any]) -> None:
    options = {"positive": several(name), "negative": CASES[name].conditioning(2), "steps": 2}
    latent = CASES[name].samples()
    assert len(latent["samples"]) == 2
    reference = ksampler(native_case(name), latent, **options)
    for fewer in (slice(0, 2), slice(0, 3, 2), slice(1, 3)):
        without = ksampler(native_case(name), latent, **{**options, "positive": options["positive"][fewer]})
        assert relative_error(without, reference) > FAR
    for layout in (ParallelLayout(ulysses=2), ParallelLayout(cfg=2), ParallelLayout(data=2)):
        assert relative_error(ksampler(load_case(name, layout), latent, **options), reference) < CLOSE


@pytest.mark.parametrize("name", ["hunyuan_video i2v replace", "hunyuan_video i2v replace without guidance"])
def test_a_given_first_frame_that_no_mask_keeps_equals_comfyui(name: str, load_case: Callable[..., Any]) -> None:
    """As does one of which nodes compare all frames, such as APG."""
    case = CASES[name]
    latent = {"samples": seeded(3)(1, *case.latent[1:])}
    options = {"positive": case.conditioning(1), "negative": case.conditioning(2), "steps": 2, "cfg": 1.0}
    reference = ksampler(native_case(name), latent, **options)
    assert relative_error(ksampler(native_case(name), case.samples(), **options), reference) > FAR
    for layout in (ParallelLayout(ulysses=2), ParallelLayout(pipe=2, patches=1)):
        for sample in (ksampler, parallel_sampler):
            assert relative_error(sample(load_case(name, layout), latent, **options), reference) < CLOSE
