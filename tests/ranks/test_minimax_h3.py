"""MiniMax-H3 on ranks: times of rows, unlike prompts, and a loop that carries the sound on the picture's schedule."""

import pytest
import torch

from parallel_backend.interfaces.geometry import LATENT, SOUND, TIMESTEP
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward, Sample
from parallel_backend.protocol.packing import pack, unpack
from parallel_backend.samplers.deterministic import euler
from parallel_backend.samplers.interface import run_sampler
from parallel_backend.verify import examples
from tests.ranks import driver, requests
from tests.support import families

NAME = "MiniMaxH3Transformer3DModel"
LAYOUTS = ["", "ulysses=3", "ring=2", "tensor=3", "cfg=2 ulysses=2", "data=2 cfg=2", "ulysses=2 shard_weights"]
LOOPS = ["", "ulysses=3", "cfg=2", "tensor=2", "data=2", "pipe=2 patches=1", "pipe=2 patches=8 warmup=3"]
"""The last of the eight patches has tokens of references alone, and all three steps are exact."""
SIGMAS = torch.tensor([1.0, 0.7, 0.3, 0.0])
SCALE = 4.0


@pytest.fixture(scope="module")
def branches():
    """Prompts with references, with masks, and with neither. The first and the last run as one batch."""
    found = [
        families.inputs(NAME, kind, batch=2, seed=seed) for seed, kind in enumerate(("references", "masked", "t2v"))
    ]
    labels = torch.ones(2, 7, dtype=torch.int64)
    labels[:, 2:5] = 0
    found.append({**families.inputs(NAME, "t2v", batch=2, seed=2), "text_labels": labels})
    found[2]["text_labels"] = torch.ones(2, 7, dtype=torch.int64)
    latents = {name: found[0][name] for name in (LATENT, SOUND)}
    levels = {
        "mask_levels": torch.linspace(0, 1, 10).repeat(2, 1),
        "sound_mask_levels": torch.linspace(1, 0.2, 10).repeat(2, 1),
    }
    found[1] |= levels
    times = torch.tensor([800.0, 300.0])
    return [{**inputs, **latents, TIMESTEP: times} for inputs in found]


@torch.no_grad()
def stock(inputs):
    return families.family(NAME, "t2v").stock(inputs)


def differs(one, other):
    return requests.relative_error(one, other) > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.daily(3)
def test_unlike_prompts_equal_one_process(pools, folders, branches, layout):
    model, ranks = requests.spec(folders(NAME, "t2v"), layout), ParallelLayout.parse(layout).ranks
    for pair in (branches[:2], branches[2:]):
        answers = pools(ranks).run(driver.handle, Forward(model=model, branches=2), examples.branches(pair))
        assert [answer["error"] for answer in answers] == [None] * ranks
        for i, inputs in enumerate(pair):
            assert requests.relative_error(answers[0]["tensors"][str(i)], stock(inputs)) <= 1e-5


@pytest.mark.parametrize("name", ["mask", "sound_mask"])
def test_labels_beyond_their_levels_are_refused(pools, folders, branches, name):
    broken = {**branches[1], f"{name}_labels": branches[1][f"{name}_labels"].clone()}
    broken[f"{name}_labels"][1, 4] = 10
    message = Forward(model=requests.spec(folders(NAME, "t2v"), "ulysses=2"), branches=2)
    answers = pools(2).run(driver.handle, message, examples.branches([branches[0], broken]))
    sentence = f"InvalidRequest: 1.{name}_labels holds 10, and 1.{name}_levels knows 0 to 9"
    assert [answer["error"] for answer in answers] == [sentence] * 2


def test_what_a_prompt_has_shows(branches):
    results = [stock(inputs) for inputs in branches]
    assert differs(results[0], results[2])
    assert differs(results[1], results[2])
    assert differs(results[3], results[2])


@torch.no_grad()
def plain_loop(inputs, *, carried):
    """What ComfyUI's sampler and the outer forward of its class do, in one process."""
    shapes = [inputs[name].shape[1:] for name in (LATENT, SOUND)]

    def denoise(x, sigma):
        video, sound = unpack(x, shapes)
        even = sigma / (12.0 - 11.0 * sigma)
        own_sigma = 3.0 * even / (1.0 + 2.0 * even)
        own = sound * (own_sigma / sigma) if carried else sound
        time = (1000 * sigma).expand(len(x))
        video_out, out = unpack(stock({**inputs, LATENT: video, SOUND: own, TIMESTEP: time}), shapes)
        followed = (1.0 - SCALE) * own + (1.0 + (SCALE - 1.0) * own_sigma) * out if carried else out
        return x - sigma * pack([video_out, followed])

    return run_sampler(euler, denoise, pack([inputs[name] for name in (LATENT, SOUND)]), SIGMAS, lambda *_: None)


@pytest.mark.parametrize("layout", LOOPS)
@pytest.mark.daily(3)
def test_a_loop_carries_the_sound_as_comfyui_does(pools, folders, branches, layout):
    inputs = branches[0]
    x, kept = examples.loop_inputs(NAME, inputs)
    kept["sound_scale"] = torch.full((2,), SCALE)
    tensors = {"x": x, "sigmas": SIGMAS, **{f"{i}.{name}": each for i in range(2) for name, each in kept.items()}}
    message = Sample(
        model=requests.spec(folders(NAME, "t2v"), layout), branches=2, sampler="euler", cfg=3.0,
        timestep_scale=1000.0, latent_shapes=examples.latent_shapes(NAME, inputs),
    )  # fmt: skip
    ranks = ParallelLayout.parse(layout).ranks
    answers = pools(ranks).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * ranks
    wanted = plain_loop(inputs, carried=True)
    assert requests.relative_error(answers[0]["tensors"]["samples"], wanted) <= 1e-4
    assert differs(plain_loop(inputs, carried=False), wanted)
