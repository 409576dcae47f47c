"""Several samplings in one ComfyUI: on one model, on two in turns, one inside another, and an unload amid one."""

import time
from collections.abc import Callable
from typing import Any

import comfy.model_management
import pytest
import torch
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import loras
from helpers.freeing_client import FreeingClient
from helpers.inside_fixtures import ksampler, native_case, parallel_sampler, relative_error
from natives import CASES

CLOSE, FAR = 1e-4, 1e-2
ONE, OTHER = "sd3 medium", "wan t2v"


def options_of(name: str, **changes: Any) -> dict[str, Any]:
    """Return what a sampler of a case takes."""
    return {"latent": CASES[name].samples(), **loras.options_of(CASES[name]), "steps": 4, **changes}


def amid(model: Any, act: Callable[[], None]) -> Any:
    """Return a model that lets something happen before its third step."""
    model, steps = model.clone(), list[int]()

    def guidance(args: dict[str, Any]) -> torch.Tensor:
        steps.append(1)
        if len(steps) == 3:
            act()
        result: torch.Tensor = args["uncond"] + (args["cond"] - args["uncond"]) * args["cond_scale"]
        return result

    model.set_model_sampler_cfg_function(guidance)
    return model


def loads(client: FreeingClient, folder: str) -> int:
    """Return how often the first rank has loaded a part of a model."""
    return sum(model.loads for model in client.status().ranks[0].models if model.path.endswith(f"/{folder}"))


def settled_loads(client: FreeingClient, folder: str, wanted: int) -> int:
    """Return the loads once they are as wanted, since a rank tells of them now and then, or after some seconds."""
    end = time.monotonic() + 20
    while (found := loads(client, folder)) != wanted and time.monotonic() < end:
        time.sleep(0.05)
    return found


@pytest.mark.newest
@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_an_unload_in_the_middle_of_a_run(
    sample: Callable[..., Any], load_case: Callable[..., Any], backend: FreeingClient
) -> None:
    """As another node's, or ComfyUI's own for a model that needs the room."""
    model, seen = load_case(ONE, ParallelLayout(ulysses=2)), list[int]()

    def unload() -> None:
        comfy.model_management.unload_all_models()
        seen.append(settled_loads(backend, ONE, 0))

    found = sample(amid(model, unload), **options_of(ONE))
    assert relative_error(found, ksampler(native_case(ONE), **options_of(ONE))) < CLOSE
    assert seen == [0]
    assert settled_loads(backend, ONE, 1) == 1


@pytest.mark.parametrize("layout", ["ulysses=2", "tensor=2"])
def test_two_models_take_turns(layout: str, load_case: Callable[..., Any]) -> None:
    models = {name: load_case(name, ParallelLayout.parse(layout)) for name in (ONE, OTHER)}
    wanted = {
        (name, seed): ksampler(native_case(name), **options_of(name, seed=seed)) for name in models for seed in (1, 2)
    }
    for seed in (1, 2):
        for sample in (ksampler, parallel_sampler):
            for name, model in models.items():
                found = sample(model, **options_of(name, seed=seed))
                assert relative_error(found, wanted[name, seed]) < CLOSE


@pytest.mark.newest
def test_samplers_on_one_model_with_other_loras(load_case: Callable[..., Any]) -> None:
    native, model = CASES[ONE].native(), load_case(ONE, ParallelLayout(ulysses=2))
    files = [loras.plain(native, "diffusion_model.", rank=3, seed=seed) for seed in (1, 2)]
    wanted = [ksampler(loras.on_model(native, (file, 0.6)), **options_of(ONE)) for file in files]
    assert relative_error(*wanted) > FAR
    changed = [loras.on_model(model, (file, 0.6)) for file in files]
    for place, sample in ((0, ksampler), (1, ksampler), (0, parallel_sampler), (1, parallel_sampler), (0, ksampler)):
        assert relative_error(sample(changed[place], **options_of(ONE)), wanted[place]) < CLOSE


@pytest.mark.newest
@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_a_run_of_another_model_inside_a_step(sample: Callable[..., Any], load_case: Callable[..., Any]) -> None:
    """ComfyUI itself cannot sample a model inside a step of the same one."""
    inner = list[torch.Tensor]()
    model, other = load_case(ONE, ParallelLayout(ulysses=2)), load_case(OTHER, ParallelLayout(cfg=2))
    outer = amid(model, lambda: inner.append(sample(other, **options_of(OTHER))))
    assert relative_error(sample(outer, **options_of(ONE)), ksampler(native_case(ONE), **options_of(ONE))) < CLOSE
    assert relative_error(inner[0], ksampler(native_case(OTHER), **options_of(OTHER))) < CLOSE
