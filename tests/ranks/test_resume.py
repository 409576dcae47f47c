"""A loop that goes on after a step, from what rank 0 has reported, equals one that was never interrupted."""

import pytest
import torch

from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import HISTORY, KEPT
from parallel_backend.samplers.samplers import SAMPLERS
from tests.ranks import driver, requests
from tests.ranks.requests import Case

SAME_RANKS, FEWER_RANKS = 1e-5, 1e-4
SIGMAS = (1.0, 0.9, 0.75, 0.6, 0.4, 0.2, 0.0)
STEPS = len(SIGMAS) - 1


def run(pools, path, layout, *, resumed=None, **options):
    """Run a request, or what is left of it after a step with ``resumed``; return rank 0's answer."""
    ranks = ParallelLayout.parse(layout).ranks
    message, tensors = requests.sample(requests.spec(path, layout, ranks=ranks), Case(), **options)
    tensors |= {"sigmas": torch.tensor(SIGMAS), **(resumed or {})}
    answers = pools(ranks).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * ranks
    return answers[0]


def steps(answer):
    """The steps that were reported, with what was kept after each."""
    return {
        progress.value: {name.removeprefix(KEPT): tensor for name, tensor in extra.items() if name.startswith(KEPT)}
        for progress, extra in answer["reports"]
        if progress.phase == "sampling"
    }


def error(answer, wanted):
    return requests.relative_error(answer["tensors"]["samples"], wanted["tensors"]["samples"])


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.daily(4)
def test_every_sampler_goes_on(pools, checkpoints, sampler):
    path = checkpoints(heads=3)
    whole = run(pools, path, "ulysses=3", sampler=sampler, keep=True)
    for step in (1, 4):
        kept = steps(whole)[step]
        history = [name for name in kept if name.startswith(HISTORY)]
        assert len(history) == min(SAMPLERS[sampler].remembers, step + sampler.startswith("uni_pc"))
        for layout, limit in (("ulysses=3", SAME_RANKS), ("ulysses=2", FEWER_RANKS)):
            rest = run(pools, path, layout, sampler=sampler, resumed=kept, first_step=step, keep=True)
            assert error(rest, whole) <= limit
            assert list(steps(rest)) == list(range(step + 1, STEPS + 1))


@pytest.mark.parametrize(
    "layout",
    [
        "data=3",
        "data=2 cfg=2",
        "cfg=2 ring=2",
        "tensor=3",
        "ulysses=2 shard_weights",
        "pipe=3 patches=1",
        pytest.param("data=2 pipe=2 patches=1", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("sampler", ["dpmpp_2m", "euler_ancestral"])
@pytest.mark.daily(4)
def test_every_layout_goes_on(pools, checkpoints, layout, sampler):
    path = checkpoints(heads=3, layers=3)
    whole = run(pools, path, layout, sampler=sampler, keep=True)
    kept = steps(whole)[3]
    rest = run(pools, path, layout, sampler=sampler, resumed=kept, first_step=3)
    if "pipe" not in layout or sampler == "euler_ancestral":  # a pipeline keeps no history
        assert error(rest, whole) <= SAME_RANKS
    assert list(steps(rest)) == [4, 5, 6]


@pytest.mark.parametrize(
    "layout", ["pipe=3 patches=4", "cfg=2 pipe=2 patches=3", "data=2 pipe=2 patches=3", "ring=3 stale=previous"]
)
def test_approximate_layouts_go_on_with_a_step_of_warm_up(pools, checkpoints, layout):
    path = checkpoints(heads=3, layers=3)
    exact, whole = run(pools, path, "ulysses=2"), run(pools, path, layout, keep=True)
    rest = run(pools, path, layout, resumed=steps(whole)[3], first_step=3)
    assert 1e-5 < error(rest, exact) <= 1.5 * error(whole, exact)
    last = run(pools, path, layout, resumed=steps(whole)[5], first_step=5)
    alone = run(pools, path, "", resumed=steps(whole)[5], first_step=5)
    assert error(last, alone) <= SAME_RANKS, "one step is all warm-up, so it is exact"


def test_two_calls_a_step_are_kept_after_the_second(pools, checkpoints):
    path = checkpoints(heads=3, layers=3)
    whole = run(pools, path, "pipe=3 patches=1", sampler="heun", keep=True)
    rest = run(pools, path, "pipe=3 patches=1", sampler="heun", resumed=steps(whole)[2], first_step=2)
    assert error(rest, whole) <= SAME_RANKS


@pytest.mark.parametrize("layout", ["pipe=2 patches=1", "ulysses=2"])
@pytest.mark.parametrize("kind", ["eps", "soft mask"])
def test_what_is_kept_is_the_samplers_latent_and_not_the_models_input(pools, checkpoints, layout, kind):
    path, shape = checkpoints(heads=3, layers=3), Case().latent.shape
    extra = {"log_sigmas": torch.linspace(-3, 3, 1000)}
    options = {"prediction": "eps", "timestep_scale": 1.0} if kind == "eps" else {}
    if kind == "soft mask":
        extra = {"mask": torch.full(shape, 0.5), "latent": torch.ones(shape), "noise": torch.zeros(shape)}
    whole = run(pools, path, layout, resumed=extra, keep=True, **options)
    rest = run(pools, path, layout, resumed=extra | steps(whole)[3], first_step=3, **options)
    assert error(rest, whole) <= SAME_RANKS


def test_nothing_is_kept_unless_asked_or_after_the_last_step(pools, checkpoints):
    path = checkpoints(heads=3)
    assert list(map(bool, steps(run(pools, path, "ulysses=2", keep=True)).values())) == [True] * 5 + [False]
    assert not any(steps(run(pools, path, "ulysses=2")).values())


@pytest.mark.parametrize(
    ("first_step", "resumed", "sentence"),
    [
        (-1, {}, "first_step=-1 with 6 steps: 0 to 5 works"),
        (6, {}, "first_step=6 with 6 steps: 0 to 5 works"),
        (0, {"history.0": (2, 16, 3, 5, 7)}, "at most 0 tensors"),
        (2, {"history.1": (2, 16, 3, 5, 7)}, "at most 1 tensors"),
        (2, {"history.0": (2, 16, 3, 5, 6)}, "of the latent's shape"),
        (2, {"history.0": (2, 16, 3, 5, 7), "history.1": (2, 16, 3, 5, 7)}, "got history.0, history.1"),
    ],
)
def test_a_start_that_cannot_be_is_refused(pools, checkpoints, first_step, resumed, sentence):
    spec = requests.spec(checkpoints(heads=3), "ulysses=2", ranks=2)
    message, tensors = requests.sample(spec, Case(), sampler="dpmpp_2m", first_step=first_step)
    tensors |= {"sigmas": torch.tensor(SIGMAS), **{name: torch.zeros(shape) for name, shape in resumed.items()}}
    answers = pools(2).run(driver.handle, message, tensors)
    assert all(sentence in answer["error"] for answer in answers), answers[0]["error"]
