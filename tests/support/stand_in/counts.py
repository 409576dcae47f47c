"""How often the host waits for the GPU, on one rank: in a forward, in a step of a loop, in a part of a VAE's work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from lab.verify.vae import kinds
from lab.verify.vae.kinds import KINDS
from parallel_backend.engine.engine import Engine
from parallel_backend.protocol.messages import MeasuredRequest, RankRequest
from parallel_backend.protocol.tensors import describe
from parallel_backend.verify import examples

from .gpu import Gpu
from .notes import Notes, Wait
from .requests import CODING, Small

NARROW = 8
_FRAMES = 7
"""Latent frames of a video, which is three parts or more of every VAE: the host does not wait after the last one."""
_MORE_FRAMES = {"minimax_h3": 17}
"""The same for a VAE whose parts are longer clips."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Where the host waits, by the kind of work."""

    by_work: Mapping[str, Sequence[Wait]]


class _Rank:
    """One rank with a stand-in GPU."""

    def __init__(self) -> None:
        self._gpu = Gpu(0)
        with self._gpu:
            self._engine = Engine(rank=0, world_size=1, device=self._gpu.recorder.device)

    def handle(self, message: RankRequest, tensors: Mapping[str, Tensor]) -> tuple[Notes, dict[str, Tensor]]:
        """Return what is noted of a request, and the reply."""
        recorder = self._gpu.recorder
        recorder.begin()
        with self._gpu:
            reply = self._engine.handle(
                message, describe(tensors), tensors, report=recorder.report, cancelled=lambda: False
            )
        return recorder.notes, reply


def of_family(class_name: str, variant: str, folder: Path) -> Counts:
    """Count in a forward, apart from the copies of its inputs and its predictions, and in the last step of a loop."""
    path = examples.write_checkpoint(folder, examples.module(class_name, variant))
    small, rank = Small(class_name=class_name, variant=variant, path=path, ranks=1), _Rank()
    loop, _ = rank.handle(*small.loop("", steps=2, texts_differ=True))  # it also loads the weights
    forward, tensors = small.forward("", branches=2)
    notes, reply = rank.handle(forward, tensors)
    inside = notes.waits[len(tensors) : len(notes.waits) - len(reply)]
    return Counts(by_work={"forward": inside, "step": loop.part})


def of_vae(kind: str, folder: Path) -> Counts:
    """Count in a part of a decode and of an encode. Where bytes are counted, the ranks ask after each part."""
    path = kinds.write(folder, KINDS[kind].module(NARROW))
    rank, size = _Rank(), {"frames": _MORE_FRAMES.get(kind, _FRAMES), "rows": 2, "columns": 2}
    by_work = {}
    for task, request in CODING.items():
        message, tensors = request(path, ranks=1, **size)
        assert isinstance(message, MeasuredRequest)
        by_work[task] = rank.handle(replace(message, measure="bytes"), tensors)[0].part
    return Counts(by_work=by_work)
