"""Choosing a kernel, and the errors for one that cannot run. The GPU is mocked."""

import math
import sys
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn.attention import SDPBackend

from parallel_backend.attention import amd, flash_package, kernels
from parallel_backend.attention.kernels import KERNELS, choose
from parallel_backend.errors import InvalidRequest
from parallel_backend.protocol.messages import Forward
from tests.ranks.requests import Case
from tests.support import device_errors
from tests.unit.conftest import one_rank

GPU, HALF = torch.device("cuda", 0), torch.bfloat16
FLASH_PACKAGE = flash_package.flash_package
V2, V3 = "flash_attn", "flash_attn_interface"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mock an Ampere GPU, cuDNN and SageAttention 2."""
    sage = ModuleType("sageattention")
    sage.sageattn = lambda q, k, v, tensor_layout="HND", sm_scale=None, return_lse=False: q  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sageattention", sage)
    monkeypatch.setattr(kernels, "flash_package", lambda device: None)
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
    monkeypatch.setattr(kernels, "flash_package", lambda device: len)
    assert choose("auto", GPU, HALF, {64}) is KERNELS["flash"]
    assert choose("auto", GPU, HALF, {12}) is KERNELS["sdpa"]
    assert choose("auto", GPU, torch.float32, {64}) is KERNELS["sdpa"]


def package_of(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], packages: dict[str, Any]) -> Any:
    """Return the name of the package that a GPU of a compute capability uses, among fakes on the CPU.

    ``packages`` has a function, or the error of one, for each package that is installed.
    """
    for name in (V2, V3):
        module = ModuleType(name) if name in packages else None
        if module:
            module.flash_attn_func = Mock(side_effect=packages[name])  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    FLASH_PACKAGE.cache_clear()
    found = [FLASH_PACKAGE(torch.device("cpu")) for _ in range(2)]
    FLASH_PACKAGE.cache_clear()
    assert found[0] is found[1]
    calls = [sys.modules[name].flash_attn_func.call_count for name in packages]
    assert max(calls, default=0) <= 1, "tried once"
    return next((name for name in packages if sys.modules[name].flash_attn_func is found[0]), None)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float | None, return_attn_probs: bool):
    """Like FlashAttention's function, for q, k and v ``[B, tokens, heads, head_dim]``."""
    assert softmax_scale is None
    assert return_attn_probs
    return q, torch.full((q.shape[0], q.shape[2], q.shape[1]), math.log(k.shape[1])), None


def attend_to_base_2(*args: Any, **kwargs: Any):
    out, lse, _ = attend(*args, **kwargs)
    return out, lse / math.log(2), None


NO_IMAGE = RuntimeError("CUDA error: no kernel image is available for execution on the device")
OLD = TypeError("flash_attn_func() got an unexpected keyword argument 'return_attn_probs'")


@pytest.mark.parametrize(
    ("capability", "packages", "used", "named"),
    [
        ((9, 0), {V2: attend, V3: attend}, V3, []),
        ((8, 6), {V2: attend, V3: attend}, V2, []),
        ((12, 0), {V2: attend, V3: attend}, V2, []),
        ((10, 0), {V3: attend}, None, []),
        ((9, 0), {V2: attend, V3: NO_IMAGE}, V2, [V3]),
        ((9, 0), {V2: attend, V3: OLD}, V2, [V3]),
        ((12, 0), {V2: NO_IMAGE}, None, [V2]),
        ((9, 0), {V2: NO_IMAGE, V3: NO_IMAGE}, None, [V3, V2]),
        ((9, 0), {}, None, []),
        ((9, 0), {V2: attend, V3: attend_to_base_2}, V2, [V3]),
    ],
)
def test_a_flash_package_is_one_that_runs_on_the_gpu(monkeypatch, caplog, capability, packages, used, named) -> None:
    assert package_of(monkeypatch, capability, packages) == used
    assert [record.args[0] for record in caplog.records] == named
    for record, name in zip(caplog.records, named, strict=True):
        reason = "its log-sum-exp is another one" if packages[name] is attend_to_base_2 else packages[name]
        assert record.getMessage() == f"the package {name} does not run on cpu and is not used: {reason}"


