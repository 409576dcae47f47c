"""What happens on a rank whose device is full, or fails otherwise."""

from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch

from parallel_backend.distributed import mesh
from parallel_backend.distributed.device_memory import in_use
from parallel_backend.distributed.groups import GroupPool
from parallel_backend.distributed.mesh_cache import MeshCache
from parallel_backend.engine import engine as engine_module
from parallel_backend.engine.engine import Engine
from parallel_backend.errors import NoRoom, OutOfMemory
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol import rank_control
from parallel_backend.protocol.messages import Unload
from parallel_backend.rank.diagnosis import diagnose
from tests.support import device_errors


def handling(monkeypatch, error):
    """Return what the engine raises where a handler raises ``error``."""
    rank_engine = Engine(rank=0, world_size=1, device=torch.device("cpu"))
    monkeypatch.setitem(engine_module._HANDLERS, Unload, Mock(side_effect=error))
    with pytest.raises((OutOfMemory, RuntimeError)) as raised:
        rank_engine.handle(Unload(model=Mock()), (), {}, report=Mock(), cancelled=lambda: False)
    return raised.value


def test_the_engine_names_the_rank_and_the_device(monkeypatch):
    error = handling(monkeypatch, device_errors.FULL["nccl"].make())
    assert isinstance(error, OutOfMemory)
    assert str(error).startswith("rank 0 (cpu) ran out of memory: NCCL error")
    finished = diagnose(error, "an id")
    assert (finished.request_id, finished.code, finished.by_peer) == ("an id", OutOfMemory.code, False)
    assert "Cuda failure 2 'out of memory'" in finished.message


@pytest.mark.parametrize("name", device_errors.FULL)
def test_a_rank_that_is_alone_stays_usable_on_a_full_device(monkeypatch, name):
    assert type(handling(monkeypatch, device_errors.FULL[name].make())) is NoRoom


@pytest.mark.parametrize(
    "error", [*device_errors.OWN.values(), *device_errors.PEER.values(), *device_errors.UNKNOWN.values()]
)
def test_no_rank_stays_usable_after_other_errors(monkeypatch, error):
    """Above all not after those that leave it without a device."""
    raised = error.make()
    assert handling(monkeypatch, raised) is raised
    assert diagnose(raised, "an id").code not in rank_control.RECOVERABLE


@pytest.mark.parametrize(("device", "released"), [("cuda:0", ["empty_cache"]), ("cpu", [])])
def test_torchs_cache_is_empty_before_groups_are_made(monkeypatch, device, released):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(MeshCache, "_make_room", lambda _: calls.append("make room"))
    monkeypatch.setattr(GroupPool, "make", lambda *_: calls.append("make"))
    monkeypatch.setattr(mesh, "create", Mock())
    meshes = MeshCache(0, 2, torch.device(device), timeout=timedelta(seconds=5), in_use=list)
    for layout in (ParallelLayout(ulysses=2), *[ParallelLayout(ulysses=2, shard_weights=True)] * 2):
        meshes.get(layout)
    assert calls == [*released, "make room", "make"]


def test_the_memory_in_use_counts_each_gpu_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 - 10 * index, 100 + index))
    assert in_use([1, 0, 1, 2]) == 11 + 0 + 22
