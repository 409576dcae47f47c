"""The nodes over ComfyUI's API, on tiny random checkpoints under ``models/diffusers``."""

import json
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scripts.comfy_api import ComfyClient, ExecutionFailed, Prompt, PromptRejected
from scripts.comfy_server import ComfyServer
from tests import tiny
from tests.comfyui.server import Event, Events, difference, pixels

START = 280.0
"""Seconds for a prompt that starts ranks, on a machine with other work."""

LAYOUT = {"data": 1, "cfg": 1, "pipe": 1, "ring": 1, "ulysses": 1, "tensor": 1}


@pytest.fixture(scope="session")
def tiny_server(server: ComfyServer) -> ComfyServer:
    """The shared server with the checkpoints ``tiny`` and ``no vae``, folders that are none, and bad latents."""
    models = server.base / "models" / "diffusers"
    tiny.write(models / "tiny")
    tiny.write(models / "no vae", tiny.Tiny(vae=False))
    (models / "empty").mkdir()
    (models / "unet").mkdir()
    (models / "unet" / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]}))
    (server.base / "input").mkdir(exist_ok=True)
    for name, latent in (("four", torch.ones(1, 4, 1, 8, 8)), ("nan", torch.full((1, 16, 1, 8, 8), torch.nan))):
        file = server.base / "input" / f"{name}.latent"
        save_file({"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}, file)
    return server


@pytest.fixture
def client(tiny_server: ComfyServer) -> ComfyClient:
    return tiny_server.client


def prompt(sampler: str = "KSampler", *, layout: dict[str, int] | None = None, **changes: Any) -> Prompt:
    """A whole picture; ``changes`` are inputs by name, wherever they belong."""
    nodes: Prompt = {
        "1": {"class_type": "ParallelLoader", "inputs": {"model_name": "tiny", "dtype": "fp32", "devices": "0,1"}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "a red circle"}},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": ""}},
        "4": {"class_type": "EmptyHunyuanLatentVideo",
              "inputs": {"width": 80, "height": 64, "length": 1, "batch_size": 1}},
        "5": {"class_type": sampler,
              "inputs": {"model": ["1", 0], "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0],
                         "seed": 3, "steps": 3, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple",
                         "denoise": 1.0}},
        "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "nodes"}},
    }  # fmt: skip
    for name, value in changes.items():
        for node in nodes.values():
            if name in node["inputs"]:
                node["inputs"][name] = value
    if layout is not None:
        nodes["8"] = {"class_type": "ParallelLayout", "inputs": {**LAYOUT, **layout}}
        nodes["1"]["inputs"]["layout"] = ["8", 0]
    return nodes


def refusal(client: ComfyClient, refused: Prompt) -> str:
    """The sentence with which ComfyUI answers a prompt that cannot work."""
    with pytest.raises((ExecutionFailed, PromptRejected)) as caught:
        client.run(refused)
    return str(caught.value)


def test_samplers_ranks_and_layouts_give_one_picture(client: ComfyClient) -> None:
    # The most ranks first: smaller layouts then use some of them, and no set of ranks is started again.
    reference = pixels(client, client.run(prompt(layout={"ulysses": 3}, devices="0,1,2"), deadline=START))
    assert reference.std() > 5
    for variant in (
        prompt(devices="0"),
        prompt(),
        prompt(layout={"cfg": 2}),
        prompt("ParallelSampler", devices="0"),
        prompt("ParallelSampler", layout={"ulysses": 2}),
        prompt("ParallelSampler", layout={"ulysses": 3}, devices="0,1,2"),
    ):
        assert difference(pixels(client, client.run(variant)), reference) <= 1


def test_parallel_decode_is_the_same_picture(client: ComfyClient) -> None:
    parallel = prompt(length=5)
    parallel["6"]["class_type"] = "ParallelVAEDecode"
    native = pixels(client, client.run(prompt(length=5)))
    assert len(native) == 5
    assert difference(pixels(client, client.run(parallel)), native) == 0


@pytest.mark.parametrize(
    ("refused", "sentence"),
    [
        (prompt(layout={"ulysses": 4}), "needs 4 ranks and there are 2"),
        (prompt(layout={"cfg": 2}, cfg=1.0), "layout cfg=2 gives the positive and the negative prompt"),
        (prompt("ParallelSampler", layout={"cfg": 2}, cfg=1.0), "layout cfg=2 gives the positive"),
        (prompt(layout={"ulysses": 0}), "layout ulysses=0: a degree is a whole number of at least 1"),
        (prompt(layout={"ring": 2}), "layout ring=2: this strategy is not built yet"),
        (prompt(devices="cuda:9"), "devices 'cuda:9'"),
        (prompt(devices="0,0"), "twice"),
        (prompt(model_name="empty"), "no model_index.json"),
        (prompt(model_name="unet"), "has no transformer"),
        (prompt(model_name="../../secret"), "no model '../../secret'"),
        (prompt("ParallelSampler", sampler_name="lcm"), "only euler, heun"),
        (prompt(model_name="no vae"), "no vae has no VAE"),
    ],
)
def test_bad_input_is_one_clear_sentence(client: ComfyClient, refused: Prompt, sentence: str) -> None:
    assert sentence in refusal(client, refused)


@pytest.mark.parametrize("sampler", ["KSampler", "ParallelSampler"])
@pytest.mark.parametrize(("file", "sentence"), [("four", "has 4 channels"), ("nan", "not finite (NaN")])
def test_bad_latents(client: ComfyClient, sampler: str, file: str, sentence: str) -> None:
    refused = prompt(sampler)
    refused["4"] = {"class_type": "LoadLatent", "inputs": {"latent": f"{file}.latent"}}
    assert sentence in refusal(client, refused)


def test_previews_progress_and_the_text_on_the_loader(new_server: Callable[..., ComfyServer]) -> None:
    server = new_server(arguments=["--preview-method", "latent2rgb"])
    tiny.write(server.base / "models" / "diffusers" / "tiny")
    for sampler in ("KSampler", "ParallelSampler"):
        with Events(server.client) as events:
            server.client.run(prompt(sampler, seed=len(sampler)), deadline=START)
            events.wait(lambda event: event.kind == "executing" and event.data["node"] is None)
            binary = events.kinds("preview")
        states = [text for node, text in map(progress_text, binary) if node == "1"]
        kinds = {struct.unpack(">I", event.data[:4])[0] for event in binary}
        assert kinds & {1, 4}, "no preview picture came"
        assert [event.data["value"] for event in events.kinds("progress") if event.data["node"] == "5"] == [1, 2, 3]
        assert all(state.startswith("2 CPU ranks, layout auto (guided: cfg=2): ") for state in states)
        assert any(": sampling" in state for state in states)
        assert states[-1].endswith(": ready")


def progress_text(event: Event) -> tuple[str, str]:
    """Node and text of a progress-text frame; empty for other frames."""
    kind, length = struct.unpack(">II", event.data[:8])
    if kind != 3:
        return "", ""
    return event.data[8 : 8 + length].decode(), event.data[8 + length :].decode()


@pytest.mark.parametrize("sampler", ["KSampler", "ParallelSampler"])
def test_interrupt_and_the_next_prompt(client: ComfyClient, sampler: str) -> None:
    reference = pixels(client, client.run(prompt(sampler), deadline=START))
    with Events(client) as events:
        prompt_id = client.submit(prompt(sampler, steps=2000, seed=4))
        events.wait(lambda event: event.kind == "progress" and event.data["node"] == "5" and event.data["value"] >= 3)
        before = time.monotonic()
        client.interrupt()
        with pytest.raises(ExecutionFailed) as caught:
            client.wait(prompt_id)
    assert caught.value.exception_type == "Interrupted"
    assert time.monotonic() - before < 5
    again = pixels(client, client.run(prompt(sampler, filename_prefix="again")))
    assert np.array_equal(again, reference)
