"""Loading: safetensors only, in the requested dtype, with clear errors for incomplete folders."""

import json
import shutil
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.distributed import mesh
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.loading import load as load_module
from parallel_backend.loading.components import ComponentCache
from parallel_backend.loading.load import check_component, load_transformer, resolve_dtype
from tests.support import tiny


def _alone() -> mesh.DeviceMesh:
    """Return the mesh of one rank."""
    single = mesh.create(ParallelLayout(), rank=0, timeout=timedelta(seconds=1))
    assert single is not None
    return single


ALONE = _alone()
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A copy of the checkpoint that the test may change."""
    return open_checkpoint(shutil.copytree(checkpoint, tmp_path / "model"))


def test_pickled_weights_are_refused(copy):
    folder = copy.path / "transformer"
    torch.save(load_file(folder / WEIGHTS), folder / "diffusion_pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    with pytest.raises(InvalidRequest, match=r"no \.safetensors file; weights in \.bin"):
        check_component(copy, "transformer")


@pytest.mark.parametrize("name", ["part.bin", "../outside.safetensors"])
def test_an_index_that_lists_an_unsupported_file_is_refused(copy, name):
    index = copy.path / "transformer" / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": {"proj_out.weight": name}}))
    with pytest.raises(InvalidRequest, match=r"which is not a \.safetensors file in the same folder"):
        check_component(copy, "transformer")


def test_quantised_weights_are_refused(copy):
    file = copy.path / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gguf"}}))
    with pytest.raises(InvalidRequest, match="is quantised"):
        check_component(copy, "transformer")


def test_auto_is_float32_on_a_cpu(copy):
    assert resolve_dtype(copy, "auto", torch.device("cpu")) == torch.float32


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
    assert resolve_dtype(copy, "auto", torch.device("cuda")) == wanted


def test_half_precision_keeps_float32_where_diffusers_does(copy):
    family = load_transformer(copy, torch.bfloat16, torch.device("cpu"), ALONE)
    assert family.dtype == torch.bfloat16
    assert family.module.scale_shift_table.dtype == torch.float32
    assert family.module.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in family.module.parameters())


def test_loaded_weights_are_those_of_the_file(copy):
    family = load_transformer(copy, torch.float32, torch.device("cpu"), ALONE)
    original = tiny.transformer(tiny.Tiny())
    for name, parameter in original.named_parameters():
        assert torch.equal(family.module.get_parameter(name), parameter), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"proj_out.weight": "part-2.safetensors"}}', r"lacks part-2\.safetensors, which"),
        ('{"weight_map": {"proj_out.we', "is not a valid index of weight files"),
        ("[]", "is not a valid index of weight files"),
    ],
)
def test_a_missing_file_or_an_invalid_index_is_refused(copy, text, message):
    (copy.path / "transformer" / f"{WEIGHTS}.index.json").write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        check_component(copy, "transformer")


def test_a_file_with_an_unknown_name_is_refused(copy):
    folder = copy.path / "transformer"
    (folder / WEIGHTS).rename(folder / "diffusion_pytorch_model.fp16.safetensors")
    with pytest.raises(InvalidRequest, match=r"fp16\.safetensors, but weights are read from .* rename the file"):
        check_component(copy, "transformer")


@pytest.mark.parametrize(("component", "file"), [("text_encoder", "model.safetensors"), ("transformer", WEIGHTS)])
def test_missing_weights_are_refused(copy, component, file):
    path = copy.path / component / file
    weights = load_file(path)
    first = sorted(name for name, tensor in weights.items() if tensor.ndim == 2)[0]
    del weights[first]
    save_file(weights, path, metadata={"format": "pt"})
    load = getattr(load_module, f"load_{component}")
    with pytest.raises(InvalidRequest, match=rf"{component}.* lacks \d+ weights \({first}"):
        load(copy, torch.float32, torch.device("cpu"), *([ALONE] if component == "transformer" else []))


def test_a_full_device_unloads_other_models_then_idle_components_and_retries(copy):
    room = iter([True, False, False])
    pipeline = ComponentCache(copy, torch.float32, torch.device("cpu"), lambda: next(room))
    attempts = []

    def load() -> str:
        attempts.append(1)
        if len(attempts) < 2:
            raise torch.OutOfMemoryError("full")
        return "weights"

    assert pipeline._part("vae", load) == "weights"
    assert pipeline.loads == 1
    with pytest.raises(torch.OutOfMemoryError, match="for good"):
        pipeline._part("text_encoder", Mock(side_effect=torch.OutOfMemoryError("for good")))
    assert not pipeline.has("vae")
