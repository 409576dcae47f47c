"""Every family that ComfyUI has: ComfyUI's own model against our nodes on a real backend of two ranks."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_folder_name.nodes.bridges.bridge import meta_module
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from comfy.ldm.flux.model import Flux
from comfy.model_detection import detect_unet_config
from helpers.inside_fixtures import ksampler, native_case, parallel_sampler, relative_error
from helpers.layout_cover import EACH, STRATEGIES, layouts
from natives import CASES, FIRST, HEAVY, wan

CLOSE = 1e-4
NAMES = [pytest.param(name, marks=pytest.mark.newest if name in HEAVY or name not in FIRST else ()) for name in CASES]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.daily(21)
def test_bridge_gives_the_unet_config(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.describe(tmp_path, case.config)
    assert bridge_for(open_checkpoint(tmp_path)).unet_config() == dict(case.unet)


def detect(weights: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return what ComfyUI finds in weights, without what newer versions find to be absent."""
    found: dict[str, Any] = detect_unet_config(weights, prefix)
    return {key: value for key, value in found.items() if (key, value) != ("use_keyframes_abs_pos_embedding", False)}


@pytest.mark.parametrize("name", NAMES)
def test_comfyui_detects_the_same(name: str) -> None:
    case = CASES[name]
    weights = native_case(name).model.diffusion_model.state_dict()
    detected = detect({f"some.prefix.{key}": tensor for key, tensor in weights.items()}, "some.prefix.")
    ours, comfyuis = ({k: v for k, v in config.items() if k not in case.fixed} for config in (case.unet, detected))
    assert ours == comfyuis
    assert case.fixed <= case.unet.keys()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.daily(21)
def test_comfyui_detects_the_same_at_full_size(name: str, tmp_path: Path) -> None:
    CASES[name].describe(tmp_path, CASES[name].published)
    bridge = bridge_for(open_checkpoint(tmp_path))
    unet_config = bridge.unet_config()
    detected = detect(dict(meta_module(bridge.native_class, unet_config).state_dict()), "")
    assert detected == {key: unet_config[key] for key in detected}
    assert unet_config.keys() - detected.keys() <= CASES[name].fixed


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.every_case
def test_sampling_equals_comfyui(name: str, load_case: Callable[..., Any]) -> None:
    case = CASES[name]
    latent = case.samples()
    options = {
        "positive": case.conditioning(1),
        "negative": case.conditioning(2, shorter=case.shorter),
        "cfg": case.cfg,
    }
    reference = ksampler(case.patch(native_case(name)), latent, **options)
    for sample, layout in zip((ksampler, parallel_sampler), layouts(name), strict=True):
        model = case.patch(load_case(name, layout))
        error = relative_error(sample(model, latent, **options), reference)
        assert error < CLOSE, f"{sample.__name__}, {layout}: {error:.1e}"


def test_every_strategy_runs_with_some_family() -> None:
    every_version_runs = [name for name in FIRST if name not in HEAVY]
    assert {str(layout) for name in every_version_runs for layout in layouts(name)} == set(map(str, STRATEGIES))


@pytest.mark.parametrize("sampler", range(EACH))
def test_both_samplers_meet_every_strategy_in_some_version(sampler: int) -> None:
    met = {layouts(name, newest=newest)[sampler] for name in FIRST for newest in (False, True)}
    assert met == set(STRATEGIES)


@pytest.mark.parametrize("name", CASES)
def test_the_newest_comfyui_runs_other_strategies_than_older_ones(name: str) -> None:
    assert len({*layouts(name, newest=False), *layouts(name, newest=True)}) == 2 * EACH


@pytest.mark.parametrize("name", ["flux kontext", "qwen_image edit"])
def test_prompts_may_place_their_references_differently(name: str, load_case: Callable[..., Any]) -> None:
    case = CASES[name]
    ((text, extra),) = case.conditioning(2)
    negative = [[text, {**extra, "reference_latents_method": "offset" if "qwen" in name else "index"}]]
    options = {"positive": case.conditioning(1), "negative": negative, "cfg": case.cfg}
    reference = ksampler(native_case(name), case.samples(), **options)
    same_method = ksampler(native_case(name), case.samples(), **{**options, "negative": case.conditioning(2)})
    assert relative_error(same_method, reference) > 100 * CLOSE
    for sample in (ksampler, parallel_sampler):
        ours = sample(load_case(name, ParallelLayout(ulysses=2)), case.samples(), **options)
        assert relative_error(ours, reference) < CLOSE


FLUX_HAS_TIMESTEP_ZERO = "timestep_zero_index" in inspect.signature(Flux.forward_orig).parameters
"""Whether this version of ComfyUI can give reference images a timestep of 0; the others place them by ``offset``."""
FLUX_TIMESTEP_ZERO = ("flux kontext", {"reference_latents_method": "index_timestep_zero"}, "takes offset, index or uxo")
REFUSED = [
    ("flux dev", {"guidance": None}, "remove FluxDisableGuidance"),
    ("chroma guided", {"guidance": None}, "remove FluxDisableGuidance"),
    ("chroma guided", {"reference_latents": [torch.zeros(1, 16, 7, 5)]}, "reference_latents"),
    ("hunyuan_video t2v", {"guidance": None}, "remove FluxDisableGuidance"),
    ("flux2 dev", {"concat_latent_image": torch.zeros(1, 128, 7, 5)}, "concat_latent_image"),
    *([FLUX_TIMESTEP_ZERO] if FLUX_HAS_TIMESTEP_ZERO else []),
    ("qwen_image edit", {"reference_latents_method": "index_timestep_zero"}, "takes any but index_timestep_zero"),
    ("qwen_image edit 2511", {"reference_latents_method": "index"}, "takes index_timestep_zero"),
    ("wan t2v", {"reference_latents": [torch.zeros(1, 16, 1, 7, 5)]}, "reference_latents"),
    ("wan flf2v 2.1", {"clip_vision_output": wan.clip_vision(torch.zeros(1, 771, 1280))}, "no more than two"),
    ("z_image image", {"attention_mask": torch.arange(11)[None] < 9}, "attention_mask"),
]


@pytest.mark.parametrize(("name", "extra", "message"), REFUSED)
@pytest.mark.daily(4)
def test_unsupported_conditioning_is_refused(
    name: str, extra: dict[str, Any], message: str, load_case: Callable[..., Any]
) -> None:
    ((text, supported),) = CASES[name].conditioning(1)
    prompt = [[text, {**supported, **extra}]]
    for sample in (ksampler, parallel_sampler):
        with pytest.raises(InvalidRequest, match=message):
            sample(load_case(name, ParallelLayout()), CASES[name].samples(), positive=prompt, negative=prompt, cfg=1.0)
