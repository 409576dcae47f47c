"""Loading: safetensors only, in the requested dtype, with clear errors for incomplete folders."""

import json
import shutil
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.checkpoint.weight_headers import read_files
from parallel_backend.distributed import mesh
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.registry import family_of
from parallel_backend.loading import load as load_module
from parallel_backend.loading import weight_source
from parallel_backend.loading.load import check_component, check_dtype, resolve_dtype, resolve_vae_dtype
from parallel_backend.loading.parts import DeviceMemory, Parts
from parallel_backend.loading.transformer_part import load_transformer
from parallel_backend.protocol.messages import Forward
from parallel_backend.vaes import VAES
from tests.ranks.requests import Case
from tests.support import compressed, tiny
from tests.unit.conftest import one_rank

ALONE = mesh.alone()
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


SCALE = torch.ones(())
MARKS = {
    "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn),
    "{}.scale_weight": SCALE,
    "{}.weight_scale": SCALE,
    "{}.comfy_quant": torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8),
    "{}.input_scale": SCALE,
    "{}.weight_scale_inv": SCALE,
    "{}.SCB": SCALE,
    "{}.weight": torch.ones(8, 8, dtype=torch.int8),
    "{}.more": torch.ones(8, 8, dtype=torch.uint8),
}
"""What files with compressed weights have, which diffusers and transformers ignore or take for numbers."""


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize(
    ("component", "file", "layer"),
    [
        ("text_encoder", "model.safetensors", "encoder.block.0.layer.0.SelfAttention.q"),
        ("vae", WEIGHTS, "encoder.conv_in"),
    ],
)
def test_compressed_weights_of_other_components_are_refused_by_name(copy, component, file, layer, mark):
    path, name = copy.path / component / file, mark.format(layer)
    tensors = load_file(path)
    save_file({key: each for key, each in tensors.items() if key != name} | {name: MARKS[mark]}, path)
    with pytest.raises(InvalidRequest, match=rf"{component} has compressed weights \({name}\), .*use plain weights"):
        check_component(copy, component)
    check_component(copy, "transformer")


LAYER = "blocks.0.attn1.to_q"


def fp8(tensors):
    return tensors[f"{LAYER}.weight"].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda _: {f"{LAYER}.weight_scale": SCALE}, "weight_scale belongs to no layer"),
        (lambda _: {f"{LAYER}.weight": torch.ones(48, 48, dtype=torch.int8)}, f"{LAYER}.weight has dtype I8, which is"),
        (lambda _: {f"{LAYER}.SCB": SCALE}, "in bitsandbytes' format"),
        (lambda tensors: {f"{LAYER}.weight": fp8(tensors), f"{LAYER}.weight_gain": SCALE}, "weight_gain beside the"),
    ],
)
def test_a_folders_transformer_has_known_scales_or_none(copy, changes, message):
    path = copy.path / "transformer" / WEIGHTS
    tensors = load_file(path)
    save_file(tensors | changes(tensors), path)
    with pytest.raises(InvalidRequest, match=message):
        load_transformer(copy, torch.float32, torch.device("cpu"), ALONE)


@pytest.mark.parametrize(
    "write", [compressed.write_scaled, lambda *args: compressed.write_described(*args, "fp8 e4m3")]
)
def test_a_folders_transformer_may_be_compressed(copy, write):
    path = copy.path / "transformer" / WEIGHTS
    decoded = write(path, load_file(path))
    family = load_transformer(copy, torch.float32, torch.device("cpu"), ALONE)
    for name, wanted in decoded.items():
        layer, _, kind = name.rpartition(".")
        held = getattr(family.module.get_submodule(layer), kind)
        assert torch.allclose(held.detach(), wanted, rtol=1e-6), name


