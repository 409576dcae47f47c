"""Files with compressed weights that cannot be meant: one sentence each, before a weight is read."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.checkpoint.stored_tensor import Compression
from parallel_backend.checkpoint.weight_headers import read_file, read_files, weights_under
from parallel_backend.errors import InvalidRequest
from parallel_backend.loading.weight_source import WeightSource
from tests.support import compressed

LAYER = "blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def weights():
    """A Wan transformer's, in diffusers' names."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=1, attention_head_dim=128, in_channels=16, out_channels=16,
        text_dim=32, freq_dim=32, ffn_dim=64, num_layers=1, rope_max_seq_len=64,
    )  # fmt: skip
    return {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


@pytest.fixture
def changed(weights, tmp_path):
    """``changed(format, tensors)`` is a file in which some tensors are others, or none."""

    def write(name, changes, metadata=None):
        path = tmp_path / "model.safetensors"
        compressed.write_described(path, weights, name)
        tensors = {**load_file(path), **{f"{LAYER}.{end}": tensor for end, tensor in changes.items()}}
        save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, path, metadata)
        return path

    return write


def check(path, monkeypatch):
    """Open a file and plan it, without reading a weight."""
    with monkeypatch.context() as patched:
        patched.setattr(WeightSource, "read", None)
        checkpoint = open_checkpoint(path)
        source = WeightSource(checkpoint.stored("transformer"), checkpoint.components["transformer"])
        source.check({f"{LAYER}.weight": (128, 128)})


