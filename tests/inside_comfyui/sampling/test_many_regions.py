"""Prompts of very many regions, which have more tensors than one message may have."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_folder_name.nodes.remote.record_replay import MOST_BRANCHES, BranchCall, CallReplayer, requests_of
from any_folder_name.nodes.remote.weight_changes import WeightChanges
from any_folder_name.parallel_backend.client.client import Client
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.protocol.frames import MAX_TENSORS
from any_folder_name.parallel_backend.protocol.messages import Forward
from helpers.inside_fixtures import ksampler, native_case, relative_error
from natives import CASES
from natives.case import seeded

import nodes as core_nodes

pytestmark = pytest.mark.newest

CLOSE, FAR = 1e-4, 1e-2


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Forward]:
    """The requests for forwards."""
    messages: list[Forward] = []
    attempt = Client.attempt

    def recorded(client: Client, message: Any, *args: Any, **options: Any) -> Any:
        messages.extend([message] if isinstance(message, Forward) else [])
        return attempt(client, message, *args, **options)

    monkeypatch.setattr(Client, "attempt", recorded)
    return messages


def regions(name: str, count: int) -> list[Any]:
    """Return a conditioning of so many prompts, each for a part of the image that its mask gives."""
    case, combined = CASES[name], list[Any]()
    height, width = case.latent[-2:]
    for i in range(count):
        mask = (seeded(i)(1, 8 * height, 8 * width) > 0).float()
        prompt = case.conditioning(1000 + i % 7, shorter=i % 3)
        (part,) = core_nodes.ConditioningSetMask().append(prompt, mask, "default", 1.0)
        (combined,) = core_nodes.ConditioningCombine().combine(combined, part)
    return combined


@pytest.mark.parametrize(
    ("name", "count", "layout"), [("flux dev", 60, "cfg=2"), ("flux dev", 500, "ulysses=2"), ("wan t2v", 60, "data=2")]
)
def test_many_regions_equal_comfyui(
    name: str, count: int, layout: str, load_case: Callable[..., Any], sent: list[Forward]
) -> None:
    options = {"positive": regions(name, count), "negative": CASES[name].conditioning(2), "steps": 1, "cfg": 4.0}
    latent = CASES[name].samples()
    reference = ksampler(native_case(name), latent, **options)
    fewer = ksampler(native_case(name), latent, **{**options, "positive": options["positive"][: count // 2]})
    assert relative_error(fewer, reference) > FAR
    model = load_case(name, ParallelLayout.parse(layout))
    assert relative_error(ksampler(model, latent, **options), reference) < CLOSE
    assert sum(message.branches for message in sent) == count + 1
    assert max(message.branches for message in sent) == MOST_BRANCHES


def branches(count: int, inputs: int = 5) -> list[BranchCall]:
    tensors = {str(name): torch.zeros(1) for name in range(inputs)}
    return [
        BranchCall(index=0, inputs=tensors | {"0": torch.tensor([float(i)])}, latents=("0",), changes=WeightChanges())
        for i in range(count)
    ]


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (8, [8]), (9, [4, 5]), (61, [7, 8, 7, 8, 8, 7, 8, 8])])
def test_requests_are_few_and_of_equal_size(count: int, sizes: list[int]) -> None:
    parts = list(requests_of(branches(count)))
    assert sorted(map(len, parts)) == sorted(sizes)
    assert [place for part in parts for place in part] == list(range(count))


@pytest.mark.parametrize(("inputs", "most"), [(32, 8), (100, 2), (MAX_TENSORS, 1), (MAX_TENSORS + 1, 1)])
def test_a_branch_of_many_inputs_shares_its_request_with_fewer(inputs: int, most: int) -> None:
    assert max(map(len, requests_of(branches(24, inputs)))) == most


@pytest.mark.parametrize("order", [1, -1])
def test_each_call_gets_its_own_answer(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once where the order is the same: comparing each of 500 calls with all before it takes longer than a step."""
    calls, compared = branches(50), list[BranchCall]()
    equals = BranchCall.equals
    monkeypatch.setattr(BranchCall, "equals", lambda call, other: compared.append(call) or equals(call, other))
    replayer = CallReplayer(calls)
    for call in calls[::order]:
        (answer,) = replayer.answer([call], lambda asked: [each.inputs["0"] * 2 for each in asked])
        assert answer == call.inputs["0"] * 2
    assert order == -1 or len(compared) == len(calls)
