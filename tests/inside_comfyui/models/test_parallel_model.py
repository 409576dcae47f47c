"""Parallel Model in ComfyUI's own executor, behind ComfyUI's own loaders of files."""

import copy
import errno
import gc
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
from any_folder_name.nodes.backend import connection
from any_folder_name.nodes.layout import ParallelLayoutNode
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.nodes.model import ParallelModel
from any_folder_name.nodes.remote import memory_file
from any_folder_name.nodes.remote.adopt import copy_model
from any_folder_name.nodes.sampler import ParallelSampler
from any_folder_name.parallel_backend.client.client import Client
from comfy_execution.graph import DynamicPrompt
from comfy_extras.nodes_slg import SkipLayerGuidanceDiT
from helpers.executor import Executor, Given, Prompt
from helpers.inside_fixtures import relative_error
from natives.files import FILE_CASES
from safetensors import safe_open
from safetensors.torch import load_file, save_file

CASE = FILE_CASES["sd3 3.5 medium"]
"""A family whose sizes ComfyUI reads from the file."""
SHIFT, DEFAULT_SHIFT = 5.0, 3.0
"""Of ModelSamplingSD3 in the prompts, and of the family without it."""


@pytest.fixture(scope="module")
def native() -> Any:
    return CASE.native()


@pytest.fixture(scope="module")
def folder(native: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("diffusion_models")
    weights = native.model.diffusion_model.state_dict()
    save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, folder / "tiny.safetensors")
    folder_paths.folder_names_and_paths["diffusion_models"][0][:] = [str(folder)]
    folder_paths.filename_list_cache.clear()
    return folder


@pytest.fixture
def native_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that ComfyUI's own loaders have read."""
    loads: list[str] = []
    load = comfy.sd.load_diffusion_model

    def recorded(path: str, **options: Any) -> Any:
        loads.append(Path(path).name)
        return load(path, **options)

    monkeypatch.setattr(comfy.sd, "load_diffusion_model", recorded)
    return loads


@pytest.fixture
def executor(folder: Path, backend: Client, monkeypatch: pytest.MonkeyPatch) -> Executor:
    connection.use_client(backend)
    monkeypatch.setattr(connection, "_release", lambda spec, user: None)
    Given.values = {
        "positive": CASE.conditioning(1),
        "negative": CASE.conditioning(2, shorter=3),
        "latent": CASE.samples(),
    }
    return Executor(ParallelModel, ParallelLoader, ParallelLayoutNode, ParallelSampler, SkipLayerGuidanceDiT)


SKIPPING = {
    "class_type": "SkipLayerGuidanceDiT",
    "inputs": {
        "model": ["1", 0], "double_layers": "0", "single_layers": "0", "scale": 3.0, "start_percent": 0.0,
        "end_percent": 1.0, "rescaling_scale": 0.0,
    },
}  # fmt: skip


def prompt(model: str, *, seed: int = 5, shift: float = SHIFT, sampler: str = "KSampler", **changes: Any) -> Prompt:
    """Return a prompt whose sampler takes its model from the node ``model``."""
    sampling = {
        "seed": seed, "steps": 3, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
        "model": [model, 0], "positive": ["4", 0], "negative": ["5", 0], "latent_image": ["6", 0],
    }  # fmt: skip
    nodes: Prompt = {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "tiny.safetensors", "weight_dtype": "default"}},
        "2": {"class_type": "ModelSamplingSD3", "inputs": {"model": ["1", 0], "shift": shift}},
        "3": {"class_type": "ParallelModel", "inputs": {"model": ["2", 0], "devices": "0,1", "attention": "auto"}},
        "4": {"class_type": "Given", "inputs": {"key": "positive"}},
        "5": {"class_type": "Given", "inputs": {"key": "negative"}},
        "6": {"class_type": "Given", "inputs": {"key": "latent"}},
        "7": {"class_type": sampler, "inputs": sampling},
        "8": {"class_type": "Recorder", "inputs": {"value": ["7", 0]}},
    }
    return nodes | changes


def latent(result: list[Any]) -> torch.Tensor:
    samples: torch.Tensor = result[0]["samples"]
    return samples


def loads(backend: Client) -> list[int]:
    """Return how often each rank has loaded a component of the file."""
    models = [model for rank in backend.status().ranks for model in rank.models]
    return [model.loads for model in models if model.path.endswith("tiny.safetensors")]


