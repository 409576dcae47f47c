"""A checkpoint with two transformers switches between them by the timestep, on every rank alike."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from lab.verify.loops import run
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.engine.validation import check_sample
from parallel_backend.families.registry import family_of
from parallel_backend.families.shared.patchify import pad_to_patch
from parallel_backend.protocol.tensors import describe
from parallel_backend.samplers.deterministic import euler
from parallel_backend.samplers.interface import run_sampler
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import tiny

CLOSE = 1e-4
HIGH, LOW = tiny.Tiny(heads=3), tiny.Tiny(heads=3, seed=7)
BOUNDARY = 0.6


@pytest.fixture(scope="module")
def two(checkpoints, tmp_path_factory):
    """A checkpoint with a high-noise and a low-noise transformer."""
    folder = shutil.copytree(checkpoints(heads=3), tmp_path_factory.mktemp("experts") / "model")
    tiny.transformer(LOW).save_pretrained(folder / "transformer_2")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"transformer_2": index["transformer"], "boundary_ratio": BOUNDARY}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def stock(case):
    """The expected samples, from diffusers' own forwards in one process."""
    inputs, models = case.sample_inputs(), (tiny.transformer(HIGH), tiny.transformer(LOW))

    def denoise(x, sigma):
        model, time = models[int(sigma < BOUNDARY)], (sigma * 1000.0).expand(x.shape[0])
        outs = [
            model(pad_to_patch(x, HIGH.patch), time, inputs[f"{i}.encoder_hidden_states"], return_dict=False)[0]
            for i in (0, 1)
        ]
        cond, uncond = (x - sigma * out[:, :, : x.shape[2], : x.shape[3], : x.shape[4]] for out in outs)
        return uncond + (cond - uncond) * 4.0

    with torch.no_grad():
        return run_sampler(euler, denoise, inputs["x"], inputs["sigmas"], lambda *_: None)


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, ""), (2, "cfg=2"), (3, "data=3"), (4, "ring=2 ulysses=2 shard_weights")]
)
def test_a_loop_over_the_boundary_equals_the_plain_one(pools, two, ranks, layout):
    message, tensors = requests.sample(requests.spec(two, layout), Case())
    answers = pools(ranks).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * ranks
    assert requests.relative_error(answers[0]["tensors"]["samples"], stock(Case())) <= CLOSE
    (held,) = [model for model in answers[0]["models"] if model.path == str(two)]
    assert {"transformer", "transformer_2"} <= set(held.parts)


@pytest.mark.parametrize(("ranks", "layout"), [(2, "cfg=2"), (3, "data=3"), (3, "tensor=3")])
def test_experts_stream_one_after_the_other(pools, two, streaming, ranks, layout):
    streaming(ranks)
    test_a_loop_over_the_boundary_equals_the_plain_one(pools, two, ranks, layout)
    pools(ranks).run(driver.drop, str(two), "transformer", (0,))
    test_a_loop_over_the_boundary_equals_the_plain_one(pools, two, ranks, layout)


@pytest.mark.parametrize("layout", ["pipe=2 patches=3", "ring=2 stale=previous"])
def test_a_switch_warms_up_again(pools, two, layout):
    """The result equals the one-process loop that warms up again, and differs from an exact loop."""
    message, tensors = requests.sample(requests.spec(two, layout, ranks=2), Case())
    tensors["sigmas"] = torch.tensor([1.0, 0.9, 0.8, 0.7, 0.5, 0.4, 0.2, 0.0])
    answers = pools(2).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None, None]
    plan = check_sample(message, describe(tensors), open_checkpoint(two), 2)
    models = [family_of("WanTransformer3DModel")(tiny.transformer(sizes)) for sizes in (HIGH, LOW)]
    wanted, exact = (
        run.reference_samples(
            lambda time: models[int(time < BOUNDARY * 1000)], message, tensors, replace(plan, layout=each)
        )
        for each in (plan.layout, replace(plan.layout, warmup=7))
    )
    got = answers[0]["tensors"]["samples"]
    assert requests.relative_error(got, wanted) <= CLOSE
    assert requests.relative_error(got, exact) > CLOSE


def test_samples_on_both_sides_are_refused_on_every_rank(pools, two):
    message, tensors = requests.forward(requests.spec(two, "ulysses=2"), Case())
    assert tensors["0.timestep"].tolist() == [900.0, 300.0]
    answers = pools(2).run(driver.handle, message, tensors)
    assert all("both transformers" in answer["error"] for answer in answers)


@pytest.mark.parametrize(
    ("changed", "said"), [({"boundary_ratio": None}, "a number between 0 and 1"), ({"boundary_ratio": 875}, "875")]
)
def test_an_invalid_boundary_ratio_is_refused(pools, two, tmp_path, changed, said):
    folder = shutil.copytree(two, tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | changed))
    answers = pools(2).run(driver.handle, *requests.sample(requests.spec(folder, "ulysses=2"), Case()))
    assert all(said in answer["error"] for answer in answers)
