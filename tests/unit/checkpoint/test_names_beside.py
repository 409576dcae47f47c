"""Names that ComfyUI's loaders take away or leave aside: beginnings of all names, and weights that no model has."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoint.architectures import architecture_of, architectures
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.errors import InvalidRequest
from parallel_backend.loading.weight_source import WeightSource
from tests.support import compressed
from tests.support.families import module, variants, weights

CLASSES = sorted(each.class_name for each in architectures() if each.class_name != "CogVideoXTransformer3DModel")
WAN, SD3, Z_IMAGE = "WanTransformer3DModel", "SD3Transformer2DModel", "ZImageTransformer2DModel"
PREFIXES = ("", "model.diffusion_model.", "model.model.", "net.", "model.")
CAUSAL = {"config": json.dumps({"transformer": {"causal_temporal_positioning": True}})}
"""Metadata without which an LTX file in diffusers' names is refused."""


def written(path, tensors, prefix="", beside=None):
    save_file({prefix + name: tensor for name, tensor in tensors.items()} | (beside or {}), path, CAUSAL)
    return open_checkpoint(path)


def source(checkpoint):
    return WeightSource(checkpoint.stored("transformer"), checkpoint.components["transformer"])


def assert_holds(checkpoint, tensors):
    """Check that each of these is read, and that a model with these alone is content with the file."""
    found = source(checkpoint)
    found.check({name: tuple(tensor.shape) for name, tensor in tensors.items()}, counted=True)
    for name, tensor in tensors.items():
        into = torch.empty_like(tensor)
        found.read(name, 0, None, None, into=into)
        torch.testing.assert_close(into, tensor)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("class_name", CLASSES)
@pytest.mark.daily(27)
def test_names_may_begin_as_comfyui_takes_them(tmp_path, class_name, prefix):
    tensors = weights(class_name)
    checkpoint = written(tmp_path / "model.safetensors", tensors, prefix)
    assert checkpoint.components == {"transformer": class_name}
    assert checkpoint.config("transformer") == written(tmp_path / "plain.safetensors", tensors).config("transformer")
    assert_holds(checkpoint, tensors)


def test_other_parts_may_stand_beside_any_beginning(tmp_path):
    beside = {"text_encoders.t5xxl.shared.weight": torch.zeros(2, 2), "global_step": torch.tensor(7)}
    for prefix in PREFIXES[1:]:
        checkpoint = written(tmp_path / "model.safetensors", weights(WAN), prefix, beside)
        assert (checkpoint.components, checkpoint.holds_text_encoders) == ({"transformer": WAN}, True)
        assert checkpoint.left_over("transformer") == frozenset()


BESIDE = {
    "global_step": torch.tensor(7), "trained": torch.tensor(True), "ids": torch.zeros(3, dtype=torch.int32),
    "decoder.weight": torch.zeros(2), "vae.quant_conv.weight": torch.zeros(2, 2), "model.step": torch.zeros(1),
}  # fmt: skip


def beside_each_layer(tensors):
    """Return one more weight in every module, and what a LoRA leaves behind beside it."""
    modules = {name.rpartition(".")[0] for name in tensors} | {"blocks.0", "transformer_blocks.0", "layers.0"}
    names = [f"{each}.{end}" for each in modules if each for end in ("extra", "lora_A.weight", "alpha")]
    return {name: torch.zeros(2, 2) for name in names}


@pytest.mark.parametrize("class_name", CLASSES)
@pytest.mark.daily(6)
def test_what_no_model_has_is_left_aside(tmp_path, class_name):
    tensors = weights(class_name)
    beside = BESIDE | beside_each_layer(tensors)
    checkpoint = written(tmp_path / "model.safetensors", tensors, beside=beside)
    plain = written(tmp_path / "plain.safetensors", tensors)
    assert checkpoint.components["transformer"] == class_name
    assert checkpoint.config("transformer") == plain.config("transformer")
    assert_holds(checkpoint, tensors)
    left_over = checkpoint.left_over("transformer")
    assert BESIDE.keys() <= left_over <= beside.keys()
    assert {name for name in beside if ".lora_A." in name} <= left_over


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (r"blocks\.1\.", r"model.safetensors: the file has blocks.2.* and lacks blocks.1: download it again"),
        (r"blocks\.0\.", "no supported architecture"),
    ],
)
def test_a_lost_block_is_no_reason_to_leave_others_aside(tmp_path, lost, message):
    tensors = weights(WAN)
    tensors |= {name.replace("blocks.1.", "blocks.2."): each.clone() for name, each in tensors.items()}
    kept = {name: each for name, each in tensors.items() if not re.match(lost, name)}
    with pytest.raises(InvalidRequest, match=message):
        written(tmp_path / "model.safetensors", kept)


def test_a_lost_block_of_an_inner_list_is_found_by_the_ranks(tmp_path):
    tensors = weights("HunyuanVideoTransformer3DModel")
    refiner = "context_embedder.token_refiner.refiner_blocks."
    further = {name.replace(f"{refiner}0.", f"{refiner}5."): each.clone() for name, each in tensors.items()}
    checkpoint = written(tmp_path / "model.safetensors", tensors | further)
    with pytest.raises(InvalidRequest, match=rf"model.safetensors has {refiner}5\S* and lacks a block before it"):
        assert_holds(checkpoint, tensors)


def test_a_mark_of_scaled_fp8_may_lack_the_names_beginning(tmp_path):
    decoded = compressed.write_scaled(tmp_path / "plain.safetensors", weights(WAN))
    stored = load_file(tmp_path / "plain.safetensors")
    mark = {"scaled_fp8": stored.pop("scaled_fp8")}
    checkpoint = written(tmp_path / "model.safetensors", stored, "model.diffusion_model.", mark)
    assert checkpoint.is_described("transformer")
    assert_holds(checkpoint, decoded)


@pytest.mark.parametrize("class_name", [SD3, WAN, Z_IMAGE])
def test_gguf_files_may_lack_a_first_dim_of_one(tmp_path, class_name):
    tensors = weights(class_name)
    flat = {name: tensor[0] if tensor.ndim > 1 and len(tensor) == 1 else tensor for name, tensor in tensors.items()}
    assert any(flat[name].shape != tensor.shape for name, tensor in tensors.items())
    decoded = compressed.write_gguf(tmp_path / "model.gguf", flat, "Q8_0")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    plain = written(tmp_path / "plain.safetensors", tensors)
    assert checkpoint.config("transformer") == plain.config("transformer")
    assert_holds(checkpoint, {name: decoded[name].reshape(tensor.shape) for name, tensor in tensors.items()})


@pytest.mark.parametrize(("class_name", "variant"), [each for each in variants() if each[0] in CLASSES])
@pytest.mark.daily(18)
def test_every_first_dim_of_one_is_known(class_name, variant):
    architecture = architecture_of(class_name)
    for name, tensor in module(class_name, variant).state_dict().items():
        if tensor.ndim > 1 and len(tensor) == 1:
            assert architecture.shape(name, tuple(tensor.shape[1:])) == tuple(tensor.shape), name
