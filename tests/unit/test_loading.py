"""Weights are safetensors, in the dtype that was asked for, and nothing else is opened."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend import loading
from parallel_backend.checkpoint import Checkpoint
from parallel_backend.errors import InvalidRequest
from tests import tiny

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A copy that a test may change."""
    return Checkpoint.open(shutil.copytree(checkpoint, tmp_path / "model"))


def test_pickled_weights_are_refused(copy):
    folder = copy.path / "transformer"
    torch.save(load_file(folder / WEIGHTS), folder / "diffusion_pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(InvalidRequest, match=r"no \.safetensors file; weights in \.bin"):
        loading.check_component(copy, "transformer")


@pytest.mark.parametrize("name", ["part.bin", "../outside.safetensors"])
def test_an_index_that_leads_elsewhere_is_refused(copy, name):
    index = copy.path / "transformer" / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": {"proj_out.weight": name}}))
    with pytest.raises(InvalidRequest, match=r"which is no \.safetensors file beside it"):
        loading.check_component(copy, "transformer")


def test_quantised_weights_are_refused(copy):
    file = copy.path / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gguf"}}))
    with pytest.raises(InvalidRequest, match="is quantised"):
        loading.check_component(copy, "transformer")


def test_auto_is_float32_on_a_cpu(copy):
    assert loading.resolve_dtype(copy, "auto", torch.device("cpu")) == torch.float32


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float8_e4m3fn, torch.bfloat16),
    ],
)
def test_auto_on_a_gpu_follows_the_file(copy, stored, wanted):
    file = copy.path / "transformer" / WEIGHTS
    weights = {name: tensor.to(stored) for name, tensor in load_file(file).items()}
    weights["small"] = torch.zeros(1)
    save_file(weights, file)
    assert loading.resolve_dtype(copy, "auto", torch.device("cuda")) == wanted


def test_half_precision_keeps_in_float32_what_diffusers_does(copy):
    family = loading.load_transformer(copy, torch.bfloat16, torch.device("cpu"))
    assert family.dtype == torch.bfloat16
    assert family.module.scale_shift_table.dtype == torch.float32
    assert family.module.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in family.module.parameters())


def test_loaded_weights_are_those_of_the_file(copy):
    family = loading.load_transformer(copy, torch.float32, torch.device("cpu"))
    original = tiny.transformer(tiny.Tiny())
    for name, parameter in original.named_parameters():
        assert torch.equal(family.module.get_parameter(name), parameter), name
