"""Parallel Model in ComfyUI's own executor, behind ComfyUI's own loaders of files."""

from pathlib import Path

import folder_paths
import pytest
import torch
from any_folder_name.nodes.backend import executing
from any_folder_name.parallel_backend.client.client import Client
from comfy_execution.utils import CurrentNodeContext
from helpers import loras
from helpers.executor import Executor, Given, Prompt
from helpers.inside_fixtures import relative_error
from helpers.parallel_model import CASE, DEFAULT_SHIFT, REPLACING, latent, prompt
from safetensors.torch import load_file, save_file


def loads(backend: Client, folder: Path) -> list[int]:
    """Return how often each rank has loaded a component of the folder's file."""
    models = [model for rank in backend.status().ranks for model in rank.models]
    return [model.loads for model in models if model.path == str(folder / "tiny.safetensors")]


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


def test_another_seed_or_shift_reads_nothing(executor: Executor, backend: Client, folder: Path) -> None:
    first = latent(executor.run(prompt("3")))
    before = loads(backend, folder)
    assert before == [1, 1]
    executor.run(prompt("3"))
    assert not {"3", "7"} & set(executor.executed)
    executor.run(prompt("3", seed=6))
    assert "3.0.0.1" not in executor.executed
    shifted = latent(executor.run(prompt("3", shift=8.0)))
    assert "3.0.0.1" not in executor.executed
    assert loads(backend, folder) == before
    assert relative_error(shifted, first) > 1e-3
    assert relative_error(shifted, latent(executor.run(prompt("2", shift=8.0)))) < 1e-4


def test_loras_between_are_factors_on_the_ranks(
    executor: Executor, backend: Client, folder: Path, native_loads: list[str]
) -> None:
    save_file(loras.plain(CASE.native(), "diffusion_model.", rank=3, seed=1), folder / "lora.safetensors")
    folder_paths.folder_names_and_paths["loras"][0][:] = [str(folder)]

    def prompt_with(last: str, strength: float) -> Prompt:
        inputs = {"model": ["1", 0], "lora_name": "lora.safetensors", "strength_model": strength}
        behind = {"model": ["9", 0], "shift": 5.0}
        return prompt(
            last,
            **{
                "9": {"class_type": "LoraLoaderModelOnly", "inputs": inputs},
                "2": {"class_type": "ModelSamplingSD3", "inputs": behind},
            },
        )

    plain = latent(executor.run(prompt("3")))
    before = loads(backend, folder)
    results = [latent(executor.run(prompt_with("3", strength))) for strength in (0.4, 0.8)]
    assert native_loads == []
    assert loads(backend, folder) == before
    for strength, result in zip((0.4, 0.8), results, strict=True):
        assert relative_error(result, plain) > 1e-2
        assert relative_error(result, latent(executor.run(prompt_with("2", strength)))) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize("sampler", ["KSampler", "ParallelSampler"])
