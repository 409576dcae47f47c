"""What a step sends and gets: its latent and its prediction alone, in the model's dtype, and nothing that is stale."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.protocol import request_log
from comfy_extras.nodes_context_windows import ContextWindowsManualNode
from helpers.freeing_client import FreeingClient
from helpers.inside_fixtures import ksampler, native_case, relative_error
from natives import CASES
from torch import Tensor

pytestmark = pytest.mark.newest

CLOSE, FAR = 1e-4, 1e-2
NAMES = ("flux dev", "wan i2v 2.1", "wan i2v 2.2", "qwen_image edit")
ITEM = {"fp32": 4, "bf16": 2}
PATIENCE = 10.0


def options_of(name: str, texts: tuple[int, int] = (1, 2), **changes: Any) -> dict[str, Any]:
    """Return what KSampler takes of a case."""
    case = CASES[name]
    positive, negative = (case.conditioning(seed) for seed in texts)
    return {"latent": case.samples(), "positive": positive, "negative": negative, "cfg": 4.0, **changes}


@pytest.fixture
def run(backend: FreeingClient) -> Callable[..., request_log.RequestLine]:
    """``run(model, **options)`` samples, and returns the line in the log of the run of its steps."""

    def lines() -> list[request_log.RequestLine]:
        return list(request_log.read(backend.endpoint.request_log))

    def sampled(model: Any, **options: Any) -> request_log.RequestLine:
        before, end = {line.id for line in lines()}, time.monotonic() + PATIENCE
        ksampler(model, **options)
        while not (new := [line for line in lines() if line.id not in before]) and time.monotonic() < end:
            time.sleep(0.02)
        (line,) = new
        assert (line.kind, line.steps) == ("Forward", options["steps"])
        return line

    return sampled


@pytest.mark.parametrize("dtype", ITEM)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.daily(3)
def test_a_step_moves_latent_and_prediction_alone(
    name: str, dtype: str, load_case: Callable[..., Any], run: Callable[..., request_log.RequestLine]
) -> None:
    """Guidance has two predictions, and one latent. The timesteps are the few bytes more."""
    model, latent = load_case(name, ParallelLayout(ulysses=2), dtype=dtype), math.prod(CASES[name].latent) * ITEM[dtype]
    short = run(model, **options_of(name, (11, 12), steps=2))
    long = run(model, **options_of(name, (21, 22), steps=6))
    seed = run(model, **options_of(name, (21, 22), steps=6, seed=6))
    assert short.received > 2.1 * latent, "the first step sends the prompts"
    assert long.received - short.received <= 4 * 1.1 * latent
    assert seed.received <= 6 * 1.1 * latent
    assert (short.sent, long.sent, seed.sent) == (2 * 2 * latent, 6 * 2 * latent, 6 * 2 * latent)


@pytest.mark.parametrize("name", ["flux dev", "wan i2v 2.2", "qwen_image edit"])
def test_ranks_would_round_a_latent_alike(name: str, load_case: Callable[..., Any]) -> None:
    model = load_case(name, ParallelLayout(ulysses=2), dtype="bf16")
    rounded = ksampler(model, **options_of(name))
    model.model.diffusion_model.dtype = torch.float32  # in which ComfyUI then passes latent and text
    assert torch.equal(ksampler(model, **options_of(name)), rounded)


def with_changing_image(model: Any) -> Any:
    """Return a model whose image fades from step to step, as a node's wrapper may let it."""
    model = model.clone()

    def faded(apply_model: Callable[..., Tensor], args: dict[str, Any]) -> Tensor:
        image = args["c"]["c_concat"] * (args["timestep"][0] / 1000).clamp(0, 1)
        return apply_model(args["input"], args["timestep"], **(args["c"] | {"c_concat": image}))

    model.set_model_unet_function_wrapper(faded)
    return model


def in_windows(model: Any) -> Any:
    """Return a model that sees two of three frames at a time, and so two parts of its image in turns."""
    return ContextWindowsManualNode.execute(
        model, context_length=2, context_overlap=1, context_schedule="standard_static", context_stride=1,
        closed_loop=False, fuse_method="pyramid", dim=2, freenoise=False,
    ).args[0]  # fmt: skip


@pytest.mark.parametrize("change", [with_changing_image, in_windows])
def test_what_changes_from_call_to_call_is_sent_again(
    change: Callable[[Any], Any], load_case: Callable[..., Any]
) -> None:
    """Of a batch of one: ComfyUI's windows take no other."""
    name = "wan i2v 2.2"
    options = options_of(name, steps=4, latent={"samples": CASES[name].samples()["samples"][:1]})
    reference = ksampler(change(native_case(name)), **options)
    assert relative_error(ksampler(native_case(name), **options), reference) > FAR
    model = load_case(name, ParallelLayout(ulysses=2))
    for _ in range(2):
        assert relative_error(ksampler(change(model), **options), reference) < CLOSE


def test_conditioning_that_a_node_changes_in_place_is_sent_again(load_case: Callable[..., Any]) -> None:
    name = "qwen_image edit"
    model, options = load_case(name, ParallelLayout(ulysses=2)), options_of(name)
    for _ in range(2):
        assert relative_error(ksampler(model, **options), ksampler(native_case(name), **options)) < CLOSE
        options["positive"][0][1]["reference_latents"][0] += 1.0
        options["negative"][0][0][:, 0] += 1.0