def said(**description):
    return compressed._json_bytes(description)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("fp8 e4m3", {"weight_scale": torch.tensor(float("nan"))}, f"{LAYER}.weight_scale has a value that is NaN"),
        ("fp8 e4m3", {"weight_scale": torch.tensor(float("inf"))}, "infinite"),
        ("fp8 e4m3", {"weight_scale": torch.tensor(0.0)}, "zero or negative"),
        ("fp8 e4m3", {"weight_scale": torch.tensor(-1.0)}, "zero or negative"),
        ("fp8 e4m3", {"weight_scale": torch.ones(3)}, "a single number or one for each of 128 rows"),
        ("fp8 e4m3", {"weight_scale": None}, f"{LAYER}.weight_scale is missing"),
        ("fp8 e4m3", {"weight_scale": torch.ones((), dtype=torch.int64)}, "has dtype I64, and its format needs F32"),
        ("fp8 e4m3", {"input_scale": torch.ones(2)}, "input_scale has shape .2., and its format needs a single number"),
        ("fp8 e4m3", {"input_scale": torch.tensor(0.0)}, f"{LAYER}.input_scale has a value that is NaN"),
        ("fp8 e4m3", {"input_scale": torch.ones((), dtype=torch.uint8)}, "input_scale has dtype U8, and its format"),
        ("fp8 e4m3", {"input_scale": torch.ones((), dtype=torch.int8)}, "input_scale has dtype I8, and its format"),
        ("fp8 e4m3", {"input_scale": torch.ones((), dtype=torch.int32)}, "input_scale has dtype I32, and its format"),
        ("fp8 e4m3", {"input_scale": torch.ones((), dtype=torch.bool)}, "input_scale has dtype BOOL, and its format"),
        (
            "fp8 e4m3",
            {"weight": torch.ones((), dtype=torch.float8_e4m3fn), "weight_scale": torch.ones(3)},
            "weight_scale has shape .3., and its format needs a single number: choose another file of the model",
        ),
        (
            "fp8 e4m3",
            {"weight": torch.ones(3).to(torch.float8_e4m3fn), "weight_scale": torch.ones(3)},
            "weight_scale has shape .3., and its format needs a single number",
        ),
        ("fp8 e4m3", {"weight": torch.ones(128, 128)}, "has dtype F32, and its format needs F8_E4M3 or F8_E5M2"),
        ("fp8 e4m3", {"weight": None}, f"{LAYER} has scales and no weight"),
        ("fp8 e4m3", {"comfy_quant": None}, f"{LAYER}.weight_scale belongs to no layer whose format"),
        ("fp8 e4m3", {"comfy_quant": said(format="float3")}, "has the format 'float3', which is not supported"),
        ("fp8 e4m3", {"comfy_quant": said(format=["nvfp4"])}, "which is not supported; supported: float8_e4m3fn"),
        ("fp8 e4m3", {"comfy_quant": said()}, "has the format None"),
        ("fp8 e4m3", {"comfy_quant": torch.zeros(3, dtype=torch.uint8)}, f"{LAYER}.comfy_quant is not valid JSON"),
        ("fp8 e4m3", {"comfy_quant": torch.tensor(list(b"[]"), dtype=torch.uint8)}, "is not a JSON object"),
        ("fp8 e4m3", {"comfy_quant": torch.zeros(1 << 17, dtype=torch.uint8)}, "a layer's description has a few"),
        ("int8 by row", {"weight_scale": torch.zeros(128, 1)}, "zero or negative"),
        ("int8 by row", {"weight_scale": torch.ones(128, 2)}, "one for each of 128 rows"),
        ("int8", {"weight": torch.ones(128, 128)}, "has dtype F32, and its format needs I8"),
        ("int8", {"comfy_quant": said(format="int8_tensorwise", convrot=True)}, "rows of whole blocks of 256 numbers"),
        (
            "int8",
            {"comfy_quant": said(format="int8_tensorwise", convrot=True, convrot_groupsize=48)},
            "rotated groups of 48 columns, and only a power of 4",
        ),
        (
            "int8",
            {"comfy_quant": said(format="int8_tensorwise", convrot=True, convrot_groupsize=0)},
            "rotated groups of 0 columns, and only a power of 4",
        ),
        (
            "int8",
            {"comfy_quant": said(format="int8_tensorwise", params={"convrot": True, "convrot_groupsize": None})},
            "rotated groups of None columns, and only a power of 4",
        ),
        ("int8", {"weight": torch.zeros((), dtype=torch.int8)}, "has shape .., and its format needs a matrix"),
        ("int8", {"weight": torch.zeros(8, 2, 3, dtype=torch.int8)}, "has shape .8, 2, 3., and its format needs a mat"),
        ("nvfp4", {"weight": torch.zeros((), dtype=torch.uint8)}, "has shape .., and its format needs a matrix"),
        ("nvfp4", {"weight_scale_2": None}, f"{LAYER}.weight_scale_2 is missing"),
        ("nvfp4", {"weight_scale_2": torch.tensor(0.0)}, "weight_scale_2 has a value that is NaN"),
        ("nvfp4", {"weight_scale": torch.zeros(64, 8, dtype=torch.uint8)}, "needs .128, 8., for 128 rows of 8 blocks"),
        ("nvfp4", {"weight_scale": torch.full((128, 8), 0x7F, dtype=torch.uint8)}, "weight_scale has a value that is"),
        ("nvfp4", {"weight_scale": torch.full((128, 8), 0x85, dtype=torch.uint8)}, "zero or negative"),
        ("nvfp4", {"weight": torch.zeros(128, 60, dtype=torch.uint8)}, "rows of whole blocks of 16 numbers"),
        ("mxfp8", {"weight_scale": torch.full((128, 4), 0xFF, dtype=torch.uint8)}, "weight_scale has a value that is"),
        ("mxfp8", {"weight_scale": torch.ones(128, 4)}, "has dtype F32, and its format needs U8 or F8_E8M0"),
        ("mxfp8", {"qweight": torch.zeros(3, dtype=torch.int32)}, "in Nunchaku's, GPTQ's or AWQ's format"),
        ("mxfp8", {"wscales": torch.zeros(3)}, "Nunchaku's .SVDQuant or AWQ. format .*use an fp8, INT8, NVFP4 or GGUF"),
        ("int8", {"weight_proj_down": torch.zeros(3)}, "in comfy-kitchen's SVDQuant format"),
        ("int8", {"weight_smooth_factor": torch.zeros(3)}, "in comfy-kitchen's SVDQuant format"),
        ("int8", {"weight_zeros": torch.zeros(3)}, "in comfy-kitchen's AWQ format"),
        ("fp8 e4m3", {"weight_scale_inv": torch.zeros(1, 1)}, "in DeepSeek's .fp8 in square blocks. format"),
        ("int8", {"SCB": torch.zeros(3)}, "in bitsandbytes' format"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(changed, monkeypatch, name, changes, message):
    path = changed(name, changes)
    with pytest.raises(InvalidRequest, match=message) as refused:
        check(path, monkeypatch)
    assert str(refused.value).startswith("model.safetensors: ")


@pytest.mark.parametrize(("name", "end"), [("nvfp4", "weight_scale"), ("mxfp8", "weight_scale")])
def test_a_block_of_zeros_may_have_a_scale_of_zero(changed, monkeypatch, name, end):
    check(changed(name, {end: torch.zeros(128, 8 if name == "nvfp4" else 4, dtype=torch.uint8)}), monkeypatch)


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": 3}'])
def test_broken_metadata_is_refused(changed, monkeypatch, text):
    path = changed("fp8 e4m3", {}, {"_quantization_metadata": text})
    if text.startswith('{"'):
        check(path, monkeypatch)  # the layers describe themselves
        return
    with pytest.raises(InvalidRequest, match="_quantization_metadata is not"):
        check(path, monkeypatch)


def test_metadata_names_layers_with_or_without_the_files_prefix(weights, tmp_path):
    path = tmp_path / "model.safetensors"
    compressed.write_described(path, weights, "fp8 e4m3", in_metadata=True)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    layers = json.loads(metadata["_quantization_metadata"])["layers"]
    prefix = "model.diffusion_model."
    renamed = {prefix + name: tensor for name, tensor in load_file(path).items()}
    for start in ("", prefix):
        said = {"layers": {start + name: each for name, each in layers.items()} | {"text.q": {"format": "nvfp4"}}}
        save_file(renamed, path, {"_quantization_metadata": json.dumps(said)})
        found = weights_under(prefix, read_file(path))
        assert found.keys() == weights.keys()
        scale = read_file(path).tensors[f"{prefix}{LAYER}.weight_scale"]
        assert found[f"{LAYER}.weight"].compression == Compression(format="F8_E4M3", tensor_scale=scale, native=True)


def test_each_part_of_a_model_describes_its_own_layers(weights, tmp_path):
    whole = tmp_path / "model.safetensors"
    compressed.write_described(whole, weights, "fp8 e4m3", in_metadata=True)
    tensors, layers = load_file(whole), compressed.described(whole)
    parts = [tmp_path / f"model-{i:05d}-of-00002.safetensors" for i in (1, 2)]
    for part, own in zip(parts, ("blocks.", ""), strict=True):
        held = {name: tensor for name, tensor in tensors.items() if name.startswith("blocks.") == bool(own)}
        said = {name: each for name, each in layers.items() if name.startswith("blocks.") == bool(own)}
        save_file(held, part, {"_quantization_metadata": json.dumps({"layers": said})})
    formats = [
        {name: each.compression and each.compression.format for name, each in weights_under("", header).items()}
        for header in (read_file(whole), read_files(parts))
    ]
    assert formats[0] == formats[1]
    assert list(formats[0].values()).count("F8_E4M3") == len(layers)
