"""What the text's own layers have computed is kept for a run, and no longer than it is right."""

import gc

import pytest
import torch

from parallel_backend.families.shared.kept_text import KeptText
from parallel_backend.interfaces.geometry import TEXT, TIMESTEP
from tests.support import families

FAMILIES = {
    "MiniMaxH3Transformer3DModel": ("t2v", "token_refiner"),
    "Krea2Transformer2DModel": ("masked", "text_fusion"),
}


@pytest.fixture
def kept():
    return KeptText()


@pytest.fixture
def calls():
    return []


def compute(calls, value):
    def run():
        calls.append(value)
        return torch.full((1,), float(value))

    return run


def test_the_same_tensors_are_computed_once(kept, calls):
    text, mask = torch.ones(2), torch.ones(2)
    first = kept.get((text, mask), (), compute(calls, 1))
    assert kept.get((text, mask), (), compute(calls, 2)) is first
    assert calls == [1]


@pytest.mark.parametrize(("mask", "changes"), [(None, ()), (torch.zeros(2), ()), (torch.ones(2), ()), ("same", "lora")])
def test_anything_else_is_computed_anew(kept, calls, mask, changes):
    text, before = torch.ones(2), torch.ones(2)
    kept.get((text, before), (), compute(calls, 1))
    assert kept.get((text, before if isinstance(mask, str) else mask), changes, compute(calls, 2)).item() == 2


def test_changes_that_are_taken_back_do_not_bring_a_result_back(kept, calls):
    text = torch.ones(2)
    for number, changes in enumerate(((), "lora", ())):
        assert kept.get((text,), changes, compute(calls, number)).item() == number


def test_results_go_with_their_tensors_and_are_few(kept, calls):
    texts = [torch.full((2,), float(i)) for i in range(6)]
    for number, text in enumerate(texts):
        kept.get((text,), (), compute(calls, number))
    assert kept.get((texts[-1],), (), compute(calls, 9)).item() == 5
    assert kept.get((texts[0],), (), compute(calls, 9)).item() == 9
    del texts[1:], text
    gc.collect()
    kept.get((texts[0],), (), compute(calls, 9))
    assert len(kept._kept) == 1


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_steps_of_a_run_refine_the_text_once(name):
    kind, layers = FAMILIES[name]
    family, inputs = families.family(name, kind), families.inputs(name, kind, batch=1)
    called = []
    module = getattr(family.module, layers)
    handle = module.register_forward_hook(lambda *_: called.append(1))
    try:
        streams = [family.embed({**inputs, TIMESTEP: torch.full((1,), t)}).streams[TEXT] for t in (1.0, 0.5)]
        assert len(called) == 1
        assert torch.equal(*streams)
        family.changes = "lora"
        assert torch.equal(family.embed(inputs).streams[TEXT], streams[0])
        family.embed({each: tensor.clone() for each, tensor in inputs.items()})
        assert len(called) == 3
    finally:
        handle.remove()
