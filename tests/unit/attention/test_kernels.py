"""Choosing a kernel, and the errors for one that cannot run. The GPU is mocked."""

import math
import sys
from functools import wraps
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn.attention import SDPBackend

from parallel_backend.attention import amd, flash_package, kernels, torch_operators
from parallel_backend.attention.flash_package import FlashPackage
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
    monkeypatch.setattr(kernels, "flash_package", lambda device: FlashPackage.of(2, flash_2))
    assert choose("auto", GPU, HALF, {64}) is KERNELS["flash"]
    assert choose("auto", GPU, HALF, {12}) is KERNELS["sdpa"]
    assert choose("auto", GPU, torch.float32, {64}) is KERNELS["sdpa"]


@pytest.mark.parametrize(
    ("capability", "package", "torchs_choice", "cudnn_runs", "size", "wanted"),
    [
        ((9, 0), 3, "CUDNN", True, 128, "flash"),
        ((9, 0), 2, "CUDNN", True, 128, "sdpa"),
        ((9, 0), None, "CUDNN", True, 128, "sdpa"),
        ((9, 0), 2, "FLASH", True, 128, "cudnn"),
        ((9, 0), 2, "FLASH", False, 128, "flash"),
        ((9, 0), None, "FLASH", False, 128, "sdpa"),
        ((9, 0), 2, "FLASH", True, 256, "flash"),
        ((9, 0), None, "FLASH", True, 256, "sdpa"),
        ((10, 0), 2, "FLASH", True, 128, "cudnn"),
        ((12, 0), None, "FLASH", True, 64, "cudnn"),
        ((8, 0), 2, "CUDNN", True, 128, "flash"),
        ((8, 9), None, "FLASH", True, 128, "sdpa"),
    ],
)
def test_auto_by_generation(monkeypatch, capability, package, torchs_choice, cudnn_runs, size, wanted) -> None:
    found = FlashPackage.of(package, flash_2) if package else None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "flash_package", lambda device: found)
    monkeypatch.setattr(kernels, "_torch_picks_cudnn", lambda *_: torchs_choice == "CUDNN")
    monkeypatch.setattr(kernels, "_cudnn_runs", lambda device: cudnn_runs)
    assert choose("auto", GPU, HALF, {size}) is KERNELS[wanted]


def test_torch_is_asked_what_it_picks_and_cudnn_is_tried(monkeypatch, caplog) -> None:
    cpu, half = torch.device("cpu"), torch.float32
    assert not kernels._torch_picks_cudnn(cpu, half, 8)
    monkeypatch.setattr(torch_operators, "picked", lambda query, *_: SDPBackend.CUDNN_ATTENTION)
    assert kernels._torch_picks_cudnn(cpu, half, 16)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    kernels._cudnn_runs.cache_clear()
    monkeypatch.setattr(
        torch_operators, "cudnn", Mock(side_effect=RuntimeError("No execution plans support the graph"))
    )
    assert not kernels._cudnn_runs(cpu)
    assert "cuDNN's attention does not run on cpu and is not used: No execution plans" in caplog.text
    kernels._cudnn_runs.cache_clear()
    monkeypatch.setattr(torch_operators, "cudnn", lambda q, k, v, scale: KERNELS["sdpa"].with_lse(q, k, v, scale))
    assert kernels._cudnn_runs(cpu)
    kernels._cudnn_runs.cache_clear()


def package_of(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], packages: dict[str, Any]) -> Any:
    """Return the name of the package that a GPU of a compute capability uses, among fakes on the CPU.

    ``packages`` has a function, or the error of one, for each package that is installed.
    """
    calls = dict.fromkeys(packages, 0)

    def counted(name: str, given: Any) -> Any:
        @wraps(flash_2 if isinstance(given, Exception) else given)
        def function(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            if isinstance(given, Exception):
                raise given
            return given(*args, **kwargs)

        return function

    for name in (V2, V3):
        module = ModuleType(name) if name in packages else None
        if module:
            module.flash_attn_func = counted(name, packages[name])  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    FLASH_PACKAGE.cache_clear()
    found = [FLASH_PACKAGE(torch.device("cpu")) for _ in range(2)]
    FLASH_PACKAGE.cache_clear()
    assert found[0] is found[1]
    assert max(calls.values(), default=0) <= 1, "tried once"
    if found[0] is None:
        return None
    name = {2: V2, 3: V3}[found[0].version]
    assert found[0].function is sys.modules[name].flash_attn_func
    return name


def computed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None):
    """Attention by definition, for q, k and v ``[B, tokens, heads, head_dim]``, and its log-sum-exp."""
    q, k, v = (each.transpose(1, 2).float() for each in (q, k, v))
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)


