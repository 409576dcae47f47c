"""Files with parts that cannot be used: refused before anything loads, and only where the part is wanted."""

from pathlib import Path
from typing import Any

import folder_paths
import pytest
import torch
from any_folder_name.nodes.loader import ParallelLoader, open_vae
from any_folder_name.nodes.remote.preflight import VAE_OUTPUT, check_output
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from helpers.inside_fixtures import loader_node
from helpers.native_vaes import video_weights
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]
SCALE = {"vae.decoder.conv1.scale_weight": torch.ones(1)}
INTEGERS = {"vae.conv1.weight": torch.zeros(32, 32, 1, 1, 1, dtype=torch.int8)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder_paths.folder_names_and_paths["checkpoints"][0][:] = [str(tmp_path)]
    folder_paths.filename_list_cache.clear()
    return tmp_path


def transformer(native: Any) -> Weights:
    return {f"model.diffusion_model.{key}": each for key, each in native.model.diffusion_model.state_dict().items()}


def vae() -> Weights:
    return {f"vae.{key}": each for key, each in video_weights().items()}


def save(path: Path, *weights: Weights) -> Path:
    save_file({key: each.clone().contiguous() for part in weights for key, each in part.items()}, path)
    return path


@pytest.mark.parametrize(
    ("changed", "message"), [(SCALE, "has scaled weights"), (INTEGERS, "has dtype I8, which is not supported")]
)
def test_a_vae_whose_weights_cannot_be_read_is_refused_before_it_decodes(
    folder: Path, native: Any, changed: Weights, message: str
) -> None:
    path = save(folder / "whole.safetensors", transformer(native), vae(), changed)
    with pytest.raises(InvalidRequest, match=f"whole.safetensors.* {message}"):
        open_vae(path, "0,1", "1")
    with pytest.raises(InvalidRequest, match=f"{message}.*; load one with ComfyUI's Load VAE node instead"):
        check_output(open_checkpoint(path), VAE_OUTPUT)
    assert ParallelLoader.validate_inputs("checkpoints/whole.safetensors", "fp32", "0,1") is True
    node = loader_node()
    node.hidden.prompt = {"9": {"class_type": "PreviewImage", "inputs": {"images": ["7", 2]}}}
    with pytest.raises(InvalidRequest, match=message):
        node.execute("checkpoints/whole.safetensors", "fp32", "0,1")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "holds no diffusion model"),
        ({"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(2, 2)}, "whole.safetensors: the "),
    ],
)
def test_a_file_with_a_vae_alone_is_no_model(folder: Path, extra: Weights, message: str) -> None:
    path = save(folder / "whole.safetensors", vae(), extra)
    assert message in str(ParallelLoader.validate_inputs("checkpoints/whole.safetensors", "fp32", "0,1"))
    assert open_vae(path, "0,1", "1").checkpoint.components == {"vae": "AutoencoderKLWan"}
