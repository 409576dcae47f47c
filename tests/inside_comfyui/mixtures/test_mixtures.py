"""Random mixtures of nodes give what ComfyUI alone gives, or are refused by name.

``python -m tests.mixtures --seed 7 --count 200`` runs more of them.
"""

import asyncio
import json
import os
import time
from collections import Counter
from typing import Any

import comfy.utils
import pytest
from any_folder_name.nodes.backend import connection
from any_folder_name.nodes.layout import ParallelLayoutNode
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.nodes.model import ParallelModel
from any_folder_name.nodes.sampler import ParallelSampler
from helpers.executor import Executor
from helpers.freeing_client import FreeingClient
from mixtures.drawing import Mixture, draw
from mixtures.graph import alone
from mixtures.running import Outcome, Runner, assumed_sizes

import nodes as core_nodes

SEEDS = range(10)
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
    connection.use_client(backend)
    assumed_sizes(monkeypatch)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_ENABLED", False)
    return Runner(tmp_path_factory.mktemp("mixtures"))


def test_mixtures_give_what_comfyui_alone_gives(kinds: dict[str, Any], runner: Runner) -> None:
    mixtures = [draw(seed, kinds) for seed in SEEDS]
    outcomes = [runner.run(mixture) for mixture in mixtures]
    wrong = [f"{mixture}: {each.text}" for mixture, each in zip(mixtures, outcomes, strict=True) if each.wrong]
    assert wrong == []
    assert len([each for each in outcomes if each.kind == "equal"]) >= len(SEEDS) // 2


def test_a_seed_repeats_a_mixture(kinds: dict[str, Any]) -> None:
    prompts = [draw(seed, kinds).prompt for seed in (3, 3, 4)]
    assert prompts[0] == prompts[1] != prompts[2]


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
