"""Every family's three parts equal diffusers' own forward."""

import copy
import inspect
from dataclasses import replace
from functools import partial

import pytest
import torch

from parallel_backend.families.modules import module_class_of
from parallel_backend.families.registry import FAMILIES, family_of
from parallel_backend.loading import partial as weights
from tests.support import families


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_the_class(name):
    signature = inspect.signature(module_class_of(name).__init__).parameters
    defaults = family_of(name).defaults
    theirs = {each: signature[each].default for each in defaults}
    assert {each: tuple(value) if isinstance(value, list) else value for each, value in theirs.items()} == defaults


@pytest.mark.parametrize(("name", "kind"), [*families.variants()])
@torch.no_grad()
def test_three_parts_equal_stock(name, kind):
    family = families.family(name, kind)
    inputs = families.inputs(name, kind, batch=2)
    state = family.embed(inputs)
    extent = type(family).extent(family.module.config, {key: tuple(value.shape) for key, value in inputs.items()})
    assert {key: stream.shape[1] for key, stream in state.streams.items()} == dict(extent.streams)
    tokens = family.head(families.run(family, state))
    assert tokens.shape[2] == extent.values
    got, wanted = family.prediction(tokens, families.sizes(family, inputs)), family.stock(inputs)
    assert got.shape == wanted.shape
    assert wanted.std() > 0.01
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


MODULATING = ("FluxTransformer2DModel", "HunyuanVideoTransformer3DModel", "MochiTransformer3DModel")
"""Classes with TeaCache's polynomial whose norms modulate. It looks at the first result of the first block's norm."""


@pytest.mark.parametrize("name", MODULATING)
@torch.no_grad()
def test_the_input_of_the_first_attention_is_what_teacache_looks_at(name):
    kind = next(kind for each, kind in families.variants() if each == name)
    family, seen = families.family(name, kind), []
    assert family.teacache
    attention, norm = family.attentions[0].module, family.module.transformer_blocks[0].norm1
    hooks = [
        norm.register_forward_hook(lambda module, args, result: seen.append(result[0])),
        attention.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs.get("hidden_states", *args[:1])), with_kwargs=True
        ),
    ]
    families.run(family, family.embed(families.inputs(name, kind, batch=2)))
    for hook in hooks:
        hook.remove()
    modulated, given = seen
    assert torch.equal(modulated, given)


@pytest.mark.parametrize(("name", "kind"), [*families.variants()])
@pytest.mark.daily(len(FAMILIES))
@torch.no_grad()
def test_half_precision_equals_stock(name, kind):
    exact = families.family(name, kind)
    family = type(exact)(rounded(exact.module))
    inputs = families.inputs(name, kind, batch=1)
    dtypes: set[torch.dtype] = set()

    def record_dtypes(run, state):
        result = run(state)
        dtypes.update(stream.dtype for each in (state, result) for stream in each.streams.values())
        return result

    family.blocks = [replace(block, run=partial(record_dtypes, block.run)) for block in family.blocks]
    state = families.run(family, family.embed(inputs))
    assert dtypes == {family.dtype}  # as each stage of a pipeline expects
    got = family.prediction(family.head(state), families.sizes(family, inputs))
    stock, wanted = family.stock(inputs), exact.stock(inputs)
    assert got.dtype == stock.dtype == torch.bfloat16
    # Two or three roundings of 2**-9 relative to the largest value. Most adapters equal stock bit by bit.
    assert (got - stock).abs().max() <= 0.01 * wanted.abs().max()
    assert (got - wanted).abs().max() <= 0.02 * wanted.abs().max()


def rounded(module):
    """Return a copy in bfloat16, except for the weights that diffusers keeps in float32."""
    copied = copy.deepcopy(module)
    loaded = weights.empty(type(module), module.config, torch.bfloat16).state_dict()
    for name, value in copied.state_dict(keep_vars=True).items():
        value.data = value.data.to(loaded[name].dtype)
    return copied