def test_amd_gpus_have_no_flash_attention_3(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert package_of(monkeypatch, (9, 0), {V2: attend, V3: attend}) == V2  # the capability of an MI250


@pytest.mark.parametrize("capability", [(9, 4), (7, 5)])
def test_kernels_on_amd_gpus(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose("auto", GPU, HALF, {64}) is KERNELS["sdpa"]
    for name, reason in (
        ("cudnn", "it needs an NVIDIA GPU, and this is AMD's build of torch"),
        ("sage", "it needs an NVIDIA GPU, and this is AMD's build of torch"),
        ("flash", "on AMD GPUs it needs the package flash_attn"),
    ):
        with pytest.raises(
            InvalidRequest, match=f"^attention '{name}' cannot be used: {reason}.*; sdpa would work here"
        ):
            choose(name, GPU, HALF, {64})
    monkeypatch.setattr(kernels, "flash_package", lambda device: attend)
    assert choose("flash", GPU, HALF, {64}) is choose("auto", GPU, HALF, {64}) is KERNELS["flash"]


def test_amd_gpus_try_torchs_operators_before_their_log_sum_exp_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.zeros(1, 2, 3, 8, device="meta")  # stands for a GPU's: it is not on the CPU
    answer = tokens, torch.zeros(1, 2, 3, device="meta")
    with_lse = Mock(return_value=answer)
    monkeypatch.setattr(amd, "with_lse", with_lse)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert KERNELS["sdpa"].with_lse(tokens, tokens, tokens, None)[0] is tokens
    assert with_lse.call_args.args[-1] == (kernels._torch_flash, kernels._efficient)


@pytest.mark.parametrize(
    ("choice", "head_size", "operator"),
    [("CUDNN", 64, "_cudnn"), ("FLASH", 64, "_torch_flash"), ("FLASH", 12, "_efficient"), ("MATH", 64, "_efficient"),
     ("EFFICIENT", 64, "_efficient")],
)  # fmt: skip
def test_the_log_sum_exp_comes_from_the_operator_that_torch_picks(monkeypatch, choice, head_size, operator) -> None:
    tokens = torch.zeros(1, 2, 3, head_size, device="meta")  # stands for a GPU's: it is not on the CPU
    picked = SDPBackend.MATH if choice == "MATH" else getattr(SDPBackend, f"{choice}_ATTENTION")
    monkeypatch.setattr(torch.ops.aten, "_fused_sdp_choice", lambda *_, scale, enable_gqa: picked.value)
    monkeypatch.setattr(kernels, operator, lambda *_: (tokens, torch.ones(1, 2, 32, dtype=HALF)))
    out, lse = KERNELS["sdpa"].with_lse(tokens, tokens, tokens, None)
    assert out is tokens
    assert (lse.shape, lse.dtype) == ((1, 2, 3), torch.float32)


def test_a_flash_package_that_breaks_the_gpu_ends_the_rank(monkeypatch, caplog) -> None:
    broken = RuntimeError(device_errors.OWN["illegal address"].text)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        package_of(monkeypatch, (9, 0), {V2: attend, V3: broken})
    assert not caplog.records


def test_flash_falls_back_to_torchs_own_and_auto_to_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.zeros(1, 2, 3, 8)
    own = tokens, torch.zeros(1, 2, 3)
    monkeypatch.setattr(kernels, "_torch_flash", lambda *_: own)
    assert KERNELS["flash"].with_lse(tokens, tokens, tokens, None) is own
    assert choose("auto", GPU, HALF, {64}) is KERNELS["sdpa"]
    monkeypatch.setattr(kernels, "flash_package", lambda device: attend)
    assert KERNELS["flash"].with_lse(tokens, tokens, tokens, None)[1].shape == (1, 2, 3)


def test_emulated_bfloat16_runs_in_float32_where_torch_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    ran: list[torch.dtype] = []

    def efficient(query: Any, *_: Any, **__: Any) -> Any:
        ran.append(query.dtype)
        return query, torch.zeros(query.shape[:3])

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", efficient)
    for dtype, wanted in ((HALF, torch.float32), (torch.float16, torch.float16)):
        tokens = torch.zeros(1, 2, 3, 8, dtype=dtype)
        assert kernels._efficient(tokens, tokens, tokens, None)[0].dtype == dtype
        assert ran.pop() == wanted


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
