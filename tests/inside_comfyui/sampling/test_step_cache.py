"""Parallel Cache: the same forecasts in both loops, said and labelled, and refused where they would be wrong."""

import logging
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from any_folder_name.nodes import picture_metadata
from any_folder_name.nodes.cache import ParallelCache
from any_folder_name.nodes.remote.step_cache import OPTION, CacheChoice
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.step_cache.settings import StepCache
from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode
from helpers.freeing_client import FreeingClient
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, parallel_sampler, relative_error

CLOSE, FAR = 1e-4, 1e-6
CUSTOM = {"mode": "custom", "interval": 2, "order": 1, "warmup": 2, "first": 0, "final": 1}


def cached(model: Any, **inputs: Any) -> Any:
    return ParallelCache.execute(model, **(CUSTOM | inputs)).args[0]


def steps(backend: FreeingClient) -> int:
    """How many forwards the first rank has computed."""
    return backend.settled().ranks[0].steps


@pytest.mark.parametrize("sampler_name", ["euler", "heun", "dpmpp_2m"])
@pytest.mark.daily(1)
def test_both_loops_forecast_the_same(
    load_remote: Callable[..., Loaded], backend: FreeingClient, sampler_name: str
) -> None:
    model, latent = load_remote(ParallelLayout(ulysses=2)).model, empty_latent(batch=2)
    exact = ksampler(model, latent, steps=8, sampler_name=sampler_name)
    before = steps(backend)
    native = ksampler(cached(model), latent, steps=8, sampler_name=sampler_name)
    between = steps(backend)
    ours = parallel_sampler(cached(model), latent, steps=8, sampler_name=sampler_name)
    assert relative_error(native, ours) < CLOSE
    assert relative_error(native, exact) > FAR
    assert steps(backend) - between == between - before
    if sampler_name == "euler":
        assert between - before == 5
    again = ksampler(cached(model), latent, steps=8, sampler_name=sampler_name)
    assert relative_error(again, native) < CLOSE


def test_it_can_be_switched_off(load_remote: Callable[..., Loaded]) -> None:
    model = load_remote(ParallelLayout(ulysses=2)).model
    off = cached(cached(model), mode="off")
    assert OPTION not in off.model_options["transformer_options"]
    assert torch.equal(ksampler(off, empty_latent(), steps=6), ksampler(model, empty_latent(), steps=6))


def test_a_short_sampling_says_that_all_steps_are_computed(
    load_remote: Callable[..., Loaded], caplog: pytest.LogCaptureFixture
) -> None:
    model, latent = load_remote(ParallelLayout(ulysses=2)).model, empty_latent()
    caplog.set_level(logging.INFO)
    assert torch.equal(ksampler(cached(model, mode="safe"), latent, steps=4), ksampler(model, latent, steps=4))
    assert "all 4 steps are computed: so few, as of a distilled model" in caplog.text
    ksampler(cached(model, mode="safe"), latent, steps=12)
    assert "5 of 12 model calls were forecast (42 %): the result is approximate" in caplog.text


@pytest.mark.parametrize("node", [EasyCacheNode, LazyCacheNode])
def test_comfyui_s_own_caches_are_refused_beside_it(loaded: Loaded, node: Any) -> None:
    theirs = {"reuse_threshold": 0.2, "start_percent": 0.1, "end_percent": 0.9, "verbose": False}
    with pytest.raises(InvalidRequest, match=f"^{node.__name__.removesuffix('Node')} and Parallel Cache would both"):
        cached(node.execute(loaded.model, **theirs).args[0])
    with pytest.raises(InvalidRequest, match="would both skip steps of this MODEL: remove one of the two"):
        ksampler(node.execute(cached(loaded.model), **theirs).args[0], empty_latent())


def in_windows(model: Any) -> None:
    model.model_options["context_handler"] = object()


def in_tiles(model: Any) -> None:
    model.set_model_unet_function_wrapper(lambda apply, args: apply(args["input"], args["timestep"], **args["c"]))


@pytest.mark.parametrize("change", [in_windows, in_tiles])
def test_nodes_that_call_the_model_for_parts_of_the_latent_are_refused(loaded: Loaded, change: Any) -> None:
    model = cached(loaded.model)
    change(model)
    with pytest.raises(InvalidRequest, match="Parallel Cache cannot tell the calls of a node apart"):
        ksampler(model, empty_latent())


def test_what_cannot_work_is_refused_by_the_node(native: Any, loaded: Loaded) -> None:
    with pytest.raises(InvalidRequest, match="needs the MODEL of Parallel Loader or Parallel Model"):
        cached(native)
    with pytest.raises(InvalidRequest, match="mode 'faster' does not exist: off, safe, fast, custom do"):
        cached(loaded.model, mode="faster")
    with pytest.raises(InvalidRequest, match="step cache order=3: 0 to 2 works"):
        cached(loaded.model, order=3)


def test_pipefusion_with_a_cache_is_refused_and_native_stages_are_not(load_remote: Callable[..., Loaded]) -> None:
    model = cached(load_remote(ParallelLayout(pipe=2)).model)
    with pytest.raises(InvalidRequest, match=r"\(PipeFusion\) in the backend's step loop: switch the cache off"):
        parallel_sampler(model, empty_latent(), steps=6)
    exact = ksampler(cached(load_remote(ParallelLayout(ulysses=2)).model), empty_latent(), steps=6)
    assert relative_error(ksampler(model, empty_latent(), steps=6), exact) < CLOSE


def test_a_label_reaches_the_metadata_of_the_running_prompt() -> None:
    def labelling(extra_data: dict[str, Any]) -> None:
        picture_metadata.label_running_prompt("3", {"approximate": "step cache"})

    execute = FunctionType(labelling.__code__, {"__name__": "execution", "picture_metadata": picture_metadata})
    extra: dict[str, Any] = {"extra_pnginfo": {"workflow": {}}}
    execute(extra)
    assert extra["extra_pnginfo"]["parallel_dit"] == {"3": {"approximate": "step cache"}}
    execute({})
    picture_metadata.label_running_prompt("3", {"approximate": "step cache"})


def test_a_choice_knows_its_settings() -> None:
    custom = StepCache(interval=5)
    assert CacheChoice(mode="custom", settings=custom).for_steps(4) == custom
    assert CacheChoice(mode="safe").for_steps(24) == StepCache(interval=2)
    assert CacheChoice(mode="safe").for_steps(8) is None
