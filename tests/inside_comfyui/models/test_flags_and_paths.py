"""ComfyUI's flags and folders of any name: the workflow with Parallel Model against the same workflow bypassed."""

from pathlib import Path
from typing import Any

import comfy.cli_args
import folder_paths
import pytest
import torch
from helpers import dynamic_vram
from helpers.executor import Executor, Prompt
from helpers.inside_fixtures import relative_error
from helpers.parallel_model import latent, prompt
from safetensors.torch import load_file, save_file

CLOSE = 1e-5
FLAGS: dict[str, tuple[Any, torch.dtype]] = {
    "fp32_unet": (True, torch.bfloat16),
    "bf16_unet": (True, torch.bfloat16),
    "fp16_unet": (True, torch.float16),
    "force_fp16": (True, torch.float16),
    "force_fp32": (True, torch.float16),
    "fast": (set(comfy.cli_args.PerformanceFeature), torch.float32),
    "force_upcast_attention": (True, torch.float32),
    "dont_upcast_attention": (True, torch.float32),
    "force_channels_last": (True, torch.float32),
    "deterministic": (True, torch.float32),
    "disable_smart_memory": (True, torch.float32),
    "lowvram": (True, torch.float32),
}
"""Values, and the dtype in which the file is stored: on a CPU, ComfyUI rounds weights to what a flag says."""


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.daily(1)
def test_a_flag_changes_nothing(
    flag: str, executor: Executor, folder: Path, native_loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    value, stored = FLAGS[flag]
    name = f"{stored}.safetensors"
    save_file({key: each.to(stored) for key, each in load_file(folder / "tiny.safetensors").items()}, folder / name)
    monkeypatch.setattr(comfy.cli_args.args, flag, value)
    loader: Prompt = {"1": {"class_type": "UNETLoader", "inputs": {"unet_name": name, "weight_dtype": "default"}}}
    parallel = latent(executor.run(prompt("3", **loader)))
    assert native_loads == []
    with dynamic_vram.off():  # with it, weights keep a file's dtype until they are on a GPU
        assert relative_error(parallel, latent(executor.run(prompt("2", **loader)))) < CLOSE


@pytest.mark.parametrize("name", ["mit Leerzeichen/und (Klammern) [1].safetensors", "模型/größe é 🎨.safetensors"])
def test_a_path_may_have_any_letters(
    name: str, executor: Executor, folder: Path, tmp_path: Path, native_loads: list[str], monkeypatch: Any
) -> None:
    place = tmp_path / "Ordner ß 模型"
    (place / name).parent.mkdir(parents=True)
    save_file(load_file(folder / "tiny.safetensors"), place / name)
    places = ([str(folder), str(place)], folder_paths.supported_pt_extensions)
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusion_models", places)
    loader: Prompt = {"1": {"class_type": "UNETLoader", "inputs": {"unet_name": name, "weight_dtype": "default"}}}
    parallel = latent(executor.run(prompt("3", **loader)))
    assert native_loads == []
    assert relative_error(parallel, latent(executor.run(prompt("2")))) < CLOSE
