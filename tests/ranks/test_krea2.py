"""Krea-2 on ranks: references with a timestep of their own, which diffusers does not have, and unlike texts."""

import pytest
import torch

from parallel_backend.interfaces.geometry import LATENT
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from tests.ranks import driver, requests
from tests.support import families

NAME = "Krea2Transformer2DModel"
LAYOUTS = [
    "", "ulysses=2", "ulysses=3", "ulysses=4", "ring=2", "ring=3", "tensor=2", "tensor=3", "ring=2 ulysses=2",
    "tensor=2 ulysses=2", "cfg=2 ulysses=2", "cfg=2", "data=2 cfg=2", "pipe=2 patches=1", "ulysses=3 shard_weights",
]  # fmt: skip


@pytest.fixture(scope="module")
def branches():
    """Four prompts: at the references' timestep 0 and at the latent's, without references, and with a masked text."""
    at_zero, plain, masked = (
        families.inputs(NAME, kind, batch=2, text=text, seed=seed)
        for seed, (kind, text) in enumerate((("references", 7), ("references", 5), ("masked", 11)))
    )
    same = {name: at_zero[name] for name in (LATENT, "timestep")}
    without = {name: each for name, each in plain.items() if not name.startswith("reference")}
    return [
        {**at_zero, "reference_timestep": torch.zeros(2)},
        {**plain, **same},
        {**without, **same},
        {**masked, **same},
    ]


@torch.no_grad()
def on_one_process(inputs):
    family = families.family(NAME, "references")
    state = families.run(family, family.embed(inputs))
    return family.unpatchify(family.head(state), inputs[LATENT].shape[2:])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.daily(5)
def test_prompts_with_unlike_texts_and_references_equal_one_process(pools, folders, branches, layout):
    model = requests.spec(folders(NAME, "references"), layout)
    ranks = ParallelLayout.parse(layout).ranks
    for pair in (branches[:2], branches[2:]):
        given = {f"{i}.{name}": each for i, inputs in enumerate(pair) for name, each in inputs.items()}
        answers = pools(ranks).run(driver.handle, Forward(model=model, branches=2), given)
        assert [answer["error"] for answer in answers] == [None] * ranks
        for i, inputs in enumerate(pair):
            assert requests.relative_error(answers[0]["tensors"][str(i)], on_one_process(inputs)) <= 1e-5


def test_a_reference_and_its_timestep_show(branches):
    at_zero = branches[0]
    plain = {name: each for name, each in at_zero.items() if name != "reference_timestep"}
    without = {name: each for name, each in plain.items() if not name.startswith("reference")}
    results = [on_one_process(inputs) for inputs in (at_zero, plain, without)]
    assert requests.relative_error(results[1], results[0]) > 0.01
    assert requests.relative_error(results[2], results[1]) > 0.01
