"""Steps of a run send their latent alone, and predict what diffusers' own forward does."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.client.constant_tensors import ConstantTensors
from parallel_backend.engine.request import no_step
from parallel_backend.errors import InvalidRequest
from parallel_backend.protocol.messages import Unload
from parallel_backend.protocol.run_key import is_changing, run_key
from parallel_backend.protocol.tensors import is_sent
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import tiny

SIZES = tiny.Tiny(heads=3, layers=3, seed=21)
LAYOUTS = ["ulysses=3", "ring=3", "tensor=3", "pipe=3", "ulysses=3 shard_weights", "cfg=2", "data=2", ""]
CHANGING = {"0.hidden_states", "0.timestep"}
"""What a step sends: both branches have the same latent and timestep."""


@pytest.fixture
def path(checkpoints):
    return checkpoints(heads=3, layers=3, seed=21)


def step(rank, message, tensors, forget=()):
    """Carry out a ``Forward`` as the rank's process does; return also what was sent, and whether it repeats a run.

    Args:
        forget: ranks that forget beforehand what they keep.
    """
    mine, metas = driver.engine(rank), ConstantTensors().describe(message, tensors)
    if rank in forget:
        mine._forget_tensors()
    before, kept = mine._runs.get(run_key(message, metas)), mine.kept_names(message, metas)
    sent = {meta.name: tensors[meta.name] for meta in metas if is_sent(meta, kept)}
    try:
        given = sent if rank == 0 else None
        answer = mine.handle(message, metas, given, report=lambda *_: None, cancelled=lambda: False)
    except InvalidRequest as error:
        return str(error)
    after = mine._runs.get(run_key(message, metas))
    return {"tensors": answer, "sent": set(sent), "repeats": after is before is not None}


def inputs(case, number):
    """The tensors of step ``number``."""
    generator = torch.Generator().manual_seed(1000 + number)
    latent, time = torch.randn(case.latent.shape, generator=generator), case.timestep - 10.0 * number
    changed = {f"{i}.{name}": each for i in range(2) for name, each in (("hidden_states", latent), ("timestep", time))}
    return case.forward_inputs() | changed


def check(answers, case, number):
    given = inputs(case, number)
    for branch in "01":
        wanted = requests.stock_forward(
            SIZES, *(given[f"{branch}.{name}"] for name in ("hidden_states", "timestep", "encoder_hidden_states"))
        )
        assert requests.relative_error(answers[0]["tensors"][branch], wanted) <= 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.daily(3)
def test_each_step_equals_the_plain_forward(pools, path, layout):
    case = Case()
    message = requests.forward(requests.spec(path, layout, ranks=3), case)[0]
    for number in range(3):
        answers = pools(3).run(step, message, inputs(case, number), (0, 1, 2) if not number else ())
        check(answers, case, number)
        assert {answer["repeats"] for answer in answers} == {number > 0}
        assert (answers[0]["sent"] == CHANGING) == (number > 0)


def run_of(rank, message, steps):
    """Carry out a ``Forward`` and the steps that follow on its connection. Return the answers, and the forwards."""
    mine, metas = driver.engine(rank), ConstantTensors().describe(message, steps[0])
    sent, answers, before = [{name: each[name] for name in CHANGING} for each in steps[1:]], [], mine.steps

    def next_step(results):
        answers.append(dict(results))
        if not sent:
            return None
        changing = sent.pop(0)
        return {meta.name: changing[meta.same or meta.name] for meta in metas if is_changing(meta)}

    kept = mine.kept_names(message, metas)
    given = {meta.name: steps[0][meta.name] for meta in metas if is_sent(meta, kept)} if rank == 0 else None
    asked = no_step if rank else next_step
    mine.handle(message, metas, given, report=lambda *_: None, cancelled=lambda: False, next_step=asked)
    return {"answers": answers, "forwards": mine.steps - before}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.daily(3)
def test_each_step_on_one_connection_equals_the_plain_forward(pools, path, layout):
    case = Case()
    message = replace(requests.forward(requests.spec(path, layout, ranks=3), case)[0], steps=True)
    found = pools(3).run(run_of, message, [inputs(case, number) for number in range(4)])
    assert len(found[0]["answers"]) == 4
    for number, tensors in enumerate(found[0]["answers"]):
        check([{"tensors": tensors}], case, number)
    assert [each["answers"] for each in found[1:]] == [[], []]
    assert found[0]["forwards"] >= 4


def test_a_step_with_nan_ends_the_run_and_is_refused_as_a_request(pools, path):
    case = Case()
    message = replace(requests.forward(requests.spec(path, "ulysses=3", ranks=3), case)[0], steps=True)
    bad = inputs(case, 1)
    bad["0.hidden_states"] = bad["0.hidden_states"].clone()
    bad["0.hidden_states"][0, 0, 0, 0, 0] = torch.nan
    found = pools(3).run(run_of, message, [inputs(case, 0), bad, inputs(case, 2)])
    assert len(found[0]["answers"]) == 1
    refused = pools(3).run(step, message, bad | {"1.hidden_states": bad["0.hidden_states"]})
    assert refused == ["0.hidden_states holds NaN or infinity: check the node that made it"] * 3
    check(pools(3).run(step, message, inputs(case, 2)), case, 2)


def test_ranks_that_keep_different_tensors_agree(pools, path):
    """Rank 0 sends what another rank lacks, and asks the client for what it lacks itself."""
    case = Case()
    message = requests.forward(requests.spec(path, "ulysses=3", ranks=3), case)[0]
    pools(3).run(step, message, inputs(case, 0))
    for number, forget in enumerate(((1,), (0,), (2, 0)), 1):
        answers = pools(3).run(step, message, inputs(case, number), forget)
        check(answers, case, number)
        assert not any(answer["repeats"] for answer in answers)
        assert (answers[0]["sent"] == CHANGING) == (0 not in forget)
    assert all(answer["repeats"] for answer in pools(3).run(step, message, inputs(case, 4)))


def test_models_layouts_and_weights_take_turns(pools, path, checkpoints):
    case, other = Case(), checkpoints(heads=3, layers=3, seed=22)
    one = requests.forward(requests.spec(path, "ulysses=3", ranks=3), case)[0]
    models = requests.spec(other, "ring=3", ranks=3), requests.spec(path, "tensor=3", ranks=3)
    turns = [one, *(replace(one, model=model) for model in models), replace(one, skipped=((1,), ()))]
    alone = [pools(3).run(step, message, inputs(case, 7), (0, 1, 2)) for message in turns]
    for _ in range(2):
        for message, expected in zip(turns, alone, strict=True):
            answers = pools(3).run(step, message, inputs(case, 7))
            assert answers[0]["sent"] == CHANGING
            for branch, wanted in expected[0]["tensors"].items():
                assert requests.relative_error(answers[0]["tensors"][branch], wanted) <= 1e-6


def test_an_unload_ends_a_run_and_the_text_stays(pools, path):
    case = Case()
    message = requests.forward(requests.spec(path, "ulysses=3", ranks=3), case)[0]
    for number in range(2):
        pools(3).run(step, message, inputs(case, number))
    pools(3).run(driver.handle, Unload(model=message.model), {})
    answers = pools(3).run(step, message, inputs(case, 2))
    check(answers, case, 2)
    assert not any(answer["repeats"] for answer in answers)
    assert answers[0]["sent"] == CHANGING


def test_a_latent_that_is_not_finite_is_refused_in_any_step(pools, path):
    case = Case()
    message = requests.forward(requests.spec(path, "ulysses=3", ranks=3), case)[0]
    pools(3).run(step, message, inputs(case, 0))
    bad = inputs(case, 1)
    for branch in "01":
        bad[f"{branch}.hidden_states"] = bad[f"{branch}.hidden_states"].clone()
        bad[f"{branch}.hidden_states"][0, 3, 0, 1, 2] = float("inf")
    refused = pools(3).run(step, message, bad)
    assert refused[0] == "0.hidden_states holds NaN or infinity: check the node that made it"
    assert all(isinstance(answer, str) for answer in refused)
    answers = pools(3).run(step, message, inputs(case, 2))
    check(answers, case, 2)
    assert all(answer["repeats"] for answer in answers)


def test_a_full_device_forgets_tensors_before_weights(pools, path):
    case = Case()
    message = requests.forward(requests.spec(path, "ulysses=3", ranks=3), case)[0]
    pools(3).run(step, message, inputs(case, 0))
    freed = pools(3).run(free_next, message.model)
    assert freed == [(True, 0, ["transformer"])] * 3
    check(pools(3).run(step, message, inputs(case, 1)), case, 1)


def free_next(rank, model):
    """Free what is next in the order; return also the bytes that are kept then, and what is loaded."""
    mine = driver.engine(rank)
    parts = mine._components(model).parts
    freed = mine._memory.free_next(parts)
    return freed, mine._kept.nbytes, list(parts.names())
