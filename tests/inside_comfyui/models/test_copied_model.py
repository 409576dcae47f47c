"""Parallel Model in ComfyUI's own executor, behind a MODEL whose weights it copies."""

import copy
import errno
import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import pytest
import torch
from any_folder_name.nodes import model
from any_folder_name.nodes.remote import memory_file
from any_folder_name.nodes.remote.adopt import copy_model, merged_weights
from any_folder_name.parallel_backend.client.client import Client
from comfy.quant_ops import QUANT_ALGOS
from comfy_execution.graph import DynamicPrompt
from helpers import compressed_files, loras
from helpers.executor import Executor, Given, Prompt
from helpers.inside_fixtures import relative_error
from helpers.parallel_model import CASE, REPLACING, SHIFT, latent, prompt
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from scripts.processes import wait_until


def test_a_model_from_elsewhere_is_copied_once(
    executor: Executor, small_native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Given.values["model"] = small_native
    elsewhere: Prompt = {"1": {"class_type": "Given", "inputs": {"key": "model"}}}
    copies: list[Any] = []
    monkeypatch.setattr(model, "copy_model", lambda source: copies.append(copy_model(source)) or copies[-1])
    parallel = latent(executor.run(prompt("3", **elsewhere)))
    assert relative_error(parallel, latent(executor.run(prompt("2", **elsewhere)))) < 1e-4
    executor.run(prompt("3", seed=6, **elsewhere))
    assert len(copies) == 1
    path = copies[0].path
    with pytest.raises(OSError, match="Operation not permitted"), path.open("r+b") as file:
        file.write(b"x")
    with safe_open(str(path), framework="pt") as file:
        assert set(file.keys()) == set(small_native.model.diffusion_model.state_dict())


def test_what_a_loaded_clone_has_in_place_of_the_models_own_is_not_taken_over(
    executor: Executor, small_native: Any
) -> None:
    Given.values["model"] = small_native
    elsewhere: Prompt = {"1": {"class_type": "Given", "inputs": {"key": "model"}}}
    unshifted: Prompt = {"3": {"class_type": "ParallelModel", "inputs": {"model": ["1", 0], "devices": "0,1"}}}
    executor.run(prompt("2", shift=8.0, **elsewhere))
    parallel = latent(executor.run(prompt("3", **elsewhere, **unshifted)))
    assert relative_error(parallel, latent(executor.run(prompt("1", **elsewhere)))) < 1e-4


@pytest.mark.newest
def test_torchs_attention_is_left_to_the_ranks(executor: Executor, small_native: Any) -> None:
    Given.values["model"] = small_native
    inputs = {"model": ["1", 0], "attention": "pytorch attention"}
    nodes: Prompt = {
        "1": {"class_type": "Given", "inputs": {"key": "model"}},
        "2": {"class_type": "ModelAttentionBackend", "inputs": inputs},
    }
    parallel = latent(executor.run(prompt("3", **nodes)))
    assert relative_error(parallel, latent(executor.run(prompt("2", **nodes)))) < 1e-4


@pytest.mark.usefixtures("executor")
def test_comfyuis_copy_is_released_where_nothing_else_holds_it() -> None:
    source: Any = CASE.native()
    weights = weakref.ref(source.model.diffusion_model)
    prompt = {"1": {"class_type": "ParallelModel", "inputs": {}}}
    hidden = SimpleNamespace(dynprompt=DynamicPrompt(prompt), prompt=prompt, unique_id="1")
    remote, _ = model._from_loaded(source, "0,1", None, "auto", hidden, "off", "auto")
    assert weights() is not None
    del source
    gc.collect()
    assert weights() is None
    assert remote.model.diffusion_model.handle.spec.path.startswith("/proc/")


def test_copying_ends_when_the_user_interrupts(
    executor: Executor, small_native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Given.values["model"] = small_native
    copied: list[Any] = []

    def interrupt(self: Any, value: int) -> None:
        copied.append(value)
        comfy.model_management.interrupt_current_processing()

    monkeypatch.setattr(comfy.utils.ProgressBar, "update", interrupt)
    executor.run(prompt("3", **{"1": {"class_type": "Given", "inputs": {"key": "model"}}}))
    assert copied == [1]


def test_memory_that_the_system_refuses_is_named(
    executor: Executor, small_native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Given.values["model"] = small_native
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=error))
    with pytest.raises(RuntimeError, match=r"the system gives no 0.0 GB of memory .*No space left"):
        executor.run(prompt("3", **{"1": {"class_type": "Given", "inputs": {"key": "model"}}}))


@pytest.mark.parametrize("weight_dtype", ["fp8_e4m3fn", "fp8_e5m2"])
def test_a_cast_while_loading_is_kept(weight_dtype: str, executor: Executor) -> None:
    cast = {"class_type": "UNETLoader", "inputs": {"unet_name": "tiny.safetensors", "weight_dtype": weight_dtype}}
    parallel = latent(executor.run(prompt("3", **{"1": cast})))
    plain = latent(executor.run(prompt("2")))
    assert relative_error(parallel, plain) > 1e-3
    assert relative_error(parallel, latent(executor.run(prompt("2", **{"1": cast})))) < 1e-2


@pytest.mark.parametrize("form", ["lora", "diff"])
@pytest.mark.parametrize("weight_dtype", ["default", "fp8_e5m2"])
def test_changes_of_weights_before_the_node_are_kept(
    form: str, weight_dtype: str, executor: Executor, folder: Path
) -> None:
    save_file(changes(form, folder), folder / f"{form}.safetensors")
    folder_paths.folder_names_and_paths["loras"][0][:] = [str(folder)]
    inputs = {"model": ["1", 0], "lora_name": f"{form}.safetensors", "strength_model": 0.8}
    nodes: Prompt = {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "tiny.safetensors", "weight_dtype": weight_dtype}},
        "9": {"class_type": "LoraLoaderModelOnly", "inputs": inputs},
        "2": {"class_type": "ModelSamplingSD3", "inputs": {"model": ["9", 0], "shift": SHIFT}},
    }
    parallel = latent(executor.run(prompt("3", **nodes)))
    bypassed = latent(executor.run(prompt("2", **nodes)))
    exact = weight_dtype == "default"  # ComfyUI rounds weights that it merges into fp8
    assert relative_error(parallel, bypassed) < (1e-4 if exact else 0.1)
    nodes["2"]["inputs"]["model"] = ["1", 0]
    assert relative_error(parallel, latent(executor.run(prompt("2", **nodes)))) > 0.2


