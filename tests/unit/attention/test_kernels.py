"""Choosing a kernel, and the errors for one that cannot run. The GPU is mocked."""

import sys
from types import ModuleType

import pytest
import torch

from parallel_backend.attention import kernels
from parallel_backend.attention.kernels import KERNELS, choose
from parallel_backend.errors import InvalidRequest
from parallel_backend.protocol.messages import Forward
from tests.ranks.requests import Case
from tests.unit.conftest import one_rank

GPU, HALF = torch.device("cuda", 0), torch.bfloat16


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mock an Ampere GPU, cuDNN and SageAttention 2."""
    sage = ModuleType("sageattention")
    sage.sageattn = lambda q, k, v, tensor_layout="HND", sm_scale=None, return_lse=False: q  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sageattention", sage)
    monkeypatch.setattr(kernels, "_installed", lambda package: True)
    monkeypatch.setattr(kernels, "flash_package", lambda: None)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "mock GPU")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("size", [64, 72, 128])
def test_head_sizes_of_real_models(name: str, size: int) -> None:
    assert choose(name, GPU, HALF, {size}) is KERNELS[name]


@pytest.mark.parametrize(
    ("name", "sizes", "supported", "works"),
    [
        ("sage", {64, 160}, "up to 128, and this model has a head size of 160", "sdpa, flash"),
        ("cudnn", {136}, "up to 128 in multiples of 8, and this model has a head size of 136", "sdpa, flash"),
        ("cudnn", {12}, "up to 128 in multiples of 8, and this model has a head size of 12", "sdpa, sage"),
        ("flash", {264}, "up to 256 in multiples of 8, and this model has a head size of 264", "sdpa"),
        ("flash", {100, 64}, "up to 256 in multiples of 8, and this model has a head size of 100", "sdpa, sage"),
    ],
)
def test_head_sizes_that_a_kernel_does_not_support(name: str, sizes: set[int], supported: str, works: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        choose(name, GPU, HALF, sizes)
    reason = f"it supports head sizes {supported}; {works} would work here"
    assert str(refusal.value) == f"attention {name!r} cannot be used: {reason}"


def test_auto_is_flash_if_installed_and_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("auto", GPU, HALF, {64}) is KERNELS["sdpa"]
    monkeypatch.setattr(kernels, "flash_package", lambda: len)
    assert choose("auto", GPU, HALF, {64}) is KERNELS["flash"]
    assert choose("auto", GPU, HALF, {12}) is KERNELS["sdpa"]
    assert choose("auto", GPU, torch.float32, {64}) is KERNELS["sdpa"]


@pytest.mark.parametrize("name", ["flash", "cudnn", "sage"])
def test_unsupported_devices_and_dtypes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for device, dtype, reason in (
        (torch.device("cpu"), HALF, "it needs a CUDA GPU and the ranks are on cpu; sdpa would"),
        (GPU, torch.float32, "it computes in float16 or bfloat16, and the model is in float32; sdpa would"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            choose(name, device, dtype, {64})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(InvalidRequest, match="Ampere generation or newer, and this is a mock GPU; sdpa would work"):
        choose(name, GPU, HALF, {64})


def test_an_old_sage_and_an_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="unknown attention 'fast': use auto, sdpa, flash, cudnn, sage"):
        choose("fast", GPU, HALF, {64})
    monkeypatch.setattr(sys.modules["sageattention"], "sageattn", lambda q, k, v: q)
    with pytest.raises(InvalidRequest, match="older than 2: install version 2"):
        choose("sage", GPU, HALF, {64})


def test_a_kernel_is_refused_before_anything_is_loaded(ask, checkpoint, engine) -> None:
    with pytest.raises(InvalidRequest, match="'sage' cannot be used: it needs a CUDA GPU"):
        ask(Forward(model=one_rank(checkpoint, attention="sage"), branches=2), Case().forward_inputs())
    assert engine.snapshot()[0] == ()
