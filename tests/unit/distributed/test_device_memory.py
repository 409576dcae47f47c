"""Which errors mean that this rank's device is full, as torch raises them, and what happens then."""

from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import DistBackendError

from parallel_backend.distributed import mesh
from parallel_backend.distributed.device_memory import ran_out
from parallel_backend.distributed.mesh_cache import MeshCache
from parallel_backend.engine import engine as engine_module
from parallel_backend.engine.engine import Engine
from parallel_backend.errors import OutOfMemory, RankFailed
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Unload
from parallel_backend.rank.worker import _diagnose
from tests.faults.fake_worker import NCCL

HINTS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call.\nCompile with TORCH_USE_CUDA_DSA."
)
_CALL = "NCCL error in: ProcessGroupNCCL.cpp:3356, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL "
UNHANDLED = f"{_CALL}version 2.26.2\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
FULL = {
    "torch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of"),
    "cuda": getattr(torch, "AcceleratorError", RuntimeError)(f"CUDA error: out of memory{HINTS}"),
    "cuda before torch 2.8": RuntimeError(f"CUDA error: out of memory{HINTS}"),
    "driver": RuntimeError("CUDA driver error: out of memory"),
    "triton": RuntimeError("Triton Error [CUDA]: out of memory"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "nccl": DistBackendError(NCCL["nccl_full"]),
    "nccl calloc": DistBackendError(f"{UNHANDLED}Failed to CUDA calloc async 608 bytes"),
    "nccl calloc of a buffer": DistBackendError(f"{UNHANDLED}Failed to CUDA calloc 6291456 bytes"),
}
BY_PEER = {
    "lost": DistBackendError(NCCL["nccl_lost"]),
    "lost, last error old": DistBackendError(f"{NCCL['nccl_lost']}\nCuda failure 2 'out of memory'"),
    "timeout": DistBackendError(
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE, Timeout(ms)=600000"
        ") ran for 600029 milliseconds before timing out."
    ),
    "store": torch.distributed.DistNetworkError("The client socket has timed out after 600000ms"),
    "gloo": RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9876"),
    "other cuda error": DistBackendError(f"{UNHANDLED}Cuda failure 999 'unknown error'"),
}
OWN = {
    "launch": getattr(torch, "AcceleratorError", RuntimeError)(f"CUDA error: an illegal memory access{HINTS}"),
    "no error of a device": KeyError("out of memory"),
}


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
def test_a_full_device_is_out_of_memory_of_this_rank(error):
    assert ran_out(error)
    code, text, by_peer = _diagnose(error)
    assert (code, by_peer) == (OutOfMemory.code, False)
    assert text.startswith("ran out of memory: ")


@pytest.mark.parametrize(
    ("error", "by_peer"), [(e, True) for e in BY_PEER.values()] + [(e, False) for e in OWN.values()]
)
def test_other_errors_stay_what_they_are(error, by_peer):
    assert not ran_out(error)
    assert _diagnose(error)[::2] == (RankFailed.code, by_peer)


def handling(monkeypatch, error):
    """Return what the engine raises where a handler raises ``error``."""
    rank_engine = Engine(rank=0, world_size=1, device=torch.device("cpu"))
    monkeypatch.setitem(engine_module._HANDLERS, Unload, Mock(side_effect=error))
    with pytest.raises((OutOfMemory, RuntimeError)) as raised:
        rank_engine.handle(Unload(model=Mock()), (), {}, report=Mock(), cancelled=lambda: False)
    return raised.value


def test_the_engine_names_the_rank_and_the_device(monkeypatch):
    error = handling(monkeypatch, FULL["nccl"])
    assert isinstance(error, OutOfMemory)
    assert str(error).startswith("rank 0 (cpu) ran out of memory: NCCL error")
    code, text, by_peer = _diagnose(error)
    assert (code, by_peer) == (OutOfMemory.code, False)
    assert "Cuda failure 2 'out of memory'" in text


def test_the_engine_leaves_a_lost_connection_as_it_is(monkeypatch):
    assert handling(monkeypatch, BY_PEER["lost"]) is BY_PEER["lost"]


@pytest.mark.parametrize(("device", "released"), [("cuda:0", ["empty_cache"]), ("cpu", [])])
def test_torchs_cache_is_empty_before_groups_are_made(monkeypatch, device, released):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(mesh, "create", Mock(side_effect=lambda *_, **__: calls.append("create")))
    meshes = MeshCache(0, 1, torch.device(device), timeout=timedelta(seconds=5), in_use=list)
    for _ in range(2):
        meshes.get(ParallelLayout())
    assert calls == [*released, "create"]
