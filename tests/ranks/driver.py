"""What runs on a rank of a pool: an engine that is kept between tests, and requests to it."""

import gc
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lab.engine.engine import LabEngine
from parallel_backend import env
from parallel_backend.distributed.mesh import RankMesh
from parallel_backend.errors import Cancelled, InvalidRequest, NoRoom
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.loading import compiled_blocks, loaded_transformers
from parallel_backend.loading.offload_plan import decide
from parallel_backend.loading.weight_source import WeightSource
from parallel_backend.machines.ranks import host_links
from parallel_backend.machines.ranks.crossing import HostMap
from parallel_backend.machines.ranks.known import Known
from parallel_backend.processes import trim_heap
from parallel_backend.protocol.messages import Progress, RankRequest
from parallel_backend.protocol.status import HostLink
from parallel_backend.protocol.tensors import describe
from parallel_backend.strategies import sharded_weights

_ENGINES: list[LabEngine] = []
_READ: list[int] = []


def engine(rank: int) -> LabEngine:
    """This rank's engine."""
    if not _ENGINES:
        _ENGINES.append(LabEngine(rank=rank, world_size=dist.get_world_size(), device=torch.device("cpu")))
    return _ENGINES[0]


def mesh(rank: int, layout: str) -> RankMesh:
    """The mesh of a layout that uses this rank."""
    found = engine(rank)._meshes.get(ParallelLayout.parse(layout))
    assert found is not None
    return found


def handle(
    rank: int, message: RankRequest, tensors: Mapping[str, Tensor], *, cancel_after: int | None = None
) -> dict[str, Any]:
    """Carry a request out; a refusal is returned, so that a test sees what each rank raised.

    ``cancel_after`` sets rank 0's flag once that many steps were reported.
    """
    reports: list[tuple[Progress, dict[str, Tensor]]] = []
    mine = engine(rank)
    before = mine.steps
    answer: dict[str, Any] = {"tensors": {}, "error": None}
    try:
        answer["tensors"] = mine.handle(
            message,
            describe(tensors),
            tensors if rank == 0 else None,
            report=lambda progress, extra: reports.append((progress, dict(extra))),
            cancelled=lambda: cancel_after is not None and len(reports) >= cancel_after,
        )
    except (InvalidRequest, Cancelled, NoRoom) as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    return answer | {"steps": mine.steps - before, "reports": reports, "models": mine.snapshot()[0]}


def known(rank: int) -> Known:
    """What this rank knows of other machines."""
    elsewhere = engine(rank).elsewhere
    assert isinstance(elsewhere, Known)
    return elsewhere


def forget(rank: int) -> None:
    """Free all models of this rank."""
    for mine in _ENGINES:
        mine._models.clear()
    gc.collect()
    trim_heap()


def place(rank: int, hosts: list[tuple[str, str]]) -> None:
    """Let each rank be on a host, with a folder in which it looks for models; what it knew of files is forgotten."""
    os.environ[env.HOST.name], os.environ[env.MODELS.name] = hosts[rank]
    mine = engine(rank)
    mine.elsewhere = Known(mine._agreements.world, HostMap())


def place_ranks(rank: int, hosts: HostMap) -> None:
    """Say where the ranks are."""
    mine = engine(rank)
    mine.elsewhere = Known(mine._agreements.world, hosts)


def forward_notes(rank: int) -> list[str]:
    """What this rank has to say about single forwards that cross from host to host."""
    return [crossing._note for crossing in known(rank).crossings._of_forwards.values()]


def link(rank: int, hosts: Sequence[str]) -> HostLink | None:
    """This rank's link to another host."""
    return host_links.measure(engine(rank)._agreements.world, hosts, torch.device("cpu"))


def host_paths(rank: int) -> list[str]:
    """Where this rank's host has the files of requests, the newest last."""
    return list(known(rank)._paths.values())


def files_in_memory(rank: int) -> int:
    """How many files this rank keeps for its host."""
    return len(known(rank)._memory._descriptors)


def limit_memory(rank: int, limit: int | None) -> None:
    """Limit the memory of each rank; None for no limit."""
    os.environ[env.MEMORY_LIMIT.name] = "" if limit is None else str(limit)


def rest(rank: int) -> None:
    """Let a rank do what it does when no request comes."""
    engine(rank).rest()


def bytes_held_of(rank: int, path: str) -> int:
    """Bytes of weights that a rank holds of a checkpoint."""
    return sum(each.parts.nbytes for (of, _, _), each in engine(rank)._models.items() if of == path)


def values_read(rank: int) -> int:
    """How many values of weights this rank has read since the first call."""
    if not _READ:
        _READ.append(0)
        read = WeightSource.read

        def counted(self: WeightSource, *args: Any, **options: Any) -> None:
            _READ[0] += options["into"].numel()
            read(self, *args, **options)

        WeightSource.read = counted  # type: ignore[method-assign]
    return _READ[0]


def limit_memory_of(rank: int, limited: int, limit: int) -> None:
    """Limit the memory of one rank."""
    if rank == limited:
        limit_memory(rank, limit)


def stream_all(rank: int, on: bool) -> None:
    """Let all blocks stream, whatever the memory; or as it is decided."""
    vars(loaded_transformers)["decide"] = (lambda claims, *_, **__: [0] * len(claims)) if on else decide


def drop(rank: int, path: str, name: str, dropping: tuple[int, ...]) -> None:
    """Free a component of a model on some of the ranks, as a full device would."""
    for key, components in engine(rank)._models.items():
        if key[0] == path and rank in dropping:
            components.parts.drop(name)


def dropped_memory(rank: int, path: str) -> tuple[bool, int]:
    """Free a model's transformer with the memory that it streams from; return whether it and how many maps are left."""
    (parts,) = (components.parts for key, components in engine(rank)._models.items() if key[0] == path)
    family = weakref.ref(parts._parts["transformer"])
    inode = os.fstat(parts.stores["transformer"].descriptor).st_ino
    parts.drop_with_store("transformer")
    gc.collect()
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return family() is not None, sum(len(each) > 5 and "weights" in each[5] and int(each[4]) == inode for each in maps)


def cpu_memory(rank: int, path: str) -> list[int]:
    """The inodes of the machine's memory from which this rank streams a model."""
    models = [components for key, components in engine(rank)._models.items() if key[0] == path]
    return [os.fstat(store.descriptor).st_ino for each in models for store in each.parts.stores.values()]


def pretend_old_torch(rank: int, old: bool) -> None:
    """Let weight sharding find a torch whose FSDP has no replaceable all-gather."""
    vars(sharded_weights)["FSDPModule"] = object if old else FSDPModule


def held_bytes(rank: int, prefix: str) -> int:
    """The bytes of the weights that this rank has loaded last and whose names begin so. Forgets all models."""
    models = engine(rank)._models
    latest = models.popitem()[1]
    models.clear()
    weights = [each for family in latest.parts._parts.values() for each in family.module.state_dict().items()]
    kept = [local_part(tensor) for name, tensor in weights if name.startswith(prefix)]
    return sum(each.numel() * each.element_size() for each in kept)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def compile_with(rank: int, backend: str) -> None:
    """Let this rank compile blocks with another backend of torch's from now on."""
    compiled_blocks.BACKEND = backend


def compilations(rank: int) -> int:
    """Return how many graphs this rank has compiled."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
