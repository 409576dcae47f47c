"""The nodes over ComfyUI's API, on tiny random checkpoints under ``models/diffusers``."""

import json
import struct
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from parallel_backend.client import query
from parallel_backend.client.status_text import format_status
from parallel_backend.protocol.endpoint import Endpoint
from scripts.comfy_api import ComfyClient, ExecutionFailed, Prompt, PromptRejected
from scripts.comfy_events import Event, Events
from scripts.comfy_server import ComfyServer
from scripts.processes import wait_until
from tests.comfyui.helpers import difference, pixels
from tests.comfyui.prompts import START, prompt, with_custom_sampler


@pytest.fixture
def client(tiny_server: ComfyServer) -> ComfyClient:
    return tiny_server.client


def refusal(client: ComfyClient, refused: Prompt) -> str:
    """Return the message with which ComfyUI refuses a prompt."""
    with pytest.raises((ExecutionFailed, PromptRejected)) as caught:
        client.run(refused)
    return str(caught.value)


@pytest.mark.newest
def test_samplers_ranks_and_layouts_give_one_image(client: ComfyClient) -> None:
    # The most ranks come first. Smaller layouts then use some of them, so no set of ranks starts again.
    widest = prompt(layout={"ulysses": 3}, devices="0,1,2", length=5)
    reference = pixels(client, client.run(widest, deadline=START))
    assert len(reference) == 5
    assert reference.std() > 5
    for variant in (
        prompt(devices="0", length=5),
        prompt(length=5),
        prompt(layout={"ulysses": 2}, length=5),
        prompt(layout={"cfg": 2}, length=5),
        with_custom_sampler(prompt(layout={"cfg": 2}, length=5)),
        prompt("ParallelSampler", devices="0", length=5),
        prompt("ParallelSampler", layout={"ulysses": 2}, length=5),
        prompt("ParallelSampler", layout={"ulysses": 3}, devices="0,1,2", length=5),
    ):
        assert difference(pixels(client, client.run(variant)), reference) <= 1


@pytest.mark.newest
def test_an_approximate_image_is_labelled_and_native_samplers_stay_exact(
    tiny_server: ComfyServer, client: ComfyClient
) -> None:
    exact = pixels(client, client.run(prompt(layout={"ulysses": 2}, seed=21), deadline=START))
    staged = pixels(client, client.run(prompt(layout={"pipe": 2}, seed=21)))
    assert difference(staged, exact) <= 1
    streamed = prompt("ParallelSampler", layout={"pipe": 2, "patches": 3, "warmup": 2}, seed=21, steps=5)
    with Events(client) as events:
        result = client.wait(client.submit(streamed, extra_data={"extra_pnginfo": {"workflow": {}}}), deadline=START)
        events.wait(
            lambda event: (
                event.kind == "preview" and "PipeFusion in Parallel Sampler, approximate" in progress_text(event)[1]
            )
        )
    with Image.open(BytesIO(client.fetch(result.files[0]))) as image:
        label = json.loads(image.text["parallel_dit"])
    assert label == {"5": {"layout": "pipe=2 patches=3 warmup=2", "approximate": "PipeFusion"}}
    assert "PipeFusion: approximate" in format_status(query.status(Endpoint(folder=tiny_server.runtime)))


@pytest.mark.newest
@pytest.mark.parametrize("sampler", ["KSampler", "ParallelSampler"])
def test_pictures_with_a_step_cache_are_labelled(client: ComfyClient, sampler: str) -> None:
    """The second prompt reuses the cache's node and runs the sampler alone."""
    inputs = {"mode": "custom", "interval": 2, "warmup": 2, "order": 1, "first": 0, "final": 1}
    for seed in (31, 32):
        cached = prompt(sampler, layout={"ulysses": 2}, seed=seed, steps=8)
        cached["9"] = {"class_type": "ParallelCache", "inputs": {"model": ["1", 0], **inputs}}
        cached["5"]["inputs"]["model"] = ["9", 0]
        result = client.wait(client.submit(cached, extra_data={"extra_pnginfo": {"workflow": {}}}), deadline=START)
        with Image.open(BytesIO(client.fetch(result.files[0]))) as image:
            label = json.loads(image.text["parallel_dit"])["5"]
        assert (label["approximate"], label["cache"], label["forecast"]) == ("step cache", "custom", 0.375)
        assert (label["interval"], label["warmup"]) == (2, 2)


