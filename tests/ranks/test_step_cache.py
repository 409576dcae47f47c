"""Step caches on several ranks: the same picture as one process with the same schedule, and the same forwards."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel_backend.client.constant_tensors import ConstantTensors
from parallel_backend.families.shared.patchify import pad_to_patch
from parallel_backend.protocol.messages import FORECASTS, HISTORY, KEPT, POSITION, Sample
from parallel_backend.protocol.run_key import is_changing
from parallel_backend.protocol.tensors import is_sent
from parallel_backend.samplers.interface import run_sampler
from parallel_backend.step_cache.settings import Method, StepCache
from parallel_backend.step_loop.request_sampler import RequestSampler
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import tiny
from tests.support.weight_changes import Change

SIZES = tiny.Tiny(heads=3, layers=3, seed=21)
LAYOUTS = ["", "ulysses=2", "ulysses=3", "ring=3", "tensor=3", "ulysses=3 shard_weights", "cfg=2", "data=2"]
SIGMAS = (1.0, 0.93, 0.86, 0.7, 0.62, 0.45, 0.3, 0.11, 0.0)
CACHE = StepCache(interval=2, order=1, warmup=2, final=1)
COMPUTED = {0, 1, 3, 5, 7}
"""The steps of SIGMAS that CACHE computes."""
CFG = 4.0
STRENGTHS = (0.2, -0.4)


@pytest.fixture
def path(checkpoints):
    return checkpoints(heads=3, layers=3, seed=21)


def line(points, place):
    """The value at ``place`` on the line through the last two points, without the code that is tested."""
    if len(points) < 2:
        return points[-1][1]
    (t, a), (u, b) = points[-2:]
    return a + (b - a) * (place - t) / (u - t)


def alone(case, sampler="euler", first=0, x=None, computed=COMPUTED):
    """The samples of one process: stock forwards, and lines through their guided predictions."""
    inputs, model, steps = case.sample_inputs(SIGMAS), tiny.transformer(SIZES), iter(range(first, 99))
    points: list[tuple[int, torch.Tensor]] = []

    def predict(latent, sigma, branch):
        text = inputs[f"{branch}.encoder_hidden_states"]
        with torch.no_grad():
            times = (sigma * 1000).expand(len(latent))
            out = model(pad_to_patch(latent, SIZES.patch), times, text, return_dict=False)[0]
        return out[:, :, : latent.shape[2], : latent.shape[3], : latent.shape[4]]

    def denoise(latent, sigma):
        step = next(steps)
        if step not in computed:
            return latent - sigma * line(points, step)
        out = predict(latent, sigma, 1)
        out = out + (predict(latent, sigma, 0) - out) * CFG
        points.append((step, out))
        return latent - sigma * out

    message = Sample(model=requests.spec(Path()), branches=2, sampler=sampler, cfg=CFG, seed=requests.SEED)
    kind = RequestSampler(message, inputs["sigmas"], inputs["x"].shape).of_part(lambda whole: whole)
    if first:
        return run_sampler(kind, denoise, x, inputs["sigmas"][first:], lambda *_: None)
    return run_sampler(kind, denoise, inputs["x"], inputs["sigmas"], lambda *_: None)


def sample(path, layout, ranks, case, **options):
    model = requests.spec(path, layout, ranks=ranks)
    message, tensors = requests.sample(model, case, **({"cache": CACHE} | options))
    return message, tensors | {"sigmas": torch.tensor(SIGMAS)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loop_equals_the_same_schedule_in_one_process(pools, path, layout):
    case = Case()
    answers = pools(3).run(driver.handle, *sample(path, layout, 3, case))
    assert answers[0]["error"] is None
    assert answers[0]["tensors"][FORECASTS].tolist() == [3, 8]
    assert requests.relative_error(answers[0]["tensors"]["samples"], alone(case)) <= 1e-4


@pytest.mark.parametrize("layout", ["ulysses=3", "cfg=2", "data=2"])
def test_all_ranks_compute_the_same_calls(pools, path, layout):
    case = Case(texts=(9, 9))
    message, tensors = sample(path, layout, 3, case)
    with_cache = pools(3).run(driver.handle, message, tensors)
    without = pools(3).run(driver.handle, replace(message, cache=None), tensors)
    assert FORECASTS not in without[0]["tensors"]
    for one, other in zip(with_cache, without, strict=True):
        assert one["steps"] * 8 == other["steps"] * 5


@pytest.mark.parametrize("sampler", ["heun", "dpmpp_2m", "euler_ancestral"])
def test_ranks_agree_with_one_rank_for_any_sampler(pools, path, sampler):
    case = Case()
    found = [
        pools(3).run(driver.handle, *sample(path, layout, ranks, case, sampler=sampler))[0]["tensors"]
        for layout, ranks in (("", 1), ("ulysses=2", 2), ("ring=3", 3))
    ]
    assert found[0][FORECASTS][0] > 0
    for each in found[1:]:
        assert requests.relative_error(each["samples"], found[0]["samples"]) <= 1e-4
        assert torch.equal(each[FORECASTS], found[0][FORECASTS])
    if sampler != "heun":
        assert requests.relative_error(found[0]["samples"], alone(case, sampler)) <= 1e-4


def steps_of(rank, message, texts, x):
    """Run euler with one ``Forward`` a step on one connection. Return the samples and what each step forecast."""
    mine, batch = driver.engine(rank), len(x)
    state, forecast, step, before = {"x": x}, [], iter(range(1, 99)), mine.steps

    def tensors(index):
        changing = {"hidden_states": state["x"], "timestep": torch.full((batch,), SIGMAS[index] * 1000)}
        named = {f"{i}.{name}": each for i in range(2) for name, each in changing.items()}
        return named | {POSITION: torch.tensor([float(index), len(SIGMAS) - 1])}

    def take(results, index):
        forecast.append(results[FORECASTS].tolist())
        guided = results["1"] + (results["0"] - results["1"]) * CFG
        state["x"] = state["x"] + guided * (SIGMAS[index + 1] - SIGMAS[index])

    def next_step(results):
        index = next(step)
        take(results, index - 1)
        if index == len(SIGMAS) - 1:
            return None
        following = tensors(index)
        return {meta.name: following[meta.same or meta.name] for meta in metas if is_changing(meta)}

    first = tensors(0) | texts
    metas = ConstantTensors().describe(message, first)
    kept = mine.kept_names(message, metas)
    given = {meta.name: first[meta.name] for meta in metas if is_sent(meta, kept)} if rank == 0 else None
    options = {"next_step": next_step} if rank == 0 else {}
    mine.handle(message, metas, given, report=lambda *_: None, cancelled=lambda: False, **options)
    return {"x": state["x"], "forecast": forecast, "forwards": mine.steps - before}


@pytest.mark.parametrize("layout", [*LAYOUTS, "pipe=3"])
@pytest.mark.daily(4)
def test_the_steps_of_a_run_equal_the_loop(pools, path, layout):
    case = Case()
    message, _ = requests.forward(requests.spec(path, layout, ranks=3), case)
    inputs = case.sample_inputs(SIGMAS)
    texts = {name: tensor for name, tensor in inputs.items() if "." in name}
    message = replace(message, steps=True, cache=CACHE)
    for _ in range(2):  # a second sampling of the same prompt begins anew
        found = pools(3).run(steps_of, message, texts, inputs["x"])
        assert [forecast for forecast, _ in found[0]["forecast"]] == [int(i not in COMPUTED) for i in range(8)]
        assert requests.relative_error(found[0]["x"], alone(case)) <= 1e-4


def test_a_run_that_is_forgotten_warms_up_again(pools, path):
    """As after a rank's death: the ranks have no prediction, so they compute where they would have forecast."""
    case = Case()
    message, tensors = requests.forward(requests.spec(path, "ulysses=3", ranks=3), case)
    message = replace(message, cache=replace(CACHE, warmup=1))

    def asked(step):
        time = {f"{i}.timestep": torch.full((2,), SIGMAS[step] * 1000) for i in range(2)}
        return message, tensors | time | {POSITION: torch.tensor([float(step), 8])}

    forecasts = []
    for step, forget in ((0, False), (1, False), (2, True), (3, True), (4, False)):
        answers = pools(3).run(repeated, *asked(step), forget)
        forecasts.append(answers[0][FORECASTS].tolist()[0])
    assert forecasts == [0, 1, 0, 0, 1]


