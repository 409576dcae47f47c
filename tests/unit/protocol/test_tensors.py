"""Whether two tensors have the same bits, however they lie in memory."""

import math

import pytest
import torch
from torch import Tensor

from parallel_backend.protocol.tensors import DTYPES, same_bits


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (2, 8), (3, 5, 4)])
def test_equal_and_unequal_numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = numbers(dtype, *shape)
    assert same_bits(tensor, tensor.clone())
    if not tensor.numel():
        return
    for place in (0, -1):
        other = tensor.clone()
        other.view(-1)[place] = 0 if other.view(-1)[place] else 1
        assert not same_bits(tensor, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_parts_of_tensors(dtype: torch.dtype) -> None:
    whole = numbers(dtype, 4, 16)
    for part in (whole[1:3], whole[:, 1:9], whole.flatten()[3:11], whole.flatten()[1:6], whole.T, whole[::2]):
        copied = part.clone(memory_format=torch.contiguous_format)
        assert same_bits(part, copied)
        assert same_bits(copied, part)
        copied.view(-1)[-1] += 1
        assert not same_bits(part, copied)


@pytest.mark.parametrize(
    "other",
    [
        numbers(torch.float32, 2, 4),
        numbers(torch.float32, 8).double(),
        numbers(torch.float32, 8).view(torch.int32),
        numbers(torch.float32, 8).to("meta"),
    ],
)
def test_another_shape_dtype_or_device(other: Tensor) -> None:
    assert not same_bits(numbers(torch.float32, 8), other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_numbers_that_equal_each_other_and_have_other_bits(dtype: torch.dtype) -> None:
    zeros = torch.zeros(8, dtype=dtype)
    assert not same_bits(zeros, -zeros)
    not_finite = torch.full((8,), math.nan, dtype=dtype)
    assert same_bits(not_finite, not_finite.clone())