def steps(server: ComfyServer) -> list[int]:
    """Return how many forwards each rank has computed."""
    return [rank.steps for rank in query.status(Endpoint(folder=server.runtime)).ranks]


def test_both_cfg_groups_compute_in_every_step_of_ksampler(tiny_server: ComfyServer, client: ComfyClient) -> None:
    client.run(prompt(layout={"cfg": 2}, seed=11), deadline=START)
    before = steps(tiny_server)
    client.run(prompt(layout={"cfg": 2}, seed=12))
    longer = prompt(layout={"cfg": 2}, seed=13, steps=4)
    longer["2"]["inputs"]["text"] = "red " * 600  # the shorter prompt is padded to 512 tokens
    client.run(longer)

    def computed() -> list[int]:
        return [after - earlier for after, earlier in zip(steps(tiny_server), before, strict=True)]

    wait_until(lambda: min(computed()[:2]) >= 7, 10.0, "both ranks have reported 7 steps")
    assert computed()[:2] == [7, 7]
    assert not any(computed()[2:])


def test_parallel_decode_gives_the_same_image(client: ComfyClient) -> None:
    parallel = prompt(length=5)
    parallel["6"]["class_type"] = "ParallelVAEDecode"
    native = pixels(client, client.run(prompt(length=5)))
    assert len(native) == 5
    assert difference(pixels(client, client.run(parallel)), native) == 0


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (prompt(layout={"ulysses": 4}), "needs 4 ranks and there are 2"),
        (prompt(layout={"cfg": 2}, cfg=1.0), "layout cfg=2 computes the positive and the negative prompt"),
        (prompt("ParallelSampler", layout={"cfg": 2}, cfg=1.0), "layout cfg=2 computes the positive"),
        (prompt(layout={"ulysses": 0}), "layout ulysses=0: a degree must be a whole number of at least 1"),
        (prompt(layout={"pipe": 2, "tensor": 2}), "already holds only a part of the weights"),
        (prompt(layout={"stale": "previous"}), "applies to the ranks of ring, and ring is 1"),
        (prompt(layout={"pipe": 2, "balance": "1:2:3"}), "has 3 speeds and pipe=2"),
        (prompt(devices="cuda:9"), "devices 'cuda:9'"),
        (prompt(devices="0,0"), "twice"),
        (prompt(model_name="empty"), "no model_index.json"),
        (prompt(model_name="unet"), "has no transformer"),
        (prompt(model_name="../../secret"), "no model '../../secret'"),
        (prompt("ParallelSampler", layout={"pipe": 2}, sampler_name="dpm_fast"), "lacks the sampler dpm_fast, it has"),
        (prompt(model_name="no vae"), "no vae has no VAE"),
    ],
)
@pytest.mark.daily(7)
def test_bad_input_is_refused_before_weights_load(
    tiny_server: ComfyServer, client: ComfyClient, refused: Prompt, message: str
) -> None:
    assert message in refusal(client, refused | with_fresh_checkpoint(refused))
    assert not loaded_components(tiny_server, "fresh") | loaded_components(tiny_server, "no vae")


LORA = save({"unet.lora_up.weight": torch.zeros(4, 2)})
LORAS = {
    "other.safetensors": (LORA, "other.safetensors fits no weight of fresh"),
    "cut.safetensors": (LORA[:-9], "file not fully covered"),  # ComfyUI's own node says so
}
"""Files, and what is said about them."""