def test_another_strength_of_a_lora_copies_and_loads_nothing(
    executor: Executor, small_native: Any, backend: Client, folder: Path
) -> None:
    save_file(changes("lora", folder), folder / "lora.safetensors")
    folder_paths.folder_names_and_paths["loras"][0][:] = [str(folder)]
    Given.values["model"] = small_native

    def sampled(last: str, strength: float) -> torch.Tensor:
        inputs = {"model": ["1", 0], "lora_name": "lora.safetensors", "strength_model": strength}
        nodes: Prompt = {
            "1": {"class_type": "Given", "inputs": {"key": "model"}},
            "9": {"class_type": "LoraLoaderModelOnly", "inputs": inputs},
            "2": {"class_type": "ModelSamplingSD3", "inputs": {"model": ["9", 0], "shift": SHIFT}},
        }
        return latent(executor.run(prompt(last, **nodes)))

    def loaded() -> list[tuple[str, str, int]]:
        ended = "the ranks have said that they have nothing to do"
        wait_until(lambda: not any(rank.progress.phase for rank in backend.status().ranks), 10.0, ended)
        return [(each.path, each.stamp, each.loads) for rank in backend.status().ranks for each in rank.models]

    ours, before = [sampled("3", 0.4)], loaded()
    ours.append(sampled("3", 0.8))
    assert loaded() == before
    for result, strength in zip(ours, (0.4, 0.8), strict=True):
        assert relative_error(result, sampled("2", strength)) < 1e-4