def repeated(rank, message, tensors, forget):
    mine, metas = driver.engine(rank), ConstantTensors().describe(message, tensors)
    if forget:
        mine._forget_tensors()
    kept = mine.kept_names(message, metas)
    given = {meta.name: tensors[meta.name] for meta in metas if is_sent(meta, kept)} if rank == 0 else None
    return mine.handle(message, metas, given, report=lambda *_: None, cancelled=lambda: False)


def test_a_loop_that_goes_on_warms_up_again(pools, path):
    case = Case()
    message, tensors = sample(path, "ulysses=3", 3, case, keep=True)
    reports = pools(3).run(driver.handle, message, tensors)[0]["reports"]
    kept = {name.removeprefix(KEPT): each for name, each in reports[3][1].items() if name.startswith(KEPT)}
    assert not any(name.startswith(HISTORY) for name in kept)
    answers = pools(3).run(driver.handle, replace(message, first_step=4), tensors | kept)
    wanted = alone(case, first=4, x=kept["x"], computed={4, 5, 7})
    assert answers[0]["tensors"][FORECASTS].tolist() == [1, 4]
    assert requests.relative_error(answers[0]["tensors"]["samples"], wanted) <= 1e-4


@pytest.mark.parametrize("done", [2, 3, 4])
def test_a_cancel_ends_all_ranks_before_a_step_that_is_forecast_and_after_it(pools, path, done):
    message, tensors = sample(path, "ulysses=3", 3, Case())
    answers = pools(3).run(driver.handle, message, tensors, cancel_after=done)
    assert {answer["error"] for answer in answers} == {"Cancelled: sampling was cancelled"}
    assert len(answers[0]["reports"]) == done
    assert pools(3).run(driver.handle, message, tensors)[0]["error"] is None


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("pipe=3", "PipeFusion"), ("pipe=2 patches=1", "pipeline stages"), ("ring=2 stale=previous", "displaced patch"),
        ("ring=2 stale=none", "naive patch"),
    ],
)  # fmt: skip
def test_layouts_with_approximations_of_their_own_are_refused(pools, path, layout, kind):
    answers = pools(3).run(driver.handle, *sample(path, layout, 3, Case()))
    assert all(f"({kind}) in the backend's step loop: switch the cache off" in each["error"] for each in answers)


