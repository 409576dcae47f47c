"""Parallel VAE in ComfyUI's own executor, behind Load VAE."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.diffusers_convert
import comfy.utils
import diffusers
import folder_paths
import pytest
import torch
from any_folder_name.nodes.backend import connection
from any_folder_name.nodes.vae import ParallelVAE, ParallelVAEDecode, ParallelVAEEncode
from any_folder_name.parallel_backend.client.client import Client
from helpers.executor import Executor, Given, Prompt
from helpers.inside_fixtures import relative_error
from helpers.native_vaes import IMAGE, randomize, wan21
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]


def image_weights() -> Weights:
    """Return the kind of Flux, as wide as ComfyUI's own class for it."""
    widths = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "latent_channels": 16}
    theirs = diffusers.AutoencoderKL(**(IMAGE | widths), use_quant_conv=False, use_post_quant_conv=False)
    weights: Weights = comfy.diffusers_convert.convert_vae_state_dict(randomize(theirs).state_dict())
    return weights


def video_weights() -> Weights:
    """Return the kind of Wan 2.1."""
    weights: Weights = wan21()[0].state_dict()
    return weights


FILES = {"image": (image_weights, (2, 16, 7, 5)), "video": (video_weights, (1, 16, 2, 7, 5))}
"""Weights whose class ComfyUI recognises, and latents of odd sizes."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder_paths.folder_names_and_paths["vae"][0][:] = [str(tmp_path)]
    folder_paths.filename_list_cache.clear()
    return tmp_path


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that ComfyUI itself has read."""
    read: list[str] = []
    load: Callable[..., Any] = comfy.utils.load_torch_file

    def recorded(path: str, *args: Any, **options: Any) -> Any:
        read.append(Path(path).name)
        return load(path, *args, **options)

    monkeypatch.setattr(comfy.utils, "load_torch_file", recorded)
    return read


@pytest.fixture
def executor(folder: Path, backend: Client, monkeypatch: pytest.MonkeyPatch) -> Executor:
    connection.use_client(backend)
    monkeypatch.setattr(connection, "_release", lambda spec, user: None)
    return Executor(ParallelVAE, ParallelVAEDecode, ParallelVAEEncode)


def prompt(vae: str, decode: str = "VAEDecode", encode: str = "VAEEncode") -> Prompt:
    return {
        "1": {"class_type": "VAELoader", "inputs": {"vae_name": "tiny.safetensors"}},
        "2": {"class_type": "ParallelVAE", "inputs": {"vae": ["1", 0], "devices": "0,1"}},
        "3": {"class_type": "Given", "inputs": {"key": "latent"}},
        "4": {"class_type": decode, "inputs": {"samples": ["3", 0], "vae": [vae, 0]}},
        "5": {"class_type": encode, "inputs": {"pixels": ["4", 0], "vae": [vae, 0]}},
        "6": {"class_type": "Recorder", "inputs": {"value": ["4", 0]}},
        "7": {"class_type": "Recorder", "inputs": {"value": ["5", 0]}},
    }


@pytest.mark.parametrize("name", FILES)
def test_pixels_and_latents_are_those_of_the_bypassed_workflow(
    name: str, executor: Executor, folder: Path, read_files: list[str]
) -> None:
    weights, shape = FILES[name]
    save_file({key: each.clone().contiguous() for key, each in weights().items()}, folder / "tiny.safetensors")
    Given.values = {"latent": {"samples": torch.randn(shape, generator=torch.Generator().manual_seed(2))}}
    ours = [executor.run(prompt("2")), executor.run(prompt("2", "ParallelVAEDecode", "ParallelVAEEncode"))]
    assert read_files == []
    reference = executor.run(prompt("1"))
    assert read_files == ["tiny.safetensors"]
    for pixels, latent in ours:
        assert relative_error(pixels, reference[0]) < 1e-4
        assert relative_error(latent["samples"], reference[1]["samples"]) < 1e-4


def test_a_file_without_a_vae_is_refused(executor: Executor, folder: Path) -> None:
    save_file({"something.weight": torch.zeros(2, 2)}, folder / "tiny.safetensors")
    with pytest.raises(RuntimeError, match="belong to no supported architecture; the nearest is"):
        executor.run(prompt("2"))


def test_a_linked_name_is_refused_before_comfyui_loads_the_vae(executor: Executor, read_files: list[str]) -> None:
    Given.values = {"name": "tiny.safetensors", "latent": {"samples": torch.zeros(1, 16, 2, 7, 5)}}
    linked = {"class_type": "VAELoader", "inputs": {"vae_name": ["8", 0]}}
    name = {"class_type": "Given", "inputs": {"key": "name"}}
    with pytest.raises(RuntimeError, match="Parallel VAE finds no file behind its vae"):
        executor.run(prompt("2") | {"1": linked, "8": name})
    assert read_files == []