@pytest.mark.newest
@pytest.mark.parametrize("form", ["fp8 e4m3", "nvfp4"])
def test_a_lora_on_a_compressed_model_stays_factors(form: str, small_native: Any, folder: Path) -> None:
    if form.split()[0] not in " ".join(QUANT_ALGOS).replace("float8", "fp8"):
        pytest.skip("not in this version of ComfyUI")
    state = {name: each.clone() for name, each in small_native.model.diffusion_model.state_dict().items()}
    compressed_files.write_described(folder / f"{form}.safetensors", state, form)
    with torch.inference_mode():
        compressed = comfy.sd.load_diffusion_model(str(folder / f"{form}.safetensors"))
        patched = loras.on_model(compressed, (changes("lora", folder), 0.8))
        assert merged_weights(patched) == frozenset()
        files = [copy_model(each) for each in (compressed, patched)]
    plain, copied = (file.path.stat().st_size for file in files)
    assert copied == plain


def changes(form: str, folder: Path) -> dict[str, torch.Tensor]:
    """Return a LoRA's file, or one with differences of weights."""
    name = "diffusion_model.joint_blocks.0.x_block.mlp.fc1"
    weight = load_file(folder / "tiny.safetensors")[f"{name.removeprefix('diffusion_model.')}.weight"]
    random = torch.Generator().manual_seed(4)
    up, down = (torch.randn(*shape, generator=random) * 0.3 for shape in ((len(weight), 2), (2, weight.shape[1])))
    if form == "diff":
        return {f"{name}.diff": up @ down}
    return {f"{name}.lora_up.weight": up, f"{name}.lora_down.weight": down}


@pytest.mark.parametrize(
    ("between", "message"),
    [
        ({"class_type": "ModelComputeDtype", "inputs": {"model": ["1", 0], "dtype": "bf16"}}, "ModelComputeDtype has"),
        ({"class_type": "Given", "inputs": {"key": "another class"}}, "ComfyUI loaded this model as"),
        ({"class_type": "Given", "inputs": {"key": "patched"}}, "a node replaces attention"),
        (REPLACING, r"PerturbedAttentionGuidance \(2\) replaces"),
    ],
)
def test_a_model_that_cannot_run_is_refused_before_its_weights_are_copied(
    between: dict[str, Any], message: str, executor: Executor, small_native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = small_native.clone()
    other.model = copy.copy(small_native.model)
    other.model.__class__ = type("Other", (type(small_native.model),), {})
    patched = small_native.clone()
    patched.set_model_attn1_replace(lambda *args: args[0], "double_block", 0)
    Given.values |= {"model": small_native, "another class": other, "patched": patched}
    filled: list[Any] = []
    monkeypatch.setattr(memory_file.MemoryFile, "fill", filled.append)
    with pytest.raises(RuntimeError, match=message):
        executor.run(prompt("3", **{"1": {"class_type": "Given", "inputs": {"key": "model"}}, "2": between}))
    assert filled == []


def test_fp8_products_are_named(executor: Executor) -> None:
    fast = {"class_type": "UNETLoader", "inputs": {"unet_name": "tiny.safetensors", "weight_dtype": "fp8_e4m3fn_fast"}}
    executor.run(prompt("3", **{"1": fast}))
    assert executor.texts["3"][0].endswith("the ranks compute in float32, not in fp8")


def test_weights_that_do_not_fit_are_refused_before_anything_is_copied(
    executor: Executor, small_native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Given.values["model"] = small_native
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda *args, **options: 1_000_000_000)
    with pytest.raises(RuntimeError, match=r"one more copy .* takes 0.0 GB, and 1.0 GB of memory are free"):
        executor.run(prompt("3", **{"1": {"class_type": "Given", "inputs": {"key": "model"}}}))
