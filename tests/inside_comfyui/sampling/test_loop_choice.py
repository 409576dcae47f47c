"""Which step loop runs Parallel Sampler's steps, that both give what KSampler gives, and how the node says it."""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import comfy.model_sampling
import comfy.samplers
import pytest
import torch
from any_folder_name.nodes.remote import loop_choice, preflight
from any_folder_name.nodes.sampler import ParallelSampler
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.protocol.model_spec import Devices
from any_folder_name.parallel_backend.samplers.samplers import SAMPLERS
from comfy_extras import nodes_model_advanced
from helpers.inside_fixtures import (
    Loaded,
    conditioning,
    empty_latent,
    ksampler,
    parallel_sampler,
    relative_error,
    run_parallel_sampler,
)  # fmt: skip

import nodes as core_nodes

CLOSE = 1e-4
LACKING = sorted(set(comfy.samplers.KSampler.SAMPLERS) - SAMPLERS.keys())
APPROXIMATE = {
    "pipe=2": "PipeFusion.*set patches to 1 in Parallel Layout, or use KSampler",
    "ring=2 stale=previous": "displaced patch.*set stale to off in Parallel Layout",
}


def in_area(prompt: list[Any]) -> list[Any]:
    """Restrict a prompt to a corner."""
    return core_nodes.ConditioningSetArea().append(prompt, 32, 32, 0, 0, 1.0)[0]


def at_the_start(prompt: list[Any]) -> list[Any]:
    """Restrict a prompt to the first half of the steps."""
    return core_nodes.ConditioningSetTimestepRange().set_range(prompt, 0.0, 0.5)[0]


def guided(model: Any) -> Any:
    """Replace the guidance."""
    model = model.clone()
    model.set_model_sampler_cfg_function(lambda args: args["uncond"] + 2.0 * (args["cond"] - args["uncond"]))
    return model


def wrapped(model: Any) -> Any:
    """Wrap the transformer."""
    model = model.clone()
    model.add_wrapper_with_key(
        "diffusion_model", "other node", lambda executor, *args, **options: 0.9 * executor(*args, **options)
    )
    return model


def softened(model: Any) -> Any:
    """Change the mask from step to step."""
    model = model.clone()
    model.set_model_denoise_mask_function(lambda sigma, mask, extra_options: mask * 0.5)
    return model


class Shifted(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):  # type: ignore[misc]
    """A sampling whose timesteps the backend does not know."""

    def timestep(self, sigma: torch.Tensor) -> torch.Tensor:
        """Return another timestep."""
        return sigma * 900.0


class Fainter(comfy.model_sampling.ModelSamplingDiscreteFlow, comfy.model_sampling.CONST):  # type: ignore[misc]
    """A sampling that adds noise in another way."""

    def noise_scaling(self, sigma: Any, noise: Any, latent_image: Any, max_denoise: bool = False) -> Any:
        """Add less noise."""
        return super().noise_scaling(sigma, noise * 0.7, latent_image, max_denoise)


def fainter(model: Any) -> Any:
    """Change how noise is added."""
    model, sampling = model.clone(), Fainter(model.model.model_config)
    sampling.set_parameters(shift=8.0)
    model.add_object_patch("model_sampling", sampling)
    return model


def answering_half(model: Any) -> Any:
    """Set another function on the object that is the sampling."""
    model, sampling = model.clone(), copy.deepcopy(model.model.model_sampling)
    calculate = sampling.calculate_denoised
    sampling.calculate_denoised = lambda *args: calculate(*args) * 0.5
    model.add_object_patch("model_sampling", sampling)
    return model


def resampled(model: Any) -> Any:
    """Change the sampling."""
    model = model.clone()
    model.add_object_patch("model_sampling", Shifted(model.model.model_config))
    return model


PROMPTS: dict[str, tuple[Callable[[list[Any]], list[Any]], str]] = {
    "area": (in_area, "the positive prompt has area"),
    "steps": (at_the_start, "the positive prompt has start_percent, end_percent"),
    "strength": (lambda prompt: core_nodes.ConditioningSetAreaStrength().append(prompt, 0.0)[0], "has strength"),
    "two": (lambda prompt: [*prompt, *conditioning(5)], "the positive prompt has 2 conditionings"),
}
MODELS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "guidance": (guided, "a node added the function sampler_cfg_function"),
    "wrapper": (wrapped, "a node added the wrapper other node"),
    "mask": (softened, "a node added the function denoise_mask_function"),
    "sampling": (resampled, "a node changed the model's sampling"),
    "noise": (fainter, "a node changed the model's sampling"),
    "a method": (answering_half, "a node changed the model's sampling"),
}


def latent() -> dict[str, Any]:
    """Return a latent with a soft mask."""
    return {
        "samples": torch.randn(1, 16, 1, 6, 5, generator=torch.Generator().manual_seed(3)),
        "noise_mask": torch.linspace(0, 1, 40).expand(1, 48, 40),
    }


@pytest.mark.parametrize(("changed", "reason"), PROMPTS.values(), ids=PROMPTS.keys())
def test_prompts_that_vary_run_in_comfyuis_loop(native: Any, loaded: Loaded, changed: Any, reason: str) -> None:
    positive = changed(conditioning(1))
    output = run_parallel_sampler(loaded.model, empty_latent(), positive=positive)
    reference = ksampler(native, empty_latent(), positive=positive)
    assert relative_error(output.args[0]["samples"], reference) < CLOSE
    assert reason in output.ui["text"][0]
    assert {type(message).__name__ for message, _ in loaded.client.requests} == {"Forward"}
    assert relative_error(reference, ksampler(native, empty_latent())) > 10 * CLOSE


