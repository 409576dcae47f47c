"""What a run has computed is kept for its steps, and no longer than it is right."""

import gc

import pytest
import torch

from parallel_backend.families.registry import family_of
from parallel_backend.interfaces.geometry import TEXT, TIMESTEP
from parallel_backend.interfaces.run_cache import RunCache
from parallel_backend.verify import examples
from tests.support import families

FAMILIES = {
    "MiniMaxH3Transformer3DModel": ("t2v", "token_refiner"),
    "Krea2Transformer2DModel": ("masked", "text_fusion"),
    "ZImageTransformer2DModel": ("masked", "cap_embedder"),
}


@pytest.fixture
def cache():
    return RunCache()


@pytest.fixture
def calls():
    return []


def compute(calls, value):
    def run():
        calls.append(value)
        return torch.full((1,), float(value))

    return run


def test_the_same_tensors_are_computed_once(cache, calls):
    text, mask = torch.ones(2), torch.ones(2)
    first = cache.get("text", (text, mask), compute(calls, 1))
    assert cache.get("text", (text, mask), compute(calls, 2)) is first
    assert calls == [1]


@pytest.mark.parametrize(("name", "mask"), [("text", None), ("text", torch.ones(2)), ("keys", "same")])
def test_anything_else_is_computed_anew(cache, calls, name, mask):
    text, before = torch.ones(2), torch.ones(2)
    cache.get("text", (text, before), compute(calls, 1))
    assert cache.get(name, (text, before if isinstance(mask, str) else mask), compute(calls, 2)).item() == 2
    assert cache.get("text", (text, before), compute(calls, 3)).item() == 1


def test_any_number_of_prompts_takes_turns(cache, calls):
    texts = [torch.full((2,), float(i)) for i in range(20)]
    for _ in range(3):
        for number, text in enumerate(texts):
            assert cache.get("text", (text,), compute(calls, number)).item() == number
    assert calls == list(range(20))


def test_results_go_with_what_they_come_from(cache, calls):
    texts, mask = [torch.full((2,), float(i)) for i in range(6)], torch.ones(1)
    for number, text in enumerate(texts):
        cache.get("text", (text, mask), compute(calls, number))
    del texts[1:], text
    gc.collect()
    assert len(cache) == 1
    assert cache.get("text", (texts[0], mask), compute(calls, 9)).item() == 0
    del mask
    assert len(cache) == 0


def test_a_cache_may_go_before_what_it_comes_from(calls):
    text = torch.ones(2)
    RunCache().get("text", (text,), compute(calls, 1))
    del text
    assert calls == [1]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_run_refines_a_text_once_for_each_change_of_weights(name, cache):
    kind, layers = FAMILIES[name]
    family, inputs = families.family(name, kind), families.inputs(name, kind, batch=1)
    called, unchanged = [], family.changes
    handle = getattr(family.module, layers).register_forward_hook(lambda *_: called.append(1))
    try:
        steps = [{**inputs, TIMESTEP: torch.full((1,), t)} for t in (1.0, 0.5)]
        streams = [family.embed_in(cache, step).streams[TEXT] for step in steps]
        assert len(called) == 1
        assert torch.equal(*streams)
        for changes, count in (("lora", 2), (unchanged, 2)):
            family.changes = changes
            assert torch.equal(family.embed_in(cache, inputs).streams[TEXT], streams[0])
            assert len(called) == count
        family.embed_in(cache, {each: tensor.clone() for each, tensor in inputs.items()})
        family.embed_in(RunCache(), inputs)
        assert len(called) == 4
    finally:
        family.changes = unchanged
        handle.remove()


@torch.no_grad()
def test_another_transformer_computes_its_own():
    """As the second of a checkpoint with two, for the same prompt."""
    name, kind = "Krea2Transformer2DModel", "masked"
    cache, inputs = RunCache(), families.inputs(name, kind, batch=1)
    one, other = (family_of(name)(examples.module(name, kind, seed)) for seed in (0, 1))
    texts = [family.embed_in(cache, inputs).streams[TEXT] for family in (one, other, one)]
    assert not torch.allclose(texts[0], texts[1])
    assert texts[2] is texts[0]
