"""Routing: stock processors run unchanged, their attention calls are redirected, and the wrap can be undone."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from parallel_backend.attention.routing import Route, routed
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
    with routed([Route(block.attn1, attention, False)]):
        assert torch.equal(run(block), alone)
    assert shapes == [((2, 4, 6, 12),) * 3]


def test_the_undo_restores_the_stock_processor_even_after_an_error(block):
    stock = block.attn1.processor

    def fail(*_, **__):
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), routed([Route(block.attn1, fail, False)]):
        run(block)
    assert "forward" not in vars(block.attn1)
    assert block.attn1.processor is stock


def test_the_undo_restores_a_forward_that_others_have_set(block):
    stock, calls = block.attn1.forward, []

    def counted(*args, **kwargs):
        calls.append(args)
        return stock(*args, **kwargs)

    block.attn1.forward = counted
    with routed([Route(block.attn1, lambda query, *_, **__: query, False)]):
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
        pytest.raises(BackendFailure, match=r"NoAttention\.__call__ computes attention in a way that is not known"),
        routed([Route(block.attn1, attention, False)]),
    ):
        run(block)


class Twice(nn.Module):
    """Calls attention as often as it is told, by torch's function; it has no processor."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def forward(self, tokens):
        for _ in range(self.times):
            tokens = F.scaled_dot_product_attention(F.relu(tokens), tokens, tokens)
        return tokens


@pytest.mark.parametrize("times", [0, 2])
def test_a_module_that_calls_attention_another_number_of_times_is_refused(times):
    module = Twice(times)
    with (
        pytest.raises(BackendFailure, match=f"Twice called torch's attention {times} times instead of once"),
        routed([Route(module, lambda query, *_, **__: query, False)]),
    ):
        module(torch.zeros(1, 1, 2, 4))


def test_each_sample_of_a_module_has_its_number():
    module, samples = Twice(3), []

    def attention(query, key, value, *, scale, sample):
        samples.append(sample)
        return query

    with routed([Route(module, attention, True)]):
        for _ in range(2):
            module(torch.zeros(1, 1, 2, 4))
    assert samples == [0, 1, 2] * 2
    assert "forward" not in vars(module)


@pytest.mark.parametrize("option", [{"attn_mask": torch.ones(1)}, {"dropout_p": 0.1}, {"is_causal": True}])
def test_attention_that_ours_does_not_compute_is_refused(option):
    class Other(nn.Module):
        def forward(self, tokens):
            return F.scaled_dot_product_attention(tokens, tokens, tokens, **option)

    module = Other()
    with pytest.raises(BackendFailure, match="which is not supported here"), routed([Route(module, attend, False)]):
        module(torch.zeros(1, 1, 2, 4))


def attend(query, key, value, *, scale, sample):
    return query


def test_a_layer_finds_the_parameters_of_a_routed_processor(block):
    """diffusers' layers pass on only what their processor names."""
    stock = inspect.signature(block.attn1.processor.__call__)
    with routed([Route(block.attn1, attend, False)]):
        assert inspect.signature(block.attn1.processor.__call__) == stock
        assert type(block.attn1.processor).__name__ == "WanAttnProcessor"


def test_a_backend_that_the_environment_chooses_has_no_effect(block, monkeypatch):
    monkeypatch.setattr(type(block.attn1.processor), "_attention_backend", "flash", raising=False)
    with routed([Route(block.attn1, attend, False)]):
        assert block.attn1(torch.randn(2, 6, 48), None, None, None).shape == (2, 6, 48)


def test_what_a_route_sets_is_made_once_for_each_processor(block):
    route = Route(block.attn1, attend, False)
    first = route.replacement()
    assert route.replacement() is first
    block.attn1.processor = type(block.attn1.processor)()
    assert route.replacement()[1] is not first[1]
    with routed([route]):
        assert block.attn1(torch.randn(2, 6, 48), None, None, None).shape == (2, 6, 48)


def test_keys_that_query_heads_share_reach_attention_once():
    class Shared(nn.Module):
        def forward(self, query, key):
            return F.scaled_dot_product_attention(query, key, key, enable_gqa=True)

    module, shapes = Shared(), []

    def attention(query, key, value, *, scale, sample):
        shapes.append((key.shape[1], value.shape[1]))
        return query

    with routed([Route(module, attention, False)]):
        module(torch.zeros(1, 6, 2, 4), torch.zeros(1, 3, 5, 4))
    assert shapes == [(3, 3)]
