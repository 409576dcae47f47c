"""How often the host waits for the GPU, on one rank: in a forward, in a step of a loop, in a part of a VAE's work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from parallel_backend.engine.engine import Engine
from parallel_backend.protocol.messages import Progress, RankRequest
from parallel_backend.protocol.tensors import describe
from parallel_backend.verify.forward import examples
from parallel_backend.verify.vae import kinds
from parallel_backend.verify.vae.kinds import KINDS

from .gpu import Gpu
from .notes import Wait
from .requests import CODING, Small

NARROW = 8
_FRAMES = 7
"""Latent frames of a video, which is three parts or more of every VAE: the host does not wait after the last one."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Where the host waits, by the kind of work."""

    by_work: Mapping[str, Sequence[Wait]]

    @property
    def numbers(self) -> dict[str, int]:
        """How often it waits, by the kind of work."""
        return {work: len(waits) for work, waits in self.by_work.items()}


class _Rank:
    """One rank with a stand-in GPU."""

    def __init__(self) -> None:
        self._gpu = Gpu(0)
        with self._gpu:
            self._engine = Engine(rank=0, world_size=1, device=self._gpu.recorder.device)
        self.marks: list[int] = []

    def waits(self, message: RankRequest, tensors: Mapping[str, Tensor]) -> tuple[list[Wait], dict[str, Tensor]]:
        """Return where the host waits in a request, and the reply. ``marks`` are the numbers of waits by progress."""
        recorder = self._gpu.recorder
        recorder.begin()

        def report(progress: Progress, _: object) -> None:
            if progress.phase != "loading":
                recorder.mark()

        with self._gpu:
            reply = self._engine.handle(message, describe(tensors), tensors, report=report, cancelled=lambda: False)
        self.marks = recorder.notes.marks
        return recorder.notes.waits, reply

    def part(self, message: RankRequest, tensors: Mapping[str, Tensor]) -> list[Wait]:
        """Return where the host waits between two progress reports, where it does so most often."""
        waits, _ = self.waits(message, tensors)
        assert len(self.marks) > 1, "there is one part only"
        parts = [waits[start:end] for start, end in zip(self.marks, self.marks[1:], strict=False)]
        return max(parts, key=len)


def of_family(class_name: str, variant: str, folder: Path) -> Counts:
    """Count in a forward, apart from the copies of its inputs and its predictions, and in the last step of a loop."""
    path = examples.write_checkpoint(folder, examples.module(class_name, variant))
    small, rank = Small(class_name=class_name, variant=variant, path=path, ranks=1), _Rank()
    step = rank.part(*small.loop("", steps=2, texts_differ=True))  # it also loads the weights
    forward, tensors = small.forward("", branches=2)
    waits, reply = rank.waits(forward, tensors)
    return Counts(by_work={"forward": waits[len(tensors) : len(waits) - len(reply)], "step": step})


def of_vae(kind: str, folder: Path) -> Counts:
    """Count in a part of a decode and of an encode."""
    path = kinds.write(folder, KINDS[kind].module(NARROW))
    rank, size = _Rank(), {"frames": _FRAMES, "rows": 4, "columns": 3}
    return Counts(by_work={task: rank.part(*request(path, ranks=1, **size)) for task, request in CODING.items()})
