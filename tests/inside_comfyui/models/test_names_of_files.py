"""Files whose names begin in another way, or that hold more than a model: ComfyUI's MODEL against ours, same file."""

import logging
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.sd
import folder_paths
import pytest
import torch
from any_folder_name.nodes.bridges.left_over import left_over
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.nodes.loader import open_model
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from helpers import loras
from helpers.executor import Executor, Prompt
from helpers.inside_fixtures import Loaded, ksampler, parallel_sampler, relative_error
from helpers.layout_cover import layouts
from helpers.parallel_model import CASE, latent, prompt
from natives import HEAVY
from natives.loadable import CASES, FIRST, with_assumed_sizes, write
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.newest

CLOSE = 1e-4
BEGINNINGS = ("model.diffusion_model.", "net.", "model.", "model.model.")
"""What ComfyUI's ``unet_prefix_from_state_dict`` knows."""
NAMES = [pytest.param(name, marks=pytest.mark.grid if name in HEAVY else ()) for name in FIRST]
Weights = Mapping[str, torch.Tensor]


@pytest.fixture(autouse=True)
def assumed_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    detect = with_assumed_sizes(comfy.model_detection.detect_unet_config)
    monkeypatch.setattr(comfy.model_detection, "detect_unet_config", detect)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[str], tuple[dict[str, torch.Tensor], dict[str, str]]]:
    """``plain(name)`` returns weights and metadata of a case's file."""

    @cache
    def read(name: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        write(name, folder)
        with safe_open(folder / f"{name}.safetensors", "pt") as file:
            return load_file(folder / f"{name}.safetensors"), file.metadata() or {}

    return read


def beside(names: Weights) -> dict[str, torch.Tensor]:
    """Return what trainers leave in files: counters, one more weight in a block, factors of a LoRA."""
    block, layer = next(found.groups() for name in names if (found := re.match(r"(\w+\.0)\.(.+)\.weight$", name)))
    return {
        "global_step": torch.tensor(7),
        "trained": torch.tensor(True),
        "ids": torch.zeros(3, dtype=torch.int32),
        f"{block}.extra.weight": torch.zeros(2, 2),
        f"{block}.{layer}.lora_A.weight": torch.zeros(2, 2),
        f"{block}.{layer}.extra": torch.zeros(2),
    }


def sampled(sample: Callable[..., torch.Tensor], model: Any, name: str) -> torch.Tensor:
    case = CASES[name]
    options = {"positive": case.conditioning(1), "negative": case.conditioning(2, shorter=case.shorter)}
    return sample(case.patch(model), case.samples(), **options, cfg=case.cfg)


@pytest.mark.newest
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.daily(2)
def test_a_file_with_other_names_and_more_is_sampled_as_by_comfyui(
    name: str, plain: Any, folder: Path, load_remote: Callable[..., Loaded]
) -> None:
    weights, metadata = plain(name)
    more = beside(weights)
    place = FIRST.index(name)
    file = folder / f"{name} with more.safetensors"
    start = BEGINNINGS[place % len(BEGINNINGS)]
    save_file({start + key: tensor for key, tensor in (weights | more).items()}, file, metadata)
    native = comfy.sd.load_diffusion_model(str(file))
    CASES[name].repair(native.model.diffusion_model)
    wanted = sampled(ksampler, native, name)
    sample = (ksampler, parallel_sampler)[place % 2]
    model = load_remote(layouts(name)[place % 2], name=f"diffusion_models/{file.name}").model
    assert relative_error(sampled(sample, model, name), wanted) < CLOSE
    assert set(left_over(bridge_for(open_checkpoint(file)))) == more.keys()
    assert left_over(bridge_for(open_checkpoint(folder / f"{name}.safetensors"))) == []


def test_a_file_in_diffusers_names_may_begin_so_too(
    plain: Any, folder: Path, load_remote: Callable[..., Loaded]
) -> None:
    """ComfyUI converts this family's names itself, and drops what it does not know."""
    [name] = [name for name in FIRST if name.startswith("sd3")]
    weights, _ = plain(name)
    converted = CASES[name].converted(dict(weights)) | {"global_step": torch.tensor(7)}
    file = folder / f"{name} of diffusers.safetensors"
    save_file({f"net.{key}": tensor.clone().contiguous() for key, tensor in converted.items()}, file)
    wanted = sampled(ksampler, comfy.sd.load_diffusion_model(str(file)), name)
    model = load_remote(layouts(name)[0], name=f"diffusion_models/{file.name}").model
    assert relative_error(sampled(ksampler, model, name), wanted) < CLOSE


@pytest.mark.parametrize(
    ("name", "more", "detected"),
    [
        ("flux dev", {"txt_norm.scale": torch.zeros(2)}, "txt_norm.scale"),
        ("wan t2v", {"noise": torch.zeros(1), "joint_blocks.0.context_block.attn.qkv.weight": torch.zeros(2, 2)},
         "joint_blocks.0.context_block.attn.qkv.weight"),
    ],
)  # fmt: skip
def test_what_comfyui_takes_for_another_model_is_refused(
    name: str, more: Weights, detected: str, plain: Any, folder: Path
) -> None:
    weights, metadata = plain(name)
    file = folder / f"{name} of another.safetensors"
    save_file(weights | dict(more), file, metadata)
    with pytest.raises(InvalidRequest, match=rf"^{name} of another.safetensors: the file has {detected}, by which"):
        open_model(f"diffusion_models/{file.name}", "fp32", "0,1", None)


@pytest.fixture
def messy(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of ``CASE`` that only ComfyUI's rules make one, among diffusion models and among checkpoints."""
    weights = load_file(folder / "tiny.safetensors")
    messy = {f"net.{name}": tensor for name, tensor in (weights | beside(weights)).items()}
    for place in (folder, tmp_path):
        save_file(messy, place / "messy-00002-of-00003.safetensors")
    checkpoints = ([str(tmp_path)], folder_paths.supported_pt_extensions)
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "checkpoints", checkpoints)
    folder_paths.filename_list_cache.clear()
    return folder / "messy-00002-of-00003.safetensors"


@pytest.mark.parametrize("node", ["UNETLoader", "CheckpointLoaderSimple"])
def test_parallel_model_takes_what_comfyuis_loaders_take(
    node: str, messy: Path, executor: Executor, native_loads: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    inputs = {"unet_name": messy.name, "weight_dtype": "default"} if node == "UNETLoader" else {"ckpt_name": messy.name}
    loader: Prompt = {"1": {"class_type": node, "inputs": inputs}}
    with caplog.at_level(logging.WARNING):
        parallel = latent(executor.run(prompt("3", **loader)))
    assert native_loads == []
    text = executor.texts["3"][0]
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Parallel DiT")]
    for name in beside(load_file(messy.with_name("tiny.safetensors"))):
        assert name in " ".join(said), text
    assert "messy-00001-of-00003.safetensors does not exist" in " ".join(said)
    assert relative_error(parallel, latent(executor.run(prompt("2", **loader)))) < CLOSE
    assert relative_error(parallel, latent(executor.run(prompt("2")))) < CLOSE


@pytest.mark.newest
def test_a_lora_finds_its_weights_in_such_a_file(messy: Path, executor: Executor, native_loads: list[str]) -> None:
    save_file(loras.plain(CASE.native(), "diffusion_model.", rank=3, seed=1), messy.with_name("lora.safetensors"))
    folder_paths.folder_names_and_paths["loras"][0][:] = [str(messy.parent)]
    lora = {"model": ["1", 0], "lora_name": "lora.safetensors", "strength_model": 0.7}
    nodes: Prompt = {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": messy.name, "weight_dtype": "default"}},
        "2": {"class_type": "LoraLoaderModelOnly", "inputs": lora},
    }
    parallel = latent(executor.run(prompt("3", **nodes)))
    assert native_loads == []
    wanted = latent(executor.run(prompt("2", **nodes)))
    assert relative_error(wanted, latent(executor.run(prompt("2")))) > 1e-3
    assert relative_error(parallel, wanted) < CLOSE
