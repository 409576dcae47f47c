"""What runs on the ranks of a pool: an engine on a stand-in GPU, and requests to it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_backend.engine.engine import Engine
from parallel_backend.errors import InvalidRequest
from parallel_backend.protocol.messages import RankRequest
from parallel_backend.protocol.tensors import describe

from .gpu import Gpu, join
from .notes import Notes

_STATE: list[tuple[Gpu, Engine]] = []


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rank gives to a request.

    Attributes:
        refusal: why it was refused, if it was.
        tensors: the reply.
        notes: what was noted.
    """

    refusal: str
    tensors: dict[str, Tensor]
    notes: Notes


def gpu_and_engine(rank: int) -> tuple[Gpu, Engine]:
    """This rank's GPU, and its engine."""
    if not _STATE:
        join()
        gpu = Gpu(rank)
        with gpu:
            device = torch.device("cuda", rank)
            _STATE.append((gpu, Engine(rank=rank, world_size=dist.get_world_size(), device=device)))
    return _STATE[0]


def handle(rank: int, message: RankRequest, tensors: Mapping[str, Tensor]) -> Answer:
    """Carry a request out on the stand-in GPU."""
    gpu, engine = gpu_and_engine(rank)
    gpu.recorder.begin()
    reply: dict[str, Any] = {}
    refusal = ""
    with gpu:
        try:
            reply = engine.handle(
                message,
                describe(tensors),
                tensors if rank == 0 else None,
                report=gpu.recorder.report,
                cancelled=lambda: False,
            )
        except InvalidRequest as error:
            refusal = str(error)
    return Answer(refusal=refusal, tensors=reply, notes=gpu.recorder.notes)