def test_auto_is_float32_on_a_cpu(copy):
    assert resolve_dtype(copy, "auto", torch.device("cpu"), bfloat16=True) == torch.float32


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float8_e4m3fn, torch.bfloat16),
    ],
)
def test_auto_on_a_gpu_follows_the_file(copy, stored, wanted, monkeypatch):
    file = copy.path / "transformer" / WEIGHTS
    weights = {name: tensor.to(stored) for name, tensor in load_file(file).items()}
    weights["small"] = torch.zeros(1)
    save_file(weights, file)
    gpu = torch.device("cuda")
    assert resolve_dtype(copy, "auto", gpu, bfloat16=True) == wanted
    assert resolve_dtype(copy, "auto", gpu, bfloat16=False) == torch.float16
    assert resolve_dtype(copy, "bfloat16", gpu, bfloat16=False) == torch.bfloat16
    monkeypatch.setattr(family_of(copy.components["transformer"]), "float16", False)
    assert resolve_dtype(copy, "auto", gpu, bfloat16=True) == torch.bfloat16
    assert resolve_dtype(copy, "auto", gpu, bfloat16=False) == torch.float32


@pytest.mark.parametrize(
    ("name", "ampere", "older"),
    [
        ("AutoencoderKL", torch.bfloat16, torch.float32),
        ("AutoencoderKLWan", torch.bfloat16, torch.float16),
        ("AutoencoderKLMochi", torch.float16, torch.float16),
    ],
)
def test_a_vae_has_the_first_dtype_that_its_class_works_in_and_all_gpus_have(name, ampere, older):
    vae, gpu = VAES[name]({}), torch.device("cuda")
    assert resolve_vae_dtype(vae, "auto", gpu, bfloat16=True) == ampere
    assert resolve_vae_dtype(vae, "auto", gpu, bfloat16=False) == older
    assert resolve_vae_dtype(vae, "float32", gpu, bfloat16=True) == torch.float32
    cpu = torch.device("cpu")
    assert resolve_vae_dtype(vae, "auto", cpu, bfloat16=True) == torch.float32
    assert resolve_vae_dtype(vae, "bfloat16", cpu, bfloat16=True) == torch.bfloat16


def test_bfloat16_is_refused_where_torch_does_not_even_emulate_it(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "mock GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    check_dtype(torch.bfloat16, gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    check_dtype(torch.float16, gpu)
    check_dtype(torch.bfloat16, torch.device("cpu"))
    with pytest.raises(InvalidRequest, match="bf16 cannot be used: this mock GPU does not compute in it; fp16 or fp32"):
        check_dtype(torch.bfloat16, gpu)


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


def test_headers_are_read_again_only_if_a_file_has_changed(ask, engine, copy, monkeypatch):
    message, tensors = Forward(model=one_rank(copy.path), branches=2), Case().forward_inputs()
    first = ask(message, tensors)["0"]
    engine._parts()[0].drop("transformer")
    monkeypatch.setattr(weight_source, "read_files", reads := Mock(side_effect=read_files))
    assert torch.equal(ask(message, tensors)["0"], first)
    reads.assert_not_called()
    file = copy.path / "transformer" / WEIGHTS
    save_file(load_file(file), file)
    engine._parts()[0].drop("transformer")
    assert torch.equal(ask(message, tensors)["0"], first)
    reads.assert_called_once()


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
    load: Any = load_transformer if component == "transformer" else getattr(load_module, f"load_{component}")
    with pytest.raises(InvalidRequest, match=rf"{component}.* lacks \d+ weights \({first}"):
        load(copy, torch.float32, torch.device("cpu"), *([ALONE] if component == "transformer" else []))


def models_of(*names):
    """Models of one rank with nothing loaded."""
    models: list[Parts] = []
    memory = DeviceMemory(torch.device("cpu"), lambda: models)
    models += [Parts(name, memory) for name in names]
    return models


def test_a_full_device_unloads_other_models_then_idle_components_and_retries():
    other, pipeline = models_of("other", "pipeline")
    for name in ("transformer", "vae"):
        other.get(name, lambda: nn.Linear(2, 2))
    weights, attempts = nn.Linear(2, 2), []

    def load() -> nn.Module:
        attempts.append(other.has("vae"))
        if len(attempts) < 2:
            raise torch.OutOfMemoryError("full")
        return weights

    assert pipeline.get("vae", load) is weights
    assert attempts == [True, False]
    assert (pipeline.loads, pipeline.nbytes, other.has("transformer")) == (1, weights.weight.nbytes + 8, True)
    with pytest.raises(torch.OutOfMemoryError, match="for good"):
        pipeline.get("text_encoder", Mock(side_effect=torch.OutOfMemoryError("for good")))
    assert not pipeline.has("vae")
