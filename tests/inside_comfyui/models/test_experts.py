"""Wan 2.2's two experts: two of ComfyUI's own models, switched at the boundary, against one MODEL on two ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import loras
from helpers.inside_fixtures import Loaded, ksampler, parallel_sampler, relative_error
from natives import CASES
from natives.files import FILE_CASES
from safetensors.torch import save_file

import nodes as core_nodes

CASE = CASES["wan t2v"]
BOUNDARY = 0.9
CLOSE = 1e-4


@pytest.fixture(scope="module")
def experts(models: Path) -> list[Any]:
    """Both native models, which the checkpoint ``two experts`` holds together."""
    natives, folder = [CASE.native(), CASE.native(seed=1)], models / "two experts"
    for native, place in zip(natives, (folder, models / "low"), strict=True):
        CASE.write(place, native)
    (models / "low" / "transformer").rename(folder / "transformer_2")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"transformer_2": index["transformer"], "boundary_ratio": BOUNDARY}
    (folder / "model_index.json").write_text(json.dumps(index))
    return natives


@pytest.mark.parametrize("layout", [ParallelLayout(ulysses=2), ParallelLayout(cfg=2)], ids=str)
@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
@pytest.mark.daily(1)
def test_the_switch_equals_two_models(
    experts: list[Any], load_remote: Callable[..., Loaded], sample: Callable[..., Any], layout: ParallelLayout
) -> None:
    high, low = experts[0].clone(), experts[1]
    used_experts = []

    def switch(apply_model: Callable[..., Any], call: dict[str, Any]) -> Any:
        expert = int(call["timestep"].max() < BOUNDARY)
        used_experts.append(expert)
        return (apply_model, low.model.apply_model)[expert](call["input"], call["timestep"], **call["c"])

    high.set_model_unet_function_wrapper(switch)
    options = {"positive": CASE.conditioning(1), "negative": CASE.conditioning(2), "steps": 4}
    reference = ksampler(high, CASE.samples(), **options)
    assert set(used_experts) == {0, 1}
    ours = sample(load_remote(layout, name="two experts").model, CASE.samples(), **options)
    assert relative_error(ours, reference) < CLOSE


def test_one_lora_changes_both_experts_of_a_folder(experts: list[Any], load_remote: Callable[..., Loaded]) -> None:
    lora = (loras.plain(experts[0], "diffusion_model.", rank=3, seed=1), 0.5)
    remote = loras.on_model(load_remote(ParallelLayout(ulysses=2), name="two experts").model, lora)
    for native, steps in zip(experts, ({"end_at_step": 1}, {"start_at_step": 3}), strict=True):
        reference, ours = (advanced(model, **steps) for model in (loras.on_model(native, lora), remote))
        assert relative_error(advanced(native, **steps), reference) > 100 * CLOSE
        assert relative_error(ours, reference) < CLOSE


def test_two_files_take_a_lora_each(folder: Path, load_remote: Callable[..., Loaded]) -> None:
    case, remotes = FILE_CASES["wan t2v"], []
    natives = [case.native(), case.native(seed=1)]
    for i, native in enumerate(natives):
        state = native.model.diffusion_model.state_dict()
        save_file({name: each.clone().contiguous() for name, each in state.items()}, folder / f"expert{i}.safetensors")
        name = f"diffusion_models/expert{i}.safetensors"
        remotes.append(load_remote(ParallelLayout(ulysses=2), name=name).model)
    changes = [(loras.plain(natives[0], "diffusion_model.", rank=3, seed=seed), 0.5) for seed in (1, 2)]

    def sampled(models: list[Any]) -> torch.Tensor:
        high, low = (loras.on_model(model, change) for model, change in zip(models, changes, strict=True))
        noisy = advanced(high, end_at_step=2, return_with_leftover_noise="enable")
        return advanced(low, {"samples": noisy}, start_at_step=2, add_noise="disable")

    reference = sampled(natives)
    assert relative_error(sampled(remotes), reference) < CLOSE
    changes.reverse()
    assert relative_error(sampled(remotes), reference) > 100 * CLOSE


def advanced(model: Any, latent: dict[str, Any] | None = None, **options: Any) -> torch.Tensor:
    """Run ComfyUI's KSamplerAdvanced."""
    defaults = {
        "add_noise": "enable", "noise_seed": 5, "steps": 4, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple",
        "positive": CASE.conditioning(1), "negative": CASE.conditioning(2), "start_at_step": 0, "end_at_step": 4,
        "return_with_leftover_noise": "disable",
    }  # fmt: skip
    samples: torch.Tensor = core_nodes.KSamplerAdvanced().sample(
        model=model, latent_image=latent or CASE.samples(), **(defaults | options)
    )[0]["samples"]
    return samples


@pytest.mark.parametrize(
    ("index", "config", "message"),
    [({"boundary_ratio": None}, {}, "a number between 0 and 1"), ({}, {"num_layers": 3}, "need to be alike")],
)
def test_the_loader_refuses_experts_that_cannot_be_switched(
    experts: list[Any],
    models: Path,
    load_remote: Callable[..., Loaded],
    index: dict[str, Any],
    config: dict[str, Any],
    message: str,
) -> None:
    folder, name = models / "two experts", f"experts, {message}"
    for file, changed in {
        "model_index.json": index, "transformer/config.json": {}, "transformer_2/config.json": config,
    }.items():  # fmt: skip
        (models / name / file).parent.mkdir(parents=True, exist_ok=True)
        (models / name / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changed))
    with pytest.raises(InvalidRequest, match=message):
        load_remote(name=name)
