"""What cannot work is refused alike on all ranks, in one sentence, before weights load; the ranks go on."""

import re
from dataclasses import replace

import pytest
import torch

from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import tiny

TINY = tiny.Tiny(heads=2)


def refused(pools, message, tensors, *, ranks=2):
    """The sentence, which every rank of the mesh must have raised."""
    answers = pools(ranks).run(driver.handle, message, tensors)
    sentences = {answer["error"] for answer in answers}
    assert len(sentences) == 1, sentences
    sentence = sentences.pop()
    assert sentence
    assert sentence.startswith("InvalidRequest: "), sentence
    for answer in answers:
        assert message.model.path not in {model.path for model in answer["models"]}, "weights were loaded"
    return sentence.removeprefix("InvalidRequest: ")


@pytest.fixture
def path(checkpoints):
    """A checkpoint that no test of this file loads."""
    return checkpoints(heads=2, seed=9)


@pytest.mark.parametrize("name", ["x", "1.encoder_hidden_states", "sigmas"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(pools, path, name, value):
    message, tensors = requests.sample(requests.spec(path, "ulysses=2"), Case())
    tensors[name].view(-1)[-1] = value
    assert refused(pools, message, tensors).startswith(f"{name} holds NaN or infinity")


@pytest.mark.parametrize(
    ("ranks", "layout", "case", "options", "words"),
    [
        (2, "cfg=2 ulysses=2", Case(), {}, 'layout "cfg=2 ulysses=2" needs 4 ranks and there are 2'),
        (3, "cfg=2 ulysses=2", Case(), {}, 'layout "cfg=2 ulysses=2" needs 4 ranks and there are 3'),
        (1, "ulysses=2", Case(), {}, 'layout "ulysses=2" needs 2 ranks and there are 1'),
        (2, "cfg=2", Case(), {"cfg": 1.0}, "layout cfg=2 needs guidance other than 1.0"),
        (4, "cfg=2 ulysses=2", Case(batch=1), {"cfg": 1.0}, "layout cfg=2 needs guidance other than 1.0"),
        (3, "cfg=3", Case(), {}, "layout cfg=3: there are 2 branches"),
        (3, "tensor=3", Case(), {}, "layout tensor=3: this model has 2 attention heads"),
        (4, "tensor=4", Case(batch=1), {}, "layout tensor=4: this model has 2 attention heads"),
    ],
)
def test_a_refused_layout_names_others_that_work(pools, path, checkpoints, ranks, layout, case, options, words):
    pool, devices = (4, ranks) if ranks == 1 else (ranks, ranks)
    message, tensors = requests.sample(requests.spec(path, layout, ranks=devices), case, **options)
    sentence = refused(pools, message, tensors, ranks=pool)
    assert sentence.startswith(words)
    named = re.findall(r'"([^"]+)"', sentence.partition("would work: ")[2])
    assert named
    wanted = requests.stock_sample(TINY, case, **options)
    for text in named:
        works, _ = requests.sample(requests.spec(checkpoints(heads=2), text, ranks=devices), case, **options)
        answers = pools(pool).run(driver.handle, works, tensors)
        assert [answer["error"] for answer in answers] == [None] * pool, text
        assert requests.relative_error(answers[0]["tensors"]["samples"], wanted) <= 1e-5


def test_a_layout_larger_than_the_devices_named(pools, path):
    message, tensors = requests.sample(requests.spec(path, "ulysses=2", ranks=1), Case())
    assert "needs 2 ranks and there are 1" in refused(pools, message, tensors)


def test_fewer_ranks_than_devices_leave_the_others_alone(pools, checkpoints):
    message, tensors = requests.sample(requests.spec(checkpoints(heads=3, seed=4), "cfg=2", ranks=3), Case())
    answers = pools(3).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * 3
    assert answers[2]["steps"] == 0
    assert message.model.path not in {model.path for model in answers[2]["models"]}


def test_cfg_axis_with_one_branch(pools, path):
    message, tensors = requests.forward(requests.spec(path, "cfg=2"), Case(texts=(5,)))
    assert refused(pools, message, tensors).startswith("layout cfg=2 needs guidance other than 1.0")


def test_guidance_without_a_second_branch(pools, path):
    message, tensors = requests.sample(requests.spec(path), Case(texts=(5,)), cfg=3.0)
    assert "needs a negative conditioning" in refused(pools, message, tensors)


def test_an_unknown_sampler(pools, path):
    message, tensors = requests.sample(requests.spec(path), Case(), sampler="dpm_fast")
    sentence = refused(pools, message, tensors)
    assert "'dpm_fast'" in sentence
    assert "euler, euler_ancestral" in sentence
    assert "ComfyUI's own loop" in sentence


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": -1}, "seed=-1: a seed from 0"),
        ({"seed": 2**64}, "a seed from 0 to 2**64 - 1"),
        ({"noise_scale": float("nan")}, "noise_scale=nan"),
        ({"first_sigma": 0.0}, "first_sigma=0.0"),
        ({"noise_device": "cuda"}, "would draw its noise on a GPU, and the ranks run on the CPU"),
    ],
)
def test_noise_that_cannot_be_drawn(pools, path, options, words):
    message, tensors = requests.sample(requests.spec(path), Case(), **{"sampler": "lcm", **options})
    assert words in refused(pools, message, tensors)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 4, 1, 4, 4), "has 4 channels and this model takes 16"),
        ((1, 16, 4, 4), "[batch, channels, frames, height, width]"),
        ((1, 16, 1, 1, 4), "smaller than one patch"),
        ((1, 16, 1, 4, 1), "smaller than one patch"),
        ((1, 16, 0, 4, 4), "smaller than one patch"),
        ((0, 16, 1, 4, 4), "[batch, channels, frames, height, width]"),
    ],
)
def test_latents_of_another_shape(pools, path, shape, words):
    message, tensors = requests.sample(requests.spec(path), Case(batch=1))
    assert words in refused(pools, message, tensors | {"x": torch.zeros(shape)})


