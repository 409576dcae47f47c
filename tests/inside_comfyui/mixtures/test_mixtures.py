"""Random mixtures of nodes give what ComfyUI alone gives, or are refused by name.

``python -m tests.mixtures --seed 7 --count 200`` runs more of them.
"""

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from typing import Any

import comfy.utils
import pytest
import torch
from any_folder_name.nodes.backend import session
from any_folder_name.nodes.layout import ParallelLayoutNode
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.nodes.model import ParallelModel
from any_folder_name.nodes.sampler import ParallelSampler
from helpers.executor import Executor, NodeFailed
from helpers.freeing_client import FreeingClient
from mixtures.drawing import Mixture, draw
from mixtures.graph import alone
from mixtures.running import Outcome, Runner, assumed_sizes, judged, sample_alone

import nodes as core_nodes

pytestmark = pytest.mark.newest
SEEDS = range(2)
FAULTS: dict[str, dict[str, Any]] = {
    "LoraLoaderModelOnly": {"strength_model": 0.72},
    "CreateHookLoraModelOnly": {"strength_model": 0.41},
    "SetHookKeyframes": {"hook_kf": None},
    "ConditioningSetProperties": {"hooks": None},
}
"""Inputs by node that stand for what ours could get wrong."""
SMALL = ("sd3", "pixart")
"""Families whose models ComfyUI samples in a moment."""
WANTED = os.environ.get("PARALLEL_DIT_MIXTURES", "")
"""The first seed and the number of mixtures, of the command."""


@pytest.fixture(scope="module")
def kinds() -> dict[str, Any]:
    """ComfyUI's nodes and ours, by their ids."""
    asyncio.run(core_nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    Executor(ParallelModel, ParallelLoader, ParallelLayoutNode, ParallelSampler)
    return core_nodes.NODE_CLASS_MAPPINGS


@pytest.fixture
def runner(backend: FreeingClient, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Runs mixtures on a real backend of two ranks."""
    session.use(session.Session(backend))
    assumed_sizes(monkeypatch)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_ENABLED", False)
    return Runner(tmp_path_factory.mktemp("mixtures"))


def test_mixtures_give_what_comfyui_alone_gives(kinds: dict[str, Any], runner: Runner) -> None:
    mixtures = [draw(seed, kinds) for seed in SEEDS]
    outcomes = [runner.run(mixture) for mixture in mixtures]
    wrong = [f"{mixture}: {each.text}" for mixture, each in zip(mixtures, outcomes, strict=True) if each.wrong]
    assert wrong == []
    assert len([each for each in outcomes if each.kind == "equal"]) >= len(SEEDS) // 2


@pytest.mark.newest
@pytest.mark.parametrize("node", FAULTS)
@pytest.mark.daily(1)
def test_a_fault_is_seen(node: str, kinds: dict[str, Any], runner: Runner) -> None:
    """In one of the first mixtures with the node: a negative prompt has no effect where the cfg is 1."""
    assert any(_sees(runner, mixture, node) for mixture in islice(_with(node, kinds), 5))


def _with(node: str, kinds: dict[str, Any]) -> Iterator[Mixture]:
    """Yield mixtures of small models with a node."""
    mixtures = (draw(seed, kinds) for seed in count())
    small = (mixture for mixture in mixtures if all(name.split()[0] in SMALL for name in mixture.names))
    return (each for each in small if any(found["class_type"] == node for found in each.prompt.values()))


def _sees(runner: Runner, mixture: Mixture, node: str) -> bool:
    wrong = {
        key: each | {"inputs": each["inputs"] | (FAULTS[node] if each["class_type"] == node else {})}
        for key, each in mixture.prompt.items()
    }
    runner.write(mixture)
    try:
        wanted = sample_alone(mixture)
    except NodeFailed:
        return False
    return judged(mixture, wanted, sample_alone(replace(mixture, prompt=wrong))).kind == "differs"


@pytest.mark.newest
@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"ring": 0}, "InvalidRequest: layout ring=0"), ({"balance": 3}, "AttributeError: 'int' object")],
    ids=["by a sentence that REFUSALS lacks", "by an error"],
)
@pytest.mark.daily(1)
def test_what_only_ours_cannot_run_fails(
    wrong: dict[str, int], message: str, kinds: dict[str, Any], runner: Runner
) -> None:
    fine = (each for each in islice(_with("ParallelLayout", kinds), 5) if runner.run(each).kind == "equal")
    mixture = next(fine)
    for each in mixture.prompt.values():
        each["inputs"].update(wrong if each["class_type"] == "ParallelLayout" else {})
    outcome = runner.run(mixture)
    assert (outcome.kind, outcome.wrong) == ("fails", True)
    assert message in outcome.text


def test_a_latent_that_is_not_finite_differs(kinds: dict[str, Any]) -> None:
    """Whatever the other latents are."""
    fine, broken = torch.ones(2), torch.tensor([1.0, torch.nan])
    for found in ([fine, broken], [broken, fine]):
        assert judged(draw(0, kinds), [fine, fine], found).kind == "differs"


def test_a_seed_repeats_a_mixture(kinds: dict[str, Any]) -> None:
    mixtures = [draw(seed, kinds) for seed in (3, 3, 4)]
    assert mixtures[0].prompt == mixtures[1].prompt != mixtures[2].prompt
    assert mixtures[0].loras == mixtures[1].loras
    texts = [str(mixture.given) for mixture in mixtures]
    assert texts[0] == texts[1] != texts[2]


def test_the_mixtures_of_comfyui_alone_have_none_of_our_nodes(kinds: dict[str, Any]) -> None:
    for seed in range(200):
        ours, theirs = (prompt.values() for prompt in _both(draw(seed, kinds)))
        assert any(node["class_type"].startswith("Parallel") for node in ours)
        assert not any(node["class_type"].startswith("Parallel") for node in theirs)


def _both(mixture: Mixture) -> tuple[Any, Any]:
    return mixture.prompt, alone(mixture.prompt)


@pytest.mark.skipif(not WANTED, reason="python -m tests.mixtures runs it")
@pytest.mark.timeout(0)
def test_the_mixtures_of_the_command(kinds: dict[str, Any], runner: Runner, capfd: pytest.CaptureFixture[str]) -> None:
    first, count = map(int, WANTED.split(":"))
    outcomes: list[Outcome] = []
    with capfd.disabled():
        print()
        for seed in range(first, first + count):
            mixture, begin = draw(seed, kinds), time.monotonic()
            outcomes.append(outcome := runner.run(mixture))
            took = time.monotonic() - begin
            print(f"seed {seed}: {outcome.kind} ({outcome.text}) | {mixture} | {took:.0f} s", flush=True)
            if outcome.wrong:
                print(json.dumps(mixture.prompt), flush=True)
        print(summary(outcomes))
    assert not any(outcome.wrong for outcome in outcomes)


def summary(outcomes: list[Outcome]) -> str:
    """Return how many mixtures came out how, and why some were refused."""
    counts = Counter(outcome.kind for outcome in outcomes)
    largest = max((outcome.error for outcome in outcomes if outcome.kind == "equal"), default=0.0)
    lines = [", ".join(f"{count} {kind}" for kind, count in counts.most_common())]
    lines.append(f"largest difference of equal ones: {largest:.1e}")
    reasons = Counter(outcome.text for outcome in outcomes if outcome.kind == "refused")
    return "\n".join([*lines, *(f"refused {count} times: {text}" for text, count in reasons.most_common())])
