"""Parallel VAE in ComfyUI's own executor, behind Load VAE."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.cli_args
import comfy.model_patcher
import comfy.sd
import comfy.utils
import folder_paths
import pytest
import torch
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.nodes.remote.adopt import copy_vae
from any_folder_name.nodes.vae import ParallelVAE, ParallelVAEDecode, ParallelVAEEncode
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.client.client import Client
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.loading.load import load_vae
from any_folder_name.parallel_backend.vaes import VAES, vae_of
from helpers.executor import Executor, Given, Prompt
from helpers.inside_fixtures import new_session, relative_error
from helpers.native_vaes import NATIVE, image_weights, video_weights
from safetensors.torch import save_file

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
def executor(folder: Path, backend: Client) -> Executor:
    new_session(backend)
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
    ours = [executor.run(prompt("2"))]
    assert executor.texts["2"] == ["tiny.safetensors: ComfyUI does not load it"]
    ours.append(executor.run(prompt("2", "ParallelVAEDecode", "ParallelVAEEncode")))
    assert read_files == []
    reference = executor.run(prompt("1"))
    assert read_files == ["tiny.safetensors"]
    for pixels, latent in ours:
        assert relative_error(pixels, reference[0]) < 1e-4
        assert relative_error(latent["samples"], reference[1]["samples"]) < 1e-4


def test_a_file_without_a_vae_is_refused(executor: Executor, folder: Path) -> None:
    save_file({"something.weight": torch.zeros(2, 2)}, folder / "tiny.safetensors")
    with pytest.raises(RuntimeError, match="belong to no supported architecture; supported: "):
        executor.run(prompt("2"))


@pytest.fixture
def video_file(folder: Path) -> dict[str, torch.Tensor]:
    """A latent for the file in the folder."""
    weights, shape = FILES["video"]
    save_file({key: each.clone().contiguous() for key, each in weights().items()}, folder / "tiny.safetensors")
    return {"samples": torch.randn(shape, generator=torch.Generator().manual_seed(2))}


def test_a_name_may_arrive_by_a_link(executor: Executor, video_file: dict[str, torch.Tensor]) -> None:
    Given.values = {"name": "tiny.safetensors", "latent": video_file}
    linked = {"class_type": "VAELoader", "inputs": {"vae_name": ["8", 0]}}
    name = {"class_type": "Given", "inputs": {"key": "name"}}
    pixels, _ = executor.run(prompt("2") | {"1": linked, "8": name})
    reference, _ = executor.run(prompt("1"))
    assert relative_error(pixels, reference) < 1e-4


def test_a_vae_from_elsewhere_is_copied(
    executor: Executor, folder: Path, video_file: dict[str, torch.Tensor], read_files: list[str]
) -> None:
    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(folder / "tiny.safetensors")))
    Given.values = {"vae": vae, "latent": video_file}
    read_files.clear()
    elsewhere = {"1": {"class_type": "Given", "inputs": {"key": "vae"}}}
    ours = executor.run(prompt("2", "ParallelVAEDecode", "ParallelVAEEncode") | elsewhere)
    assert executor.texts["2"] == ["a copy of the weights that ComfyUI has loaded; weights load at first use"]
    reference = executor.run(prompt("1") | elsewhere)
    assert read_files == []
    assert relative_error(ours[0], reference[0]) < 1e-4
    assert relative_error(ours[1]["samples"], reference[1]["samples"]) < 1e-4


@pytest.mark.newest
@torch.no_grad()
@pytest.mark.parametrize("loaded", [False, True], ids=["--bf16-vae", "loaded in bf16"])
@pytest.mark.parametrize("name", ["video", pytest.param("image", marks=pytest.mark.long)])
@pytest.mark.daily(1)
def test_the_dtype_is_that_of_the_bypassed_workflow(
    name: str, loaded: bool, executor: Executor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, only options and loaders choose another dtype than float32."""
    weights, shape = FILES[name]
    shape = (1, *shape[1:-2], 3, 3)  # processors without instructions for bfloat16 take minutes for more
    contents = {key: each.clone().contiguous() for key, each in weights().items()}
    save_file(contents, folder / "tiny.safetensors")
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    source = {"1": {"class_type": "Given", "inputs": {"key": "vae"}}} if loaded else {}
    Given.values = {"latent": {"samples": latent}, "vae": comfy.sd.VAE(sd=dict(contents), dtype=torch.bfloat16)}
    monkeypatch.setattr(comfy.cli_args.args, "bf16_vae", not loaded)
    ours, own = executor.run(prompt("2") | source), executor.run(prompt("1") | source)
    exact = comfy.sd.VAE(sd=dict(contents), dtype=torch.float32)
    pixels = exact.decode(latent).reshape(own[0].shape)
    error = relative_error(own[0], pixels)
    assert error / 4 < relative_error(ours[0], pixels) < 2 * error
    encoded = exact.encode(pixels)
    error = relative_error(own[1]["samples"], encoded)
    assert error / 4 < relative_error(ours[1]["samples"], encoded) < 2 * error


@pytest.mark.parametrize("name", NATIVE)
def test_each_class_is_copied_bit_for_bit(name: str) -> None:
    native, theirs = NATIVE[name]()
    cpu = torch.device("cpu")
    patcher = comfy.model_patcher.ModelPatcher(native, load_device=cpu, offload_device=cpu)
    copied = copy_vae(SimpleNamespace(first_stage_model=native, patcher=patcher))
    scale = vae_of(open_checkpoint(copied.path)).scale
    copied.fill()
    loaded = load_vae(open_checkpoint(copied.path), cpu).state_dict()
    assert scale == VAES[type(theirs).__name__](theirs.config).scale
    assert all(torch.equal(loaded[key], tensor) for key, tensor in theirs.state_dict().items())


def test_an_approximate_vae_is_refused_before_comfyui_loads_it(executor: Executor, read_files: list[str]) -> None:
    with pytest.raises(RuntimeError, match="taesd is no file of a VAE"):
        executor.run(prompt("2") | {"1": {"class_type": "VAELoader", "inputs": {"vae_name": "taesd"}}})
    assert read_files == []


def test_a_vae_that_is_not_known_is_refused_by_its_nearest(executor: Executor) -> None:
    pixel_space = comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)})
    Given.values = {"vae": pixel_space, "latent": {"samples": torch.zeros(1, 3, 8, 8)}}
    with pytest.raises(RuntimeError, match="the copied model: the weights belong to no supported architecture"):
        executor.run(prompt("2") | {"1": {"class_type": "Given", "inputs": {"key": "vae"}}})


def test_the_vae_of_a_model_that_is_not_known_works(
    executor: Executor, tmp_path: Path, video_file: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {f"first_stage_model.{key}": each.clone().contiguous() for key, each in video_weights().items()}
    whole["model.diffusion_model.input_blocks.0.0.weight"] = torch.zeros(2, 2)
    checkpoints = ([str(tmp_path)], folder_paths.supported_pt_extensions)
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "checkpoints", checkpoints)
    save_file(whole, tmp_path / "whole.safetensors")
    loader = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "whole.safetensors"}}
    Given.values = {"latent": video_file}
    behind = {"class_type": "ParallelVAE", "inputs": {"vae": ["1", 2], "devices": "0,1"}}
    assert executor.run(prompt("2") | {"1": loader, "2": behind})[0].shape[0] > 0
    with pytest.raises(InvalidRequest, match=r"whole\.safetensors: the file holds a UNet, as Stable Diffusion"):
        bridge_for(open_checkpoint(tmp_path / "whole.safetensors"))