@pytest.mark.parametrize("sampler", ["KSampler", "ParallelSampler"])
def test_the_result_is_that_of_the_bypassed_workflow_and_comfyui_reads_nothing(
    sampler: str, executor: Executor, native_loads: list[str]
) -> None:
    parallel = latent(executor.run(prompt("3", sampler=sampler)))
    assert native_loads == []
    assert executor.texts["3"] == ["tiny.safetensors: ComfyUI does not load it"]
    bypassed = latent(executor.run(prompt("2")))
    assert native_loads == ["tiny.safetensors"]
    assert relative_error(parallel, bypassed) < 1e-4


def test_nodes_of_a_subgraph_expand_like_any_others(executor: Executor, native_loads: list[str]) -> None:
    ids = {"1": "57:1", "2": "57:58:2", "3": "57:3"}
    inside = {
        ids.get(key, key): {
            "class_type": node["class_type"],
            "inputs": {
                name: [ids.get(value[0], value[0]), value[1]] if isinstance(value, list) else value
                for name, value in node["inputs"].items()
            },
        }
        for key, node in prompt("3").items()
    }
    result = latent(executor.run(inside))
    assert native_loads == []
    assert executor.texts["57:3"] == ["tiny.safetensors: ComfyUI does not load it"]
    assert relative_error(result, latent(executor.run(prompt("2")))) < 1e-4


def test_another_seed_or_shift_reads_nothing(executor: Executor, backend: Client) -> None:
    first = latent(executor.run(prompt("3")))
    before = loads(backend)
    assert before == [1, 1]
    executor.run(prompt("3"))
    assert not {"3", "7"} & set(executor.executed)
    executor.run(prompt("3", seed=6))
    assert "3.0.0.1" not in executor.executed
    shifted = latent(executor.run(prompt("3", shift=8.0)))
    assert "3.0.0.1" not in executor.executed
    assert loads(backend) == before
    assert relative_error(shifted, first) > 1e-3
    assert relative_error(shifted, latent(executor.run(prompt("2", shift=8.0)))) < 1e-4


def test_a_name_may_arrive_by_a_link(
    executor: Executor, folder: Path, native_loads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = ([str(tmp_path)], folder_paths.supported_pt_extensions)
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "checkpoints", checkpoints)
    (tmp_path / "tiny.safetensors").write_bytes(b"the loader means the file of its own kind")
    Given.values["name"] = "tiny.safetensors"
    linked = {"class_type": "UNETLoader", "inputs": {"unet_name": ["9", 0], "weight_dtype": "default"}}
    name = {"class_type": "Given", "inputs": {"key": "name"}}
    result = latent(executor.run(prompt("3", **{"1": linked, "9": name})))
    assert native_loads == []
    assert relative_error(result, latent(executor.run(prompt("2")))) < 1e-4


def test_two_parallel_models_behind_one_loader(executor: Executor, native_loads: list[str]) -> None:
    second: Prompt = {
        "13": {"class_type": "ParallelModel", "inputs": {"model": ["1", 0], "devices": "0,1", "attention": "auto"}},
        "17": {"class_type": "KSampler", "inputs": prompt("13", seed=5)["7"]["inputs"]},
        "18": {"class_type": "Recorder", "inputs": {"value": ["17", 0]}},
    }
    results = executor.run(prompt("3", shift=DEFAULT_SHIFT, **second))
    assert len(results) == 2
    assert native_loads == []
    assert torch.equal(results[0]["samples"], results[1]["samples"])


def test_the_node_says_what_makes_comfyui_load_the_file_too(executor: Executor, native_loads: list[str]) -> None:
    other: Prompt = {"9": {"class_type": "Recorder", "inputs": {"value": ["1", 0]}}}
    executor.run(prompt("3", **other))
    assert native_loads == ["tiny.safetensors"]
    assert executor.texts["3"] == ["tiny.safetensors: ComfyUI loads it too, for Recorder (9)"]


def test_nodes_that_do_not_need_the_weights_are_not_named(executor: Executor, native_loads: list[str]) -> None:
    others: Prompt = {
        "9": {"class_type": "ParallelModel", "inputs": {"model": ["1", 0], "devices": "0,1", "attention": "auto"}},
        "10": {"class_type": "Recorder", "inputs": {"value": ["9", 0]}},
        "11": {"class_type": "ModelSamplingSD3", "inputs": {"model": ["1", 0], "shift": 4.0}},
    }
    executor.run(prompt("3", **others))
    assert native_loads == []
    assert executor.texts["3"] == executor.texts["9"] == ["tiny.safetensors: ComfyUI does not load it"]