def test_a_position_belongs_to_a_cache(pools, path):
    message, tensors = requests.forward(requests.spec(path, "", ranks=1), Case())
    position = {POSITION: torch.tensor([0.0, 8.0])}
    errors = [
        pools(3).run(driver.handle, replace(message, cache=cache), tensors | more)[0]["error"]
        for cache, more in ((None, position), (CACHE, {}), (CACHE, {POSITION: torch.tensor([1.0])}))
    ]
    assert "position has no use without a step cache" in errors[0]
    assert "position is missing: a step cache needs" in errors[1]
    assert "position has shape [1]" in errors[2]


METHODS = ("residual", "change")
THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.45, 0.7, 1.0, 1.5, 2.5)
MAY = 8 - len({0, 4, 7})
"""How many of the steps of SIGMAS may be forecast with an interval of 4."""


def by_the_first_block(method, threshold):
    return StepCache(interval=4, method=method, threshold=threshold)


@pytest.fixture(scope="module")
def deciding(pools, checkpoints):
    """``deciding(method)``: a cache whose threshold forecasts some of the steps that it may, and not all."""
    path, found = checkpoints(heads=3, layers=3, seed=21), {}

    def find(method):
        for threshold in THRESHOLDS if method not in found else ():
            cache = by_the_first_block(method, threshold)
            answers = pools(3).run(driver.handle, *sample(path, "", 1, Case(), cache=cache))
            if 0 < answers[0]["tensors"][FORECASTS][0] < MAY:
                found[method] = cache
                break
        return found[method]

    return find


@pytest.mark.parametrize("method", METHODS)
def test_ranks_decide_alike_by_the_first_block(pools, path, deciding, method):
    case, cache = Case(), deciding(method)
    layouts = ["", "ulysses=3", "ring=3", "tensor=3", "ulysses=3 shard_weights", "cfg=2", "data=2"]
    found = [
        pools(3).run(driver.handle, *sample(path, layout, 3 if layout else 1, case, cache=cache))[0]["tensors"]
        for layout in layouts
    ]
    for each in found:
        assert torch.equal(each[FORECASTS], found[0][FORECASTS])
        assert requests.relative_error(each["samples"], found[0]["samples"]) <= 1e-4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("layout", ["ulysses=3", "cfg=2", "data=2"])
