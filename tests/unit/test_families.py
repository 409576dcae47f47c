"""Every family's three parts against diffusers' own forward."""

import pytest
import torch

from parallel_backend.geometry import LATENT
from tests import families


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
    got, wanted = family.unpatchify(tokens, inputs[LATENT].shape[2:]), family.stock(inputs)
    assert got.shape == wanted.shape
    assert wanted.std() > 0.01
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
