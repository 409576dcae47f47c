"""Routing: stock processors run unchanged, their attention calls are redirected, and the wrap can be undone."""

import pytest
import torch
import torch.nn.functional as F

from parallel_backend.attention.routing import routed
from parallel_backend.errors import BackendFailure
from tests.support import tiny


@pytest.fixture
def block():
    return tiny.transformer(tiny.Tiny(layers=1)).blocks[0]


def run(block):
    torch.manual_seed(0)
    rope = (torch.rand(1, 6, 1, 12), torch.rand(1, 6, 1, 12))
    with torch.no_grad():
        return block(torch.randn(2, 6, 48), torch.randn(2, 3, 48), torch.randn(2, 6, 48), rope)


def test_self_attention_is_routed_and_cross_attention_is_not(block):
    shapes = []

    def attention(query, key, value, *, scale, sample):
        assert sample is None
        shapes.append((query.shape, key.shape, value.shape))
        return F.scaled_dot_product_attention(query, key, value, scale=scale)

    alone = run(block)
    with routed([(block.attn1, attention, False)]):
        assert torch.equal(run(block), alone)
    assert shapes == [((2, 4, 6, 12),) * 3]


def test_the_undo_restores_the_stock_forward_even_after_an_error(block):

    def fail(*_, **__):
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), routed([(block.attn1, fail, False)]):
        run(block)
    assert "forward" not in vars(block.attn1)


def test_the_undo_restores_a_forward_that_others_have_set(block):
    stock, calls = block.attn1.forward, []

    def counted(*args, **kwargs):
        calls.append(args)
        return stock(*args, **kwargs)

    block.attn1.forward = counted
    with routed([(block.attn1, lambda query, *_, **__: query, False)]):
        run(block)
    assert len(calls) == 1
    assert block.attn1.forward is counted


def test_attention_that_is_not_routed_is_an_error_and_not_a_wrong_result(block):
    def attention(query, key, value, **options):
        return query

    class NoAttention:
        def __call__(self, module, hidden, *_):
            return hidden

    block.attn1.processor = NoAttention()
    with (
        pytest.raises(BackendFailure, match="called torch's attention 0 times"),
        routed([(block.attn1, attention, False)]),
    ):
        run(block)
