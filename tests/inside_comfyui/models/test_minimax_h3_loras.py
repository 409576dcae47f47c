"""Turbo LoRAs on files of MiniMax-H3 as they are published: pruned, with blocks in INT8 ConvRot or NVFP4."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.sd
import pytest
import torch
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import compressed_files
from helpers.inside_fixtures import Loaded, ksampler, native_case, parallel_sampler, relative_error
from natives import CASES
from safetensors.torch import load_file, save_file

NAME = "minimax_h3 turbo"
CLOSE, FAR = 1e-4, 1e-2
FORMATS = ("int8 rotated", "nvfp4")
RUNS = ((ksampler, "ulysses=2"), (parallel_sampler, "tensor=2"), (ksampler, "ulysses=2 shard_weights"))
MATRICES = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(NAME not in CASES, reason="this version of ComfyUI has no MiniMax-H3"),
]
Weights = dict[str, torch.Tensor]


def published(path: Path, kind: str) -> Weights:
    """Write a file whose blocks' matrices are compressed, and the layers for time in 16 bits. Return its numbers."""
    plain = {name: each.clone().float() for name, each in native_case(NAME).model.diffusion_model.state_dict().items()}
    narrow = {name: each.bfloat16() for name, each in plain.items() if "adaln_proj" in name}
    inside = {
        name: each for name, each in plain.items()
        if name.startswith("blocks.") and name.rpartition(".")[0].endswith(MATRICES)
    }  # fmt: skip
    decoded = compressed_files.write_described(path, inside, kind)
    assert {each["format"] for each in compressed_files.described(path).values()} == {
        {"int8 rotated": "int8_tensorwise", "nvfp4": "nvfp4"}[kind]
    }
    rest = {name: each for name, each in plain.items() if name not in inside} | narrow
    save_file(load_file(path) | {name: each.contiguous() for name, each in rest.items()}, path)
    return plain | decoded | {name: each.float() for name, each in narrow.items()}


def turbo(weights: Weights) -> Weights:
    """Return a LoRA of the layers that turbo LoRAs have: of blocks, of the refiner, and the last one for time."""
    layers = [
        name.removesuffix(".weight") for name in weights
        if name.endswith(tuple(f"{each}.weight" for each in (*MATRICES, "adaln_proj.linear")))
    ]  # fmt: skip
    assert len(layers) == 2 * 5 + 4 + 1
    random = torch.Generator().manual_seed(6)

    def factor(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * 0.15).bfloat16()

    shapes = {layer: weights[f"{layer}.weight"].shape for layer in layers}
    up = {f"diffusion_model.{layer}.lora_B.weight": factor(rows, 4) for layer, (rows, _) in shapes.items()}
    return up | {f"diffusion_model.{layer}.lora_A.weight": factor(4, columns) for layer, (_, columns) in shapes.items()}


def sampled(sample: Callable[..., Any], model: Any, lora: Weights, strength: float) -> Any:
    case = CASES[NAME]
    changed = comfy.sd.load_lora_for_models(model, None, lora, strength, 0)[0]
    return sample(changed, case.samples(), positive=case.conditioning(1), negative=case.conditioning(2), cfg=case.cfg)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.daily(1)
def test_a_turbo_lora_on_compressed_weights_adds_its_exact_product(
    kind: str, folder: Path, load_remote: Callable[..., Loaded]
) -> None:
    """ComfyUI alone rounds the sum to the file's format again, so it gets the numbers and not the file."""
    file = folder / f"h3 turbo {kind}.safetensors"
    weights = published(file, kind)
    lora, native = turbo(weights), CASES[NAME].native()
    native.model.diffusion_model.load_state_dict(weights)
    plain, wanted = (sampled(ksampler, native, lora, strength) for strength in (0.0, 0.7))
    for one, other in zip(plain.unbind(), wanted.unbind(), strict=True):
        assert relative_error(one, other) > FAR
    for sample, layout in RUNS:
        model = load_remote(ParallelLayout.parse(layout), name=f"diffusion_models/{file.name}").model
        for strength, expected in ((0.7, wanted), (0.0, plain)):
            assert relative_error(sampled(sample, model, lora, strength), expected) < CLOSE, (layout, strength)


def test_a_turbo_lora_on_int8_is_as_near_as_comfyui_rounds(folder: Path, load_remote: Callable[..., Loaded]) -> None:
    """With the same file in both. The formats' own errors are larger than what ComfyUI rounds once more."""
    file = folder / "h3 turbo in both.safetensors"
    lora = turbo(published(file, "int8 rotated"))
    wanted = sampled(ksampler, comfy.sd.load_diffusion_model(str(file)), lora, 0.7)
    model = load_remote(ParallelLayout(ulysses=2), name=f"diffusion_models/{file.name}").model
    ours = sampled(parallel_sampler, model, lora, 0.7)
    for one, other in zip(ours.unbind(), wanted.unbind(), strict=True):
        assert (one - other).norm() < 0.05 * other.norm()
