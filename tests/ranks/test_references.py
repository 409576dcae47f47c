"""A step loop in which one prompt has a reference picture and the other has none, or another number of them."""

import pytest
import torch

from parallel_backend.interfaces.geometry import LATENT, TIMESTEP
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Sample
from parallel_backend.samplers.deterministic import euler
from parallel_backend.samplers.interface import run_sampler
from tests.ranks import driver, requests
from tests.support import families

FLUX = "FluxTransformer2DModel"
LAYOUTS = ["", "ulysses=2", "ring=3", "cfg=2", "cfg=2 ulysses=2", "data=2 cfg=2"]
SIGMAS = torch.tensor([1.0, 0.6, 0.0])


@pytest.fixture(scope="module")
def branches():
    """The prompt with references, and one without."""
    cond, uncond = (families.inputs(FLUX, "kontext", batch=3, seed=seed) for seed in (0, 1))
    return [cond, {name: value for name, value in uncond.items() if not name.startswith("reference")}]


@torch.no_grad()
def plain_loop(branches):
    family = families.family(FLUX, "kontext")

    def denoise(x, sigma):
        predicted = [family.stock({**inputs, LATENT: x, TIMESTEP: sigma.expand(len(x))}) for inputs in branches]
        cond, uncond = (x - sigma * out for out in predicted)
        return uncond + (cond - uncond) * 3.0

    return run_sampler(euler, denoise, branches[0][LATENT], SIGMAS, lambda *_: None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loop_equals_the_plain_one(pools, folders, branches, layout):
    model = requests.spec(folders(FLUX, "kontext"), layout)
    given = {
        f"{i}.{name}": value
        for i, inputs in enumerate(branches)
        for name, value in inputs.items()
        if name not in (LATENT, TIMESTEP)
    }
    message = Sample(model=model, branches=2, sampler="euler", cfg=3.0, timestep_scale=1.0)
    ranks = ParallelLayout.parse(layout).ranks
    answers = pools(ranks).run(driver.handle, message, {"x": branches[0][LATENT], "sigmas": SIGMAS, **given})
    assert [answer["error"] for answer in answers] == [None] * ranks
    assert requests.relative_error(answers[0]["tensors"]["samples"], plain_loop(branches)) <= 1e-4