@pytest.mark.parametrize("name", LORAS)
def test_a_lora_that_cannot_be_used_is_named(tiny_server: ComfyServer, client: ComfyClient, name: str) -> None:
    folder = tiny_server.base / "models" / "loras"
    folder.mkdir(exist_ok=True)
    content, message = LORAS[name]
    (folder / name).write_bytes(content)
    inputs = {"model": ["1", 0], "lora_name": name, "strength_model": 1.0}
    refused = prompt() | {"9": {"class_type": "LoraLoaderModelOnly", "inputs": inputs}}
    refused["5"]["inputs"]["model"] = ["9", 0]
    assert message in refusal(client, refused | with_fresh_checkpoint(refused))
    assert "transformer" not in loaded_components(tiny_server, "fresh")


def with_fresh_checkpoint(refused: Prompt) -> Prompt:
    """Return the prompt's loader with a checkpoint that no prompt has ever used, if it uses ``tiny``."""
    inputs = dict(refused["1"]["inputs"])
    if inputs["model_name"] == "tiny":
        inputs["model_name"] = "fresh"
    return {"1": {**refused["1"], "inputs": inputs}}


def loaded_components(server: ComfyServer, model: str) -> set[str]:
    """Return which components of a model rank 0 holds."""
    ranks = query.status(Endpoint(folder=server.runtime)).ranks
    loaded = ranks[0].models if ranks else ()
    return {part for each in loaded if Path(each.path).name == model for part in each.parts}


@pytest.mark.parametrize("sampler", ["KSampler", "ParallelSampler"])
@pytest.mark.parametrize(("file", "message"), [("four", "has 4 channels"), ("nan", "not finite (NaN")])
@pytest.mark.daily(2)
def test_bad_latents(tiny_server: ComfyServer, client: ComfyClient, sampler: str, file: str, message: str) -> None:
    refused = prompt(sampler, model_name="fresh too")
    refused["4"] = {"class_type": "LoadLatent", "inputs": {"latent": f"{file}.latent"}}
    assert message in refusal(client, refused)
    # ComfyUI may encode the prompts before it reads the latent.
    assert loaded_components(tiny_server, "fresh too") <= {"text_encoder"}


def test_previews_progress_and_the_text_on_the_loader(client: ComfyClient) -> None:
    for sampler in ("KSampler", "ParallelSampler"):
        with Events(client) as events:
            client.run(prompt(sampler, seed=100 + len(sampler)), deadline=START)
            events.wait(lambda event: event.kind == "executing" and event.data["node"] is None)
            binary = events.of_kind("preview")
        states = [text for node, text in map(progress_text, binary) if node == "1"]
        kinds = {struct.unpack(">I", event.data[:4])[0] for event in binary}
        assert kinds & {1, 4}, "no preview image came"
        assert [event.data["value"] for event in events.of_kind("progress") if event.data["node"] == "5"] == [1, 2, 3]
        assert all(state.startswith("2 CPU ranks, layout auto (guided, without a plan: cfg=2): ") for state in states)
        assert any(": sampling" in state for state in states)
        assert states[-1].endswith(": ready")


def progress_text(event: Event) -> tuple[str, str]:
    """Return node and text of a progress-text frame, or empty strings for other frames."""
    kind, length = struct.unpack(">II", event.data[:8])
    if kind != 3:
        return "", ""
    return event.data[8 : 8 + length].decode(), event.data[8 + length :].decode()


@pytest.mark.parametrize("sampler", ["KSampler", "ParallelSampler"])
def test_interrupt_and_the_next_prompt(client: ComfyClient, sampler: str) -> None:
    reference = pixels(client, client.run(prompt(sampler), deadline=START))
    with Events(client) as events:
        prompt_id = client.submit(prompt(sampler, steps=10_000, seed=4))
        events.wait(lambda event: event.kind == "progress" and event.data["node"] == "5" and event.data["value"] >= 3)
        before = time.monotonic()
        client.interrupt()
        with pytest.raises(ExecutionFailed) as caught:
            client.wait(prompt_id)
    assert caught.value.exception_type == "Interrupted"
    assert time.monotonic() - before < 5
    again = pixels(client, client.run(prompt(sampler, filename_prefix="again")))
    assert np.array_equal(again, reference)
