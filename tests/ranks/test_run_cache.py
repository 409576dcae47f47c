"""The text's own layers run once in a run, on every rank and in every layout, and their results go with the run."""

import gc
from dataclasses import replace

import pytest
import torch

from parallel_backend.client.constant_tensors import ConstantTensors
from parallel_backend.engine.request import no_step
from parallel_backend.interfaces.family import Family
from parallel_backend.interfaces.geometry import TIMESTEP
from parallel_backend.interfaces.run_cache import RunCache
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward, Sample
from parallel_backend.protocol.run_key import is_changing
from parallel_backend.verify import examples
from tests.ranks import driver, requests
from tests.support import families

FAMILIES = {
    "MiniMaxH3Transformer3DModel": ("t2v", "token_refiner"),
    "Krea2Transformer2DModel": ("masked", "text_fusion"),
    "ZImageTransformer2DModel": ("masked", "cap_embedder"),
}
LAYOUTS = ["", "ulysses=2", "tensor=2", "cfg=2", "data=2", "ulysses=2 shard_weights", "pipe=2 patches=1"]
STEPS = 4
BATCH = 2


@pytest.fixture(params=FAMILIES)
def name(request):
    return request.param


def prompts(name, *, alike):
    """Inputs of two branches with one latent. Alike they run as one batch."""
    kind, _ = FAMILIES[name]
    lengths = (7, 7) if alike else (7, 5)
    both = [families.inputs(name, kind, batch=BATCH, text=text, seed=i) for i, text in enumerate(lengths)]
    shared = {each: both[0][each] for each in both[0] if each.endswith("hidden_states") and "encoder" not in each}
    positions = {each: both[0][each] for each in both[0] if each.endswith("_ids")}
    return [{**inputs, **shared, **positions, TIMESTEP: torch.full((BATCH,), 700.0)} for inputs in both]


def counted(rank, layers, carry_out):
    """Return how often a rank runs layers, over those that it holds when all is done, and how many results it keeps."""
    calls = []
    mine = driver.engine(rank)
    handles = [
        getattr(family.module, layers).register_forward_hook(lambda *_: calls.append(1))
        for components in mine._models.values()
        for family in components.parts._parts.values()
        if isinstance(family, Family) and hasattr(family.module, layers)
    ]
    before = mine.steps
    try:
        answer = carry_out(mine)
    finally:
        for handle in handles:
            handle.remove()
    assert handles, "loaded before"
    gc.collect()
    left = sum(len(each) for each in gc.get_objects() if isinstance(each, RunCache))
    return {"calls": len(calls), "forwards": mine.steps - before, "answer": answer, "left": left}


def run_of(rank, message, steps, layers):
    """Carry out a ``Forward`` and the steps that follow on its connection."""

    def carry_out(mine):
        metas, answers = ConstantTensors().describe(message, steps[0]), []
        sent = [{meta.name: each[meta.name] for meta in metas if is_changing(meta)} for each in steps[1:]]

        def next_step(results):
            answers.append(dict(results))
            return sent.pop(0) if sent else None

        mine._forget_tensors()
        mine.handle(
            message, metas, steps[0] if rank == 0 else None, report=lambda *_: None, cancelled=lambda: False,
            next_step=no_step if rank else next_step,
        )  # fmt: skip
        mine._forget_tensors()
        return answers

    return counted(rank, layers, carry_out)


def loop_of(rank, message, tensors, layers):
    return counted(rank, layers, lambda mine: driver.handle(rank, message, tensors))


def check(found):
    """Each rank runs the layers once for each prompt, or batch of prompts, that it computes, and keeps no result."""
    for rank, each in enumerate(found):
        assert each["calls"] * STEPS == each["forwards"] > 0, (rank, each["calls"], each["forwards"])
        assert each["left"] == 0, rank


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.daily(9)
def test_steps_of_comfyuis_loop(pools, folders, name, layout, alike):
    (kind, layers), both, ranks = FAMILIES[name], prompts(name, alike=alike), ParallelLayout.parse(layout).ranks
    message = Forward(model=requests.spec(folders(name, kind), layout), branches=2, steps=True)
    times = [torch.full((BATCH,), 900.0 - 100 * i) for i in range(STEPS)]
    steps = [examples.branches([{**inputs, TIMESTEP: time} for inputs in both]) for time in times]
    pools(ranks).run(driver.handle, replace(message, steps=False), steps[0])  # which loads the weights
    found = pools(ranks).run(run_of, message, steps, layers)
    assert len(found[0]["answer"]) == STEPS
    check(found)
    family = families.family(name, kind)
    with torch.no_grad():
        for answer, step in zip(found[0]["answer"], steps, strict=True):
            for i, inputs in enumerate(both):
                wanted = family.stock({**inputs, TIMESTEP: step[f"{i}.{TIMESTEP}"]})
                assert requests.relative_error(answer[str(i)], wanted) <= 1e-5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.daily(5)
def test_steps_of_the_backends_loop(pools, folders, name, layout):
    (kind, layers), both, ranks = FAMILIES[name], prompts(name, alike=False), ParallelLayout.parse(layout).ranks
    x, _ = examples.loop_inputs(name, both[0])
    kept = [examples.loop_inputs(name, inputs)[1] for inputs in both]
    tensors = {"x": x, "sigmas": torch.linspace(1, 0, STEPS + 1), **examples.branches(kept)}
    message = Sample(
        model=requests.spec(folders(name, kind), layout), branches=2, sampler="euler", cfg=3.0, timestep_scale=1000.0,
        latent_shapes=examples.latent_shapes(name, both[0]),
    )  # fmt: skip
    pools(ranks).run(driver.handle, message, tensors)
    found = pools(ranks).run(loop_of, message, tensors, layers)
    check(found)