def flash_2(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """Called as ``flash_attn_func`` of FlashAttention 2.8."""
    out, lse = computed(q, k, v, softmax_scale)
    return (out, lse, None) if return_attn_probs else out


def flash_3(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
    return_attn_probs=False,
):  # fmt: skip
    """Called as ``flash_attn_func`` of FlashAttention 3."""
    out, lse = computed(q, k, v, softmax_scale)
    return (out, lse) if return_attn_probs else out


def early_flash_3(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
    window_size=(-1, -1), softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
):  # fmt: skip
    """Called as ``flash_attn_func`` of FlashAttention 3 was before it had ``return_attn_probs``."""
    return computed(q, k, v, softmax_scale)


def to_base_2(*args: Any, **kwargs: Any):
    out, lse = early_flash_3(*args, **kwargs)
    return out, lse / math.log(2)


def without_lse(*args: Any, **kwargs: Any):
    return flash_3(*args, **kwargs)


@pytest.mark.parametrize(("version", "function"), [(2, flash_2), (3, flash_3), (3, early_flash_3)])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_each_version_of_the_package_is_called_as_it_wants(version, function, key_heads) -> None:
    query, key, value = (torch.randn(2, heads, 7, 8) for heads in (4, key_heads, key_heads))
    for scale in (None, 0.3):
        out, lse = FlashPackage.of(version, function)(query, key, value, scale)
        expected, expected_lse = KERNELS["sdpa"].with_lse(query, key, value, scale)
        assert (out - expected).abs().max() <= 1e-5
        assert (lse - expected_lse).abs().max() <= 1e-5


NO_IMAGE = RuntimeError("CUDA error: no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("capability", "packages", "used", "named"),
    [
        ((9, 0), {V2: flash_2, V3: flash_3}, V3, []),
        ((9, 0), {V2: flash_2, V3: early_flash_3}, V3, []),
        ((8, 6), {V2: flash_2, V3: flash_3}, V2, []),
        ((12, 0), {V2: flash_2, V3: flash_3}, V2, []),
        ((10, 0), {V3: flash_3}, None, []),
        ((9, 0), {V2: flash_2, V3: NO_IMAGE}, V2, [V3]),
        ((9, 0), {V2: flash_2, V3: without_lse}, V2, [V3]),
        ((12, 0), {V2: NO_IMAGE}, None, [V2]),
        ((9, 0), {V2: NO_IMAGE, V3: NO_IMAGE}, None, [V3, V2]),
        ((9, 0), {}, None, []),
        ((9, 0), {V2: flash_2, V3: to_base_2}, V2, [V3]),
    ],
)
def test_a_flash_package_is_one_that_runs_on_the_gpu(monkeypatch, caplog, capability, packages, used, named) -> None:
    assert package_of(monkeypatch, capability, packages) == used
    reasons = {
        to_base_2: "its log-sum-exp is another one",
        without_lse: "not enough values to unpack",
        NO_IMAGE: NO_IMAGE,
    }
    assert len(caplog.records) == len(named)
    for record, name in zip(caplog.records, named, strict=True):
        expected = f"the package {name} does not run on cpu and is not used: {reasons[packages[name]]}"
        assert record.getMessage().startswith(expected)


def test_amd_gpus_have_no_flash_attention_3(monkeypatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert package_of(monkeypatch, (9, 0), {V2: flash_2, V3: flash_3}) == V2  # the capability of an MI250


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
    monkeypatch.setattr(kernels, "flash_package", lambda device: FlashPackage.of(2, flash_2))
    assert choose("flash", GPU, HALF, {64}) is choose("auto", GPU, HALF, {64}) is KERNELS["flash"]


def test_amd_gpus_try_torchs_operators_before_their_log_sum_exp_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.zeros(1, 2, 3, 8, device="meta")  # stands for a GPU's: it is not on the CPU
    answer = tokens, torch.zeros(1, 2, 3, device="meta")
    with_lse = Mock(return_value=answer)
    monkeypatch.setattr(amd, "with_lse", with_lse)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert KERNELS["sdpa"].with_lse(tokens, tokens, tokens, None)[0] is tokens
    assert with_lse.call_args.args[-1] == (torch_operators.flash, torch_operators.efficient)


@pytest.mark.parametrize(
    ("choice", "head_size", "operator"),
    [("CUDNN", 64, "cudnn"), ("FLASH", 64, "flash"), ("FLASH", 12, "efficient"), ("MATH", 64, "efficient"),
     ("EFFICIENT", 64, "efficient")],
)  # fmt: skip
def test_the_log_sum_exp_comes_from_the_operator_that_torch_picks(monkeypatch, choice, head_size, operator) -> None:
    tokens = torch.zeros(1, 2, 3, head_size, device="meta")  # stands for a GPU's: it is not on the CPU
    picked = SDPBackend.MATH if choice == "MATH" else getattr(SDPBackend, f"{choice}_ATTENTION")
    monkeypatch.setattr(torch.ops.aten, "_fused_sdp_choice", lambda *_, scale, enable_gqa: picked.value)
    monkeypatch.setattr(torch_operators, operator, lambda *_: (tokens, torch.ones(1, 2, 32, dtype=HALF)))
    out, lse = KERNELS["sdpa"].with_lse(tokens, tokens, tokens, None)
    assert out is tokens
    assert (lse.shape, lse.dtype) == ((1, 2, 3), torch.float32)


def test_a_flash_package_that_breaks_the_gpu_ends_the_rank(monkeypatch, caplog) -> None:
    broken = RuntimeError(device_errors.OWN["illegal address"].text)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        package_of(monkeypatch, (9, 0), {V2: flash_2, V3: broken})
    assert not caplog.records


def test_flash_falls_back_to_torchs_own_and_auto_to_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.zeros(1, 2, 3, 8)
    own = tokens, torch.zeros(1, 2, 3)
    monkeypatch.setattr(torch_operators, "flash", lambda *_: own)
    assert KERNELS["flash"].with_lse(tokens, tokens, tokens, None) is own
    assert choose("auto", GPU, HALF, {64}) is KERNELS["sdpa"]
    monkeypatch.setattr(kernels, "flash_package", lambda device: FlashPackage.of(2, flash_2))
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
        assert torch_operators.efficient(tokens, tokens, tokens, None)[0].dtype == dtype
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