@pytest.mark.parametrize(("changed", "reason"), MODELS.values(), ids=MODELS.keys())
def test_models_with_hooks_run_in_comfyuis_loop(native: Any, loaded: Loaded, changed: Any, reason: str) -> None:
    output = run_parallel_sampler(changed(loaded.model), latent())
    reference = ksampler(changed(native), latent())
    assert relative_error(output.args[0]["samples"], reference) < CLOSE
    assert f"steps run in ComfyUI's loop, with one request a step: {reason}" in output.ui["text"][0]
    assert relative_error(reference, ksampler(native, latent())) > 10 * CLOSE


def test_the_node_names_the_loop(loaded: Loaded) -> None:
    texts = [
        run_parallel_sampler(loaded.model, empty_latent(), steps=1, sampler_name=name).ui["text"][0]
        for name in ("euler", LACKING[0])
    ]
    assert texts[0] == "steps run in the backend's loop"
    assert f"lacks the sampler {LACKING[0]}, it has euler" in texts[1]
    schema = ParallelSampler.define_schema()
    (tooltip,) = (entry.tooltip for entry in schema.inputs if entry.id == "sampler_name")
    assert all(name in text for text in (schema.description, tooltip) for name in SAMPLERS)


@pytest.mark.parametrize(("layout", "message"), APPROXIMATE.items())
def test_approximate_layouts_refuse_comfyuis_loop(load: Callable[..., Loaded], layout: str, message: str) -> None:
    loaded = load(ParallelLayout.parse(layout))
    for options in ({"sampler_name": LACKING[0]}, {"positive": at_the_start(conditioning(1))}):
        with pytest.raises(InvalidRequest, match=message):
            parallel_sampler(loaded.model, empty_latent(), **options)
    with pytest.raises(InvalidRequest, match=message):
        parallel_sampler(wrapped(loaded.model), empty_latent())
    assert not loaded.client.work


def test_one_patch_is_exact_and_takes_every_sampler(native: Any, load: Callable[..., Loaded]) -> None:
    loaded = load(ParallelLayout.parse("pipe=2 patches=1"))
    ours = parallel_sampler(loaded.model, empty_latent(), sampler_name=LACKING[0])
    assert relative_error(ours, ksampler(native, empty_latent(), sampler_name=LACKING[0])) < CLOSE


@pytest.mark.parametrize("layout", APPROXIMATE)
def test_the_loader_refuses_a_sampler_for_its_layout(load: Callable[..., Loaded], layout: str) -> None:
    handle = load(ParallelLayout.parse(layout)).model.model.diffusion_model.handle
    prompt = {
        "7": {"class_type": "ParallelLoader", "inputs": {}},
        "1": {"class_type": "ModelSamplingSD3", "inputs": {"model": ["7", 0]}},
        "2": {"class_type": "ParallelSampler", "inputs": {"model": ["1", 0], "sampler_name": LACKING[0]}},
        "3": {"class_type": "SaveLatent", "inputs": {"samples": ["2", 0]}},
    }
    with pytest.raises(InvalidRequest, match=f"lacks the sampler {LACKING[0]}"):
        preflight.check_prompt(prompt, "7", handle)
    prompt["2"]["inputs"]["sampler_name"] = "euler_ancestral"
    preflight.check_prompt(prompt, "7", handle)


@pytest.mark.parametrize(
    ("counts", "kind", "hosts", "same"),
    [
        ((8, 8), "cuda", (), True),
        ((8, 4), "cuda", (), False),
        ((8, 8), "cpu", (), False),
        ((8, 8), "cuda", ("", "b"), False),
    ],
)
def test_gpus_that_draw_other_noise(
    loaded: Loaded,
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int, int],
    kind: Literal["cuda", "cpu"],
    hosts: tuple[str, ...],
    same: bool,
) -> None:
    """Random numbers of a GPU depend on how many threads draw them; nobody knows here how many another host's has."""
    properties = {
        index: SimpleNamespace(name=f"GPU of {count}", multi_processor_count=count)
        for index, count in enumerate(counts)
    }
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: properties[getattr(device, "index", device)]
    )
    spec = SimpleNamespace(devices=Devices(kind=kind, indices=(0, 1), hosts=hosts))
    model = loaded.model.clone()
    model.load_device = torch.device("cuda", 0)
    monkeypatch.setattr(loaded.model.model.diffusion_model, "handle", SimpleNamespace(spec=spec))
    prompts = {"positive": conditioning(1), "negative": conditioning(2)}
    for sampler, device_matters in (("euler_ancestral", True), ("dpmpp_2m_sde_gpu", True), ("dpmpp_2m_sde", False)):
        reason = loop_choice.reason_for_comfyui(model, sampler, masked=False, **prompts)
        assert bool(reason) == (device_matters and not same)


@pytest.mark.skipif(not hasattr(nodes_model_advanced, "ModelNoiseScale"), reason="not in this version of ComfyUI")
@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral", "lcm", "dpmpp_2m_sde"])
def test_model_noise_scale(native: Any, loaded: Loaded, sampler: str) -> None:
    node = nodes_model_advanced.ModelNoiseScale()
    (native_scaled,), (scaled,) = (node.patch(model, 1.5) for model in (native, loaded.model))
    reference = ksampler(native_scaled, latent(), sampler_name=sampler)
    assert relative_error(parallel_sampler(scaled, latent(), sampler_name=sampler), reference) < CLOSE
    assert relative_error(ksampler(native, latent(), sampler_name=sampler), reference) > 10 * CLOSE
    assert [type(message).__name__ for message, _ in loaded.client.requests] == ["Sample"]
