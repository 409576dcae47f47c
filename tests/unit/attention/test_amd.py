"""Attention with its log-sum-exp on AMD's GPUs. The operators that torch has there are faked, on the CPU."""

import math

import pytest
import torch
from torch import Tensor

from parallel_backend.attention import amd
from parallel_backend.attention.kernels import KERNELS


def qkv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, 3, tokens, 40, generator=generator).to(dtype) for tokens in (50, 70, 70))
    return query, key, value


def error(found, wanted):
    return max(float((a.float() - b.float()).abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("scores", [1 << 26, 2 * 3 * 70 * 7, 1])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_plain_products_compute_attention_however_many_queries_at_a_time(monkeypatch, scores, scale):
    monkeypatch.setattr(amd, "_SCORES", scores)
    tokens = qkv()
    assert error(amd.by_products(*tokens, scale), KERNELS["sdpa"].with_lse(*tokens, scale)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_plain_products_return_the_dtype_of_the_query_and_the_log_sum_exp_in_float32(dtype):
    tokens = qkv(dtype=dtype)
    out, lse = amd.by_products(*tokens, None)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert error((out, lse), KERNELS["sdpa"].with_lse(*tokens, None)) < 2e-2


def right(*args):
    return KERNELS["sdpa"].with_lse(*args)


def to_base_2(*args):
    out, lse = right(*args)
    return out, lse / math.log(2)


def heads_last(*args):
    out, lse = right(*args)
    return out, lse.mT.contiguous()


def wrong_values(*args):
    out, lse = right(*args)
    return out * 1.5, lse


def not_there(*args):
    raise RuntimeError("no kernel for this GPU")


WRONG = [to_base_2, heads_last, wrong_values, not_there]


@pytest.fixture(autouse=True)
def forgotten():
    amd._right.cache_clear()
    yield
    amd._right.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", WRONG)
def test_an_operator_that_is_wrong_is_passed_over(wrong, dtype):
    calls = []

    def counted(*args):
        calls.append(args[0].shape)
        return right(*args)

    tokens = qkv(dtype=dtype)
    for _ in range(2):
        found = amd.with_lse(*tokens, None, (wrong, counted))
        assert error(found, right(*tokens, None)) == 0
    small = (1, amd._HEADS, amd._QUERIES, 40)
    assert calls == [small, tokens[0].shape, tokens[0].shape], "tried once"


def test_without_a_right_operator_products_compute_it_and_the_log_says_so_once(caplog):
    tokens = qkv()
    for _ in range(2):
        found = amd.with_lse(*tokens, None, WRONG)
        assert error(found, amd.by_products(*tokens, None)) == 0
    (record,) = caplog.records
    assert "head size 40 in torch.float32 on cpu" in record.getMessage()
    assert "no kernel for this GPU" in record.getMessage()


def test_an_operator_that_breaks_the_device_ends_the_rank():
    def breaks(*args):
        raise RuntimeError("HIP error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        amd.with_lse(*qkv(), None, (breaks, right))
