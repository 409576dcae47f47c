"""Transformers in one safetensors file in diffusers' names, in parts, inside whole models; and what is refused."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.checkpoint.single_file import SingleFile
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.registry import FAMILIES
from parallel_backend.loading.weight_source import WeightSource
from tests.support.families import weights

CAUSAL = {"config": json.dumps({"transformer": {"causal_temporal_positioning": True}})}
"""Metadata without which an LTX file in diffusers' names is refused."""

WAN = "WanTransformer3DModel"
PREFIX = "model.diffusion_model."
RECOGNISABLE = {name for name, row in FAMILIES.items() if row.in_files} - {"CogVideoXTransformer3DModel"}
"""Classes whose files say what they are. A small CogVideoX could be of several kinds."""


def source(path):
    checkpoint = open_checkpoint(path)
    return WeightSource(checkpoint.stored("transformer"), checkpoint.components["transformer"])


@pytest.mark.parametrize("class_name", sorted(RECOGNISABLE))
def test_diffusers_names_are_recognised(tmp_path, class_name):
    save_file(weights(class_name), tmp_path / "model.safetensors", CAUSAL)
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    assert checkpoint.components == {"transformer": class_name}
    assert not checkpoint.stored("transformer").native


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_every_stored_dtype_is_read(tmp_path, dtype):
    stored = {name: tensor.to(dtype) for name, tensor in weights(WAN).items()}
    save_file(stored, tmp_path / "model.safetensors")
    read = source(tmp_path / "model.safetensors")
    for name, tensor in stored.items():
        into = torch.empty(tensor.shape)
        read.read(name, 0, None, None, into=into)
        assert torch.equal(into, tensor.float())


def test_parts_are_one_model(tmp_path):
    tensors = weights(WAN)
    names = sorted(tensors)
    for i, part in enumerate((names[:20], names[20:]), start=1):
        save_file({name: tensors[name] for name in part}, tmp_path / f"model-{i:05d}-of-00002.safetensors")
    for i in (1, 2):
        path = tmp_path / f"model-{i:05d}-of-00002.safetensors"
        read = source(path)
        for name, tensor in tensors.items():
            into = torch.empty_like(tensor)
            read.read(name, 0, None, None, into=into)
            assert torch.equal(into, tensor)
    path.unlink()
    with pytest.raises(InvalidRequest, match=r"model-00002-of-00002.safetensors does not exist"):
        open_checkpoint(tmp_path / "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("others", [[], [1], [1, 3]])
def test_a_whole_model_may_be_named_as_a_part(tmp_path, others):
    for number in (2, *others):
        tensors = {name: tensor + number for name, tensor in weights(WAN).items()}
        save_file(tensors, tmp_path / f"model-{number:05d}-of-00003.safetensors")
    path = tmp_path / "model-00002-of-00003.safetensors"
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, SingleFile)
    assert checkpoint.stored("transformer").files == (path,)
    assert (checkpoint.missing_part is None) == (others == [1, 3])
    into = torch.empty(weights(WAN)["proj_out.bias"].shape)
    source(path).read("proj_out.bias", 0, None, None, into=into)
    assert torch.equal(into, weights(WAN)["proj_out.bias"] + 2)


def test_a_part_that_is_recognised_alone_lacks_the_other_one(tmp_path):
    tensors = {name: tensor for name, tensor in weights(WAN).items() if "blocks.0.attn1.to_out" not in name}
    save_file(tensors, tmp_path / "model-00001-of-00002.safetensors")
    read = source(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(InvalidRequest, match=r"lacks 2 weights .*: .*model-00002-of-00002.safetensors does not exist"):
        read.check({name: tuple(tensor.shape) for name, tensor in weights(WAN).items()})


def test_a_whole_model_holds_other_parts(tmp_path):
    tensors = {PREFIX + name: tensor for name, tensor in weights(WAN).items()}
    others = {"text_encoders.t5xxl.shared.weight": torch.zeros(2, 2, dtype=torch.int8)}
    save_file(tensors | others, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    assert checkpoint.components == {"transformer": WAN}
    assert checkpoint.stored("transformer").prefix == PREFIX
    assert SingleFile(checkpoint.path).holds_text_encoders


def test_the_stamp_changes_with_the_file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(weights(WAN), path)
    before = open_checkpoint(path).stamp()
    assert open_checkpoint(path).stamp() == before
    save_file(weights(WAN) | {"blocks.0.norm2.more": torch.zeros(3)}, path)
    assert open_checkpoint(path).stamp() != before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.ckpt", "opening one can run code"),
        ("model.pt", "opening one can run code"),
        ("model.bin", "opening one can run code"),
        ("model.txt", "choose a .safetensors file"),
    ],
)
def test_other_formats_are_refused_without_opening_them(tmp_path, name, message):
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(InvalidRequest, match=message):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks.0.attn1.to_q.scale_weight": torch.ones(1)}, "belongs to no layer whose format the file names"),
        ({"blocks.0.attn1.to_q.weight": torch.zeros(48, 48, dtype=torch.int8)}, "has dtype I8, which is not supported"),
    ],
)
def test_quantised_weights_are_refused(tmp_path, changes, message):
    save_file(weights(WAN) | changes, tmp_path / "model.safetensors")
    with pytest.raises(InvalidRequest, match=message):
        open_checkpoint(tmp_path / "model.safetensors").stored("transformer")


@pytest.mark.parametrize(
    ("class_name", "name"),
    [
        ("PixArtTransformer2DModel", "pos_embed.pos_embed"),
        ("QwenImageTransformer2DModel", "__index_timestep_zero__"),
    ],
)
def test_known_weights_without_use_are_accepted(tmp_path, class_name, name):
    tensors = weights(class_name)
    save_file(tensors | {name: torch.zeros(1, 4, 2)}, tmp_path / "model.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    source(tmp_path / "model.safetensors").check(shapes, counted=True)
    assert open_checkpoint(tmp_path / "model.safetensors").left_over("transformer") == frozenset()


def test_missing_and_misshapen_weights_are_refused_by_every_rank(tmp_path):
    tensors = weights(WAN)
    path = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if name != "blocks.1.attn1.to_q.weight"}, path)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    with pytest.raises(InvalidRequest, match=r"^model.safetensors lacks 1 weights \(blocks.1.attn1.to_q.weight"):
        source(path).check(shapes)
    with path.open("rb") as copied:
        in_memory = source(f"/proc/{os.getpid()}/fd/{copied.fileno()}")
        with pytest.raises(InvalidRequest, match=r"^the copied model lacks 1 weights"):
            in_memory.check(shapes)
    save_file(tensors | {"proj_out.bias": torch.zeros(3)}, path)
    with pytest.raises(InvalidRequest, match=r"proj_out.bias has shape \[3\] in model.safetensors"):
        source(path).check(shapes)
    assert load_file(path)
