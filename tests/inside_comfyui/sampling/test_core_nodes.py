"""Every node of ComfyUI that changes a MODEL or a CONDITIONING does the same to ours, or ours refuses it by name.

One that has an effect in ComfyUI alone and none here fails the test, and so does an error that is not ours. Inputs are
made for each node (``helpers.node_inputs``); the page ``docs/nodes.md`` lists the outcomes.

With ``PARALLEL_DIT_WRITE_NODES=1`` the grid writes what it finds into ``core_nodes.json``.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers.layout_cover import IS_NEWEST
from helpers.node_outcomes import Outcome, Unlike, model_nodes, outcome
from helpers.node_sweep import LETTERS, MODELS, NATIVE, Subject, known_outcome, write_known
from natives import HEAVY

import nodes as core_nodes

LAYOUTS = ("ulysses=1", "ulysses=2 shard_weights")
"""One rank, and one layout in which no rank has all weights."""
LIGHT = [name for name in MODELS if NATIVE.get(name) not in HEAVY]


@pytest.fixture(scope="session")
def core() -> dict[str, Any]:
    """ComfyUI's own nodes that change a MODEL or a CONDITIONING."""
    asyncio.run(core_nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    return model_nodes(core_nodes.NODE_CLASS_MAPPINGS)


def try_nodes(
    core: dict[str, Any], names: list[str], subject: Subject, model: Any, *, parallel: bool
) -> tuple[dict[str, Outcome], list[str]]:
    """Return the outcome of each node, and what is wrong with others.

    KSampler and Parallel Sampler take turns. With ``parallel``, Parallel Sampler begins.
    """
    outcomes: dict[str, Outcome] = {}
    wrong: list[str] = []
    for place, name in enumerate(names):
        try:
            turn = bool(place % 2) != parallel
            outcomes[name] = outcome(name, core[name], model, subject.native, parallel=turn)
        except Unlike as error:
            wrong.append(str(error))
    return outcomes, wrong


@pytest.mark.newest
@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.daily(9)
def test_a_share_of_the_nodes(
    name: str, core: dict[str, Any], subject_of: Callable[..., Subject], load_subject: Callable[..., Any]
) -> None:
    """Try every node with one model, and the models in turn. Versions of ComfyUI begin with others."""
    place = LIGHT.index(name)
    layout = ParallelLayout.parse(LAYOUTS[(place + IS_NEWEST) % 2])
    subject = subject_of(name)
    share = sorted(core)[(place + 5 * IS_NEWEST) % len(LIGHT) :: len(LIGHT)]
    outcomes, wrong = try_nodes(core, share, subject, load_subject(subject, layout), parallel=bool(place % 2))
    assert wrong == []
    letters = {node: known_outcome(node, name) for node in outcomes}
    found = {node: LETTERS[each] for node, each in outcomes.items()}
    assert found == {node: letter or found[node] for node, letter in letters.items()}


@pytest.mark.grid
@pytest.mark.timeout(3000)  # for Mochi, whose width ComfyUI fixes
@pytest.mark.parametrize("name", MODELS)
def test_every_node(
    name: str,
    core: dict[str, Any],
    subject_of: Callable[..., Subject],
    load_subject: Callable[..., Any],
) -> None:
    subject, wrong, outcomes = subject_of(name), [], []
    for layout in LAYOUTS:
        model = load_subject(subject, ParallelLayout.parse(layout))
        tried, unlike = try_nodes(core, sorted(core), subject, model, parallel=layout != LAYOUTS[0])
        outcomes.append(tried)
        wrong += [f"{layout}: {each}" for each in unlike]
    assert wrong == []
    assert outcomes[0] == outcomes[1]
    if os.environ.get("PARALLEL_DIT_WRITE_NODES"):
        write_known(name, outcomes[0])