def test_compiled_blocks_equal_the_bypassed_workflow(
    sampler: str, executor: Executor, folder: Path, native_loads: list[str]
) -> None:
    save_file(loras.plain(CASE.native(), "diffusion_model.", rank=3, seed=1), folder / "lora.safetensors")
    folder_paths.folder_names_and_paths["loras"][0][:] = [str(folder)]

    def nodes(strength: float) -> Prompt:
        lora = {"model": ["1", 0], "lora_name": "lora.safetensors", "strength_model": strength}
        return {
            "9": {"class_type": "LoraLoaderModelOnly", "inputs": lora},
            "2": {"class_type": "ModelSamplingSD3", "inputs": {"model": ["9", 0], "shift": 5.0}},
            "3": {"class_type": "ParallelModel", "inputs": {"model": ["2", 0], "devices": "0,1", "compile": "blocks"}},
        }

    for strength, seed in ((0.0, 5), (0.4, 5), (0.8, 6)):
        result = latent(executor.run(prompt("3", sampler=sampler, seed=seed, **nodes(strength))))
        assert native_loads == []
        bypassed = latent(executor.run(prompt("2", seed=seed, **nodes(strength))))
        native_loads.clear()
        assert relative_error(result, bypassed) < 1e-4


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_a_lora_for_another_model_is_named(shape: tuple[int, ...], executor: Executor, folder: Path) -> None:
    layer = "diffusion_model.joint_blocks.0.x_block.mlp.fc1" if shape else "another.layer"
    up_and_down = {f"{layer}.lora_{each}.weight": torch.ones(2, 2) for each in ("up", "down")}
    save_file(up_and_down, folder / "alien.safetensors")
    folder_paths.folder_names_and_paths["loras"][0][:] = [str(folder)]
    lora = {"model": ["1", 0], "lora_name": "alien.safetensors", "strength_model": 1.0}
    nodes: Prompt = {
        "9": {"class_type": "LoraLoaderModelOnly", "inputs": lora},
        "2": {"class_type": "ModelSamplingSD3", "inputs": {"model": ["9", 0], "shift": 5.0}},
    }
    with pytest.raises(RuntimeError, match=r"^alien\.safetensors fits no weight of tiny\.safetensors: "):
        executor.run(prompt("3", **nodes))


def test_the_loras_that_reach_a_node_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: Prompt = {
        "1": {"class_type": "LoraLoaderModelOnly", "inputs": {"lora_name": "base.safetensors"}},
        "2": {"class_type": "CreateHookLora", "inputs": {"lora_name": "hook.safetensors"}},
        "3": {"class_type": "LoraLoaderModelOnly", "inputs": {"lora_name": "elsewhere.safetensors"}},
        "4": {"class_type": "ConditioningSetProperties", "inputs": {"hooks": ["2", 0]}},
        "5": {"class_type": "KSampler", "inputs": {"model": ["1", 0], "positive": ["4", 0]}},
    }
    monkeypatch.setattr(executing, "_prompt", lambda prompt_id: nodes)
    with CurrentNodeContext("prompt", "5"):
        assert executing.executing_lora() == "base.safetensors or hook.safetensors"
        assert executing.executing_lora(hook=True) == "hook.safetensors"
    with CurrentNodeContext("prompt", "3"):
        assert executing.executing_lora() == "elsewhere.safetensors"


def test_a_node_of_another_prompt_has_the_same_id_and_not_the_same_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI numbers the nodes that others expand into from the beginning in each prompt."""
    monkeypatch.setattr(executing, "_prompt", lambda prompt_id: {})
    for prompt_id in ("first", "second"):
        with CurrentNodeContext(prompt_id, "3"):
            executing.remember_expanded("3.0.1", {"lora_name": f"{prompt_id}.safetensors"})
            executing.remember_expanded("3.0.2", {"strength": 1.0})
        for node_id, name in (("3.0.1", f"{prompt_id}.safetensors"), ("3.0.2", "the LoRA")):
            with CurrentNodeContext(prompt_id, node_id):
                assert executing.executing_lora() == name
    for other in ("first", "third"):
        with CurrentNodeContext(other, "3.0.1"):
            assert executing.executing_lora() == "the LoRA"


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


def test_replaced_attention_is_refused_before_weights_load(executor: Executor, native_loads: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"PerturbedAttentionGuidance \(2\) replaces attention"):
        executor.run(prompt("3", **{"2": REPLACING}))
    assert native_loads == []
    assert executor.executed[-1] == "3"


def test_another_compute_dtype_is_refused(executor: Executor) -> None:
    between = {"class_type": "ModelComputeDtype", "inputs": {"model": ["1", 0], "dtype": "bf16"}}
    with pytest.raises(RuntimeError, match=r"remove it, and choose the dtype in Parallel Loader"):
        executor.run(prompt("3", **{"2": between}))
    latent(executor.run(prompt("3", **{"2": between | {"inputs": {"model": ["1", 0], "dtype": "default"}}})))