def test_a_latent_beyond_the_position_table(pools, path):
    message, tensors = requests.sample(requests.spec(path), Case(batch=1))
    sentence = refused(pools, message, tensors | {"x": torch.zeros(1, 16, 1, 4, 130)})
    assert "65 patches" in sentence
    assert "64" in sentence


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"0.encoder_hidden_states": torch.zeros(2, 5, 31)}, "text encoder gives"),
        ({"0.encoder_hidden_states": torch.zeros(3, 5, 32)}, "does not fit a latent batch of 2"),
        ({"0.encoder_hidden_states_image": torch.zeros(2, 5, 32)}, "encoder_hidden_states_image cannot be used"),
        ({"control": torch.zeros(2)}, "control cannot be used"),
        ({"2.encoder_hidden_states": torch.zeros(2, 5, 32)}, "2.encoder_hidden_states cannot be used"),
        ({"sigmas": torch.ones(1)}, "at least one step"),
        ({"sigmas": torch.ones(3, dtype=torch.int64)}, "sigmas is int64"),
        ({"mask": torch.zeros(1, 1, 1, 1, 1)}, "inpainting also needs mask and latent"),
    ],
)
def test_tensors_that_do_not_fit(pools, path, changes, words):
    message, tensors = requests.sample(requests.spec(path), Case())
    assert words in refused(pools, message, tensors | changes)


def test_inpainting_tensors_that_do_not_broadcast(pools, path):
    message, tensors = requests.sample(requests.spec(path), Case())
    more = {name: torch.zeros(2, 16, 3, 5, 7) for name in ("noise", "latent")}
    more["mask"] = torch.zeros(2, 1, 1, 4, 7)
    assert "mask of shape [2, 1, 1, 4, 7]" in refused(pools, message, tensors | more)


def test_a_timestep_for_each_sample(pools, path):
    message, tensors = requests.forward(requests.spec(path), Case())
    assert "one timestep a sample" in refused(pools, message, tensors | {"0.timestep": torch.zeros(3)})


def test_a_branch_without_conditioning(pools, path):
    message, tensors = requests.sample(requests.spec(path), Case())
    del tensors["1.encoder_hidden_states"]
    assert "a branch lacks encoder_hidden_states" in refused(pools, message, tensors)


def test_no_folder(pools, path):
    message, tensors = requests.sample(requests.spec(path), Case())
    message = replace(message, model=replace(message.model, path=str(path / "none")))
    assert "is not a folder" in refused(pools, message, tensors)