@pytest.mark.daily(2)
def test_steps_decide_as_the_loop_does(pools, path, deciding, layout, method):
    case, cache = Case(), deciding(method)
    inputs = case.sample_inputs(SIGMAS)
    texts = {name: tensor for name, tensor in inputs.items() if "." in name}
    message, _ = requests.forward(requests.spec(path, layout, ranks=3), case)
    loop = pools(3).run(driver.handle, *sample(path, layout, 3, case, cache=cache))[0]["tensors"]
    found = pools(3).run(steps_of, replace(message, steps=True, cache=cache), texts, inputs["x"])
    assert sum(forecast for forecast, _ in found[0]["forecast"]) == loop[FORECASTS][0]
    assert requests.relative_error(found[0]["x"], loop["samples"]) <= 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_a_threshold_of_zero_computes_all_and_a_large_one_what_it_must(pools, path, method):
    case = Case()
    exact = pools(3).run(driver.handle, *sample(path, "ulysses=3", 3, case, cache=None))[0]["tensors"]["samples"]
    none, most = (
        pools(3).run(driver.handle, *sample(path, "ulysses=3", 3, case, cache=by_the_first_block(method, threshold)))
        for threshold in (0.0, 10.0)
    )
    assert none[0]["tensors"][FORECASTS].tolist() == [0, 8]
    assert requests.relative_error(none[0]["tensors"]["samples"], exact) <= 1e-5
    assert most[0]["tensors"][FORECASTS].tolist() == [MAY, 8]


def test_a_stage_without_the_first_block_cannot_decide(pools, path):
    message, tensors = requests.forward(requests.spec(path, "pipe=3", ranks=3), Case())
    tensors |= {POSITION: torch.tensor([0.0, 8.0])}
    answers = pools(3).run(driver.handle, replace(message, cache=by_the_first_block("residual", 0.1)), tensors)
    assert all(
        "looks at the first block, which only the first stage of pipe=3 has" in each["error"] for each in answers
    )


@pytest.fixture
def lora(tmp_path):
    return Change.write(tmp_path, tiny.transformer(SIZES), seed=5, rank=2, strength=1.0).file


def drawn(seed, lora):
    """A random layout, request and cache, in half of the cases with a LoRA of some strength."""
    rng = random.Random(seed)
    methods: list[Method] = ["schedule", "schedule", "residual", "change"]
    cache = StepCache(
        interval=rng.randint(1, 5), order=rng.randint(0, 2), warmup=rng.randint(1, 3), first=rng.randint(0, 3),
        final=rng.randint(0, 2), method=rng.choice(methods), threshold=rng.choice([0.05, 0.2, 0.5, 1.0, 10.0]),
    )  # fmt: skip
    options = {
        "sampler": rng.choice(["euler", "euler", "heun", "dpm_2", "dpmpp_2m", "uni_pc", "euler_ancestral"]),
        "cfg": rng.choice([1.0, 4.0, 7.5]),
        "cache": cache,
        "adapters": rng.choice([(), (replace(lora, strength=rng.choice(STRENGTHS)),)]),
    }
    layouts = [each for each in LAYOUTS if options["cfg"] != 1.0 or each != "cfg=2"]
    steps = rng.randint(1, 14)
    sigmas = torch.tensor([1 - (step / steps) ** rng.choice([0.7, 1.0, 1.6]) for step in range(steps)] + [0.0])
    case = Case(batch=rng.randint(1, 3), texts=rng.choice([(9, 9), (9, 4)]), seed=seed)
    return rng.choice(layouts), case, options, sigmas.sort(descending=True).values


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 20))])
def test_random_prompts_give_what_one_rank_gives(pools, path, lora, seed):
    for number in range(10 * seed, 10 * seed + 10):
        layout, case, options, sigmas = drawn(number, lora)
        found = []
        for each, ranks in (("", 1), (layout, 3)):
            message, tensors = requests.sample(requests.spec(path, each, ranks=ranks), case, **options)
            answers = pools(3).run(driver.handle, message, tensors | {"sigmas": sigmas})
            assert answers[0]["error"] is None, (number, layout, options)
            found.append(answers[0]["tensors"])
        assert torch.equal(found[0][FORECASTS], found[1][FORECASTS]), (number, layout, options)
        error = requests.relative_error(found[1]["samples"], found[0]["samples"])
        assert error <= 1e-4, (number, layout, options, error)