def test_a_changed_file_is_read_again(executor: Executor, folder: Path, backend: Client) -> None:
    first = latent(executor.run(prompt("3")))
    file = folder / "tiny.safetensors"
    original = load_file(file)
    save_file({name: tensor * 1.5 for name, tensor in original.items()}, file)
    changed = latent(executor.run(prompt("3", seed=5)))
    save_file(original, file)
    assert relative_error(changed, first) > 1e-3
    assert relative_error(latent(executor.run(prompt("3"))), first) < 1e-5


def test_the_file_is_checked_before_weights_load(executor: Executor, folder: Path) -> None:
    (folder / "cut.safetensors").write_bytes((folder / "tiny.safetensors").read_bytes()[:100_000])
    cut = {"class_type": "UNETLoader", "inputs": {"unet_name": "cut.safetensors", "weight_dtype": "default"}}
    with pytest.raises(RuntimeError, match=r"cut.safetensors has .* bytes of weights, and its header lists"):
        executor.run(prompt("3", **{"1": cut}))


def test_a_model_from_elsewhere_is_copied_once(
    executor: Executor, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Given.values["model"] = native
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
        assert set(file.keys()) == set(native.model.diffusion_model.state_dict())


def test_what_a_loaded_clone_has_in_place_of_the_models_own_is_not_taken_over(executor: Executor, native: Any) -> None:
    Given.values["model"] = native
    elsewhere: Prompt = {"1": {"class_type": "Given", "inputs": {"key": "model"}}}
    unshifted: Prompt = {"3": {"class_type": "ParallelModel", "inputs": {"model": ["1", 0], "devices": "0,1"}}}
    executor.run(prompt("2", shift=8.0, **elsewhere))
    parallel = latent(executor.run(prompt("3", **elsewhere, **unshifted)))
    assert relative_error(parallel, latent(executor.run(prompt("1", **elsewhere)))) < 1e-4


@pytest.mark.usefixtures("executor")
def test_comfyuis_copy_is_released_where_nothing_else_holds_it() -> None:
    source: Any = CASE.native()
    weights = weakref.ref(source.model.diffusion_model)
    prompt = {"1": {"class_type": "ParallelModel", "inputs": {}}}
    hidden = SimpleNamespace(dynprompt=DynamicPrompt(prompt), prompt=prompt, unique_id="1")
    remote, _ = model._from_loaded(source, "0,1", None, "auto", hidden)
    assert weights() is not None
    del source
    gc.collect()
    assert weights() is None
    assert remote.model.diffusion_model.handle.spec.path.startswith("/proc/")


def test_copying_ends_when_the_user_interrupts(
    executor: Executor, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Given.values["model"] = native
    copied: list[Any] = []

    def interrupt(self: Any, value: int) -> None:
        copied.append(value)
        comfy.model_management.interrupt_current_processing()

    monkeypatch.setattr(comfy.utils.ProgressBar, "update", interrupt)
    executor.run(prompt("3", **{"1": {"class_type": "Given", "inputs": {"key": "model"}}}))
    assert copied == [1]


def test_memory_that_the_system_refuses_is_named(
    executor: Executor, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Given.values["model"] = native
    error = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(memory_file.os, "posix_fallocate", Mock(side_effect=error))
    with pytest.raises(RuntimeError, match=r"the system gives no 0.0 GB of memory .*No space left"):
        executor.run(prompt("3", **{"1": {"class_type": "Given", "inputs": {"key": "model"}}}))


@pytest.mark.parametrize("weight_dtype", ["fp8_e4m3fn", "fp8_e5m2"])
def test_a_cast_while_loading_is_kept(weight_dtype: str, executor: Executor) -> None:
    cast = {"class_type": "UNETLoader", "inputs": {"unet_name": "tiny.safetensors", "weight_dtype": weight_dtype}}
    parallel = latent(executor.run(prompt("3", **{"1": cast})))
    plain = latent(executor.run(prompt("2")))
    assert relative_error(parallel, plain) > 1e-3
    assert relative_error(parallel, latent(executor.run(prompt("2", **{"1": cast})))) < 1e-2


def test_a_lora_before_the_node_is_merged(executor: Executor, folder: Path) -> None:
    name = "diffusion_model.joint_blocks.0.x_block.mlp.fc1"
    weight = load_file(folder / "tiny.safetensors")[f"{name.removeprefix('diffusion_model.')}.weight"]
    random = torch.Generator().manual_seed(4)
    lora = {
        f"{name}.lora_up.weight": torch.randn(weight.shape[0], 2, generator=random) * 0.1,
        f"{name}.lora_down.weight": torch.randn(2, weight.shape[1], generator=random) * 0.1,
    }
    save_file(lora, folder / "lora.safetensors")
    folder_paths.folder_names_and_paths["loras"][0][:] = [str(folder)]
    inputs = {"model": ["1", 0], "lora_name": "lora.safetensors", "strength_model": 0.8}
    with_lora: Prompt = {
        "9": {"class_type": "LoraLoaderModelOnly", "inputs": inputs},
        "2": {"class_type": "ModelSamplingSD3", "inputs": {"model": ["9", 0], "shift": SHIFT}},
    }
    parallel = latent(executor.run(prompt("3", **with_lora)))
    bypassed = latent(executor.run(prompt("2", **with_lora)))
    assert relative_error(parallel, bypassed) < 1e-4
    assert relative_error(parallel, latent(executor.run(prompt("2")))) > 1e-3


@pytest.mark.parametrize(
    ("between", "message"),
    [
        ({"class_type": "ModelComputeDtype", "inputs": {"model": ["1", 0], "dtype": "bf16"}}, "ModelComputeDtype has"),
        ({"class_type": "Given", "inputs": {"key": "another class"}}, "ComfyUI loaded this model as"),
        ({"class_type": "Given", "inputs": {"key": "patched"}}, "a node skips or replaces layers"),
        (SKIPPING, r"SkipLayerGuidanceDiT \(2\) skips"),
    ],
)
def test_a_model_that_cannot_run_is_refused_before_its_weights_are_copied(
    between: dict[str, Any], message: str, executor: Executor, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = native.clone()
    other.model = copy.copy(native.model)
    other.model.__class__ = type("Other", (type(native.model),), {})
    patched = native.clone()
    patched.set_model_attn1_replace(lambda *args: args[0], "double_block", 0)
    Given.values |= {"model": native, "another class": other, "patched": patched}
    filled: list[Any] = []
    monkeypatch.setattr(memory_file.MemoryFile, "fill", filled.append)
    with pytest.raises(RuntimeError, match=message):
        executor.run(prompt("3", **{"1": {"class_type": "Given", "inputs": {"key": "model"}}, "2": between}))
    assert filled == []


def test_skipped_layers_are_refused_before_weights_load(executor: Executor, native_loads: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"SkipLayerGuidanceDiT \(2\) skips or replaces layers"):
        executor.run(prompt("3", **{"2": SKIPPING}))
    assert native_loads == []
    assert executor.executed[-1] == "3"


def test_fp8_products_are_named(executor: Executor) -> None:
    fast = {"class_type": "UNETLoader", "inputs": {"unet_name": "tiny.safetensors", "weight_dtype": "fp8_e4m3fn_fast"}}
    executor.run(prompt("3", **{"1": fast}))
    assert executor.texts["3"][0].endswith("the ranks compute in float32, not in fp8")


def test_another_compute_dtype_is_refused(executor: Executor) -> None:
    between = {"class_type": "ModelComputeDtype", "inputs": {"model": ["1", 0], "dtype": "bf16"}}
    with pytest.raises(RuntimeError, match=r"remove it, and choose the dtype in Parallel Loader"):
        executor.run(prompt("3", **{"2": between}))
    latent(executor.run(prompt("3", **{"2": between | {"inputs": {"model": ["1", 0], "dtype": "default"}}})))


def test_weights_that_do_not_fit_are_refused_before_anything_is_copied(
    executor: Executor, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Given.values["model"] = native
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda *args, **options: 1_000_000_000)
    with pytest.raises(RuntimeError, match=r"one more copy .* takes 0.0 GB, and 1.0 GB of memory are free"):
        executor.run(prompt("3", **{"1": {"class_type": "Given", "inputs": {"key": "model"}}}))
