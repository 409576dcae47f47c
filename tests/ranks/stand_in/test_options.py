"""What else a request may ask for, on stand-in GPUs: nothing that CUDA or NCCL refuses, and nothing that hangs."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from parallel_backend.protocol.messages import EncodeText
from parallel_backend.samplers.samplers import SAMPLERS
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.ranks.test_compressed import MIXED
from tests.support import tiny
from tests.support.stand_in.requests import RANKS, devices, layout_of
from tests.support.weight_changes import Change, write_overlay

SIZES = tiny.Tiny(heads=3)
LAYOUTS = ("tensor=3", "ring=3 shard_weights", "pipe=2 ring=2")


def on_gpus(request, layout):
    """The same request on stand-in GPUs."""
    message, tensors = request
    model = replace(message.model, devices=devices(RANKS), layout=layout_of(layout))
    return replace(message, model=model), tensors


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.daily(4)
def test_samplers(check, checkpoints, sampler):
    """With the noise that ComfyUI draws on GPUs."""
    asked = requests.sample(requests.spec(checkpoints(heads=3)), Case(), sampler=sampler, noise_device="cuda")
    check(on_gpus(asked, "data=2"))


@pytest.mark.parametrize("layout", ["ulysses=3", "pipe=2 ring=2"])
def test_inpainting_with_previews(check, checkpoints, layout):
    message, tensors = requests.sample(requests.spec(checkpoints(heads=3)), Case(), previews=True)
    latent = tensors["x"]
    inpainting = {"mask": (latent[:, :1] > 0).float(), "noise": latent.flip(0), "latent": latent.flip(1)}
    check(on_gpus((message, tensors | inpainting), layout))


@pytest.mark.parametrize("layout", ["ulysses=3", "pipe=2 ring=2"])
def test_timesteps_of_a_table(check, checkpoints, layout):
    message, tensors = requests.sample(requests.spec(checkpoints(heads=3)), Case(), prediction="eps")
    check(on_gpus((message, tensors | {"log_sigmas": torch.linspace(-4.0, 3.0, 1000)}), layout))


def test_two_experts(check, checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints(heads=3), tmp_path / "model")
    tiny.transformer(tiny.Tiny(heads=3, seed=7)).save_pretrained(folder / "transformer_2")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"transformer_2": index["transformer"], "boundary_ratio": 0.6}
    (folder / "model_index.json").write_text(json.dumps(index))
    check(on_gpus(requests.sample(requests.spec(folder), Case()), "ring=2 ulysses=2"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loras_and_an_overlay(check, checkpoints, tmp_path, layout):
    model = tiny.transformer(SIZES)
    lora = Change.write(tmp_path, model, seed=1, rank=2, strength=0.7).file
    overlay, _ = write_overlay(tmp_path, model, ["blocks.0.attn1.to_q.weight"])
    message, tensors = requests.sample(requests.spec(checkpoints(heads=3)), Case(), adapters=(lora,), overlay=overlay)
    check(on_gpus((message, tensors), layout))


@pytest.mark.parametrize("layout", ["ulysses=3", "pipe=2 ring=2"])
def test_blocks_that_stream(gpus, check, checkpoints, layout):
    gpus.run(driver.stream_all, True)
    try:
        check(on_gpus(requests.sample(requests.spec(checkpoints(heads=3, layers=7)), Case()), layout))
    finally:
        gpus.run(driver.stream_all, False)


@pytest.fixture(scope="module")
def wide():
    """Wan of the published heads' width, which compressed formats need."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=3, attention_head_dim=128, in_channels=16, out_channels=16,
        text_dim=32, freq_dim=256, ffn_dim=768, num_layers=2, rope_max_seq_len=64,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["tensor=2", "ring=2 shard_weights"])
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.daily(3)
def test_compressed_weights(check, wide, tmp_path, name, layout):
    MIXED[name](tmp_path / name, wide.state_dict())
    check(on_gpus(requests.forward(requests.spec(tmp_path / name), Case(texts=(9,))), layout))


def test_encoding_text(check, checkpoints):
    ids = torch.tensor([[3, 4, 5, 1], [6, 1, 0, 0]])
    message = EncodeText(model=requests.spec(checkpoints(heads=3)))
    check(on_gpus((message, {"ids": ids, "lengths": torch.tensor([4, 2])}), ""))
