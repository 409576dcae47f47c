"""What takes turns in a benchmark: layouts of ours on a backend, and peers on teams of their own."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...client.client import Client
from ...client.temporary_backend import temporary_backend
from ...layout.parallel_layout import ParallelLayout
from ...protocol.messages import Devices, Forward, ModelSpec
from ...verify.forward.examples import branches
from ..ranks.cases import Case
from ..ranks.peers import ONE, Peer
from ..ranks.rank import Turn
from ..ranks.team import Team


@dataclass(frozen=True, kw_only=True)
class First:
    """A contestant's first step of a case, which is not timed: its prediction, and bytes sent by rank."""

    prediction: Tensor
    sent: tuple[int, ...]


class Contestant(Protocol):
    """Does steps of a case. Both methods raise a ``BackendError`` if it cannot."""

    @property
    def name(self) -> str:
        """As the table has it."""

    def takes(self, case: Case) -> bool:
        """Whether the case is one for it at all."""

    def first(self, case: Case) -> First:
        """Load what is missing and do a step."""

    def seconds(self, case: Case) -> float:
        """Do a step; how long it took the ranks."""


class PeerContestant:
    """A peer, or the one process that all are compared with."""

    def __init__(self, peer: Peer, model: Path, folder: Path) -> None:
        self.peer, self.team, self._folder = peer, Team(peer, model, folder), folder

    @property
    def name(self) -> str:
        """See ``Contestant``."""
        return self.peer.name

    def takes(self, case: Case) -> bool:
        """See ``Contestant``."""
        return True

    def first(self, case: Case) -> First:
        """See ``Contestant``."""
        output = self._folder / "prediction.safetensors"
        answers = self.team.run(Turn(inputs=str(_write(case, self._folder)), output=str(output)))
        return First(prediction=load_file(output)["prediction"], sent=tuple(answer.sent for answer in answers))

    def seconds(self, case: Case) -> float:
        """See ``Contestant``."""
        return self.team.run(Turn(inputs=str(_write(case, self._folder))))[0].seconds


class LayoutContestant:
    """A layout of ours; all share the ranks of one backend."""

    def __init__(self, layout: ParallelLayout, client: Client, model: Path, devices: Devices) -> None:
        self._client, self.layout = client, layout
        self._spec = ModelSpec(path=str(model), devices=devices, dtype="float32", layout=layout)

    @property
    def name(self) -> str:
        """See ``Contestant``."""
        return str(self.layout)

    def takes(self, case: Case) -> bool:
        """See ``Contestant``: a group without a branch would have nothing to do."""
        return self.layout.cfg <= case.branches

    def first(self, case: Case) -> First:
        """See ``Contestant``."""
        answer = self._call(case, measure=True)
        prediction = torch.cat([answer[str(i)] for i in range(case.branches)])
        return First(prediction=prediction, sent=tuple(answer["sent_bytes"].tolist()))

    def seconds(self, case: Case) -> float:
        """See ``Contestant``."""
        return float(self._call(case, measure=False)["seconds"])

    def _call(self, case: Case, *, measure: bool) -> dict[str, Tensor]:
        inputs = case.inputs()
        rows = [{name: tensor[i : i + 1] for name, tensor in inputs.items()} for i in range(case.branches)]
        message = Forward(model=self._spec, branches=case.branches, measure=measure, timed=True)
        return self._client.call(message, branches(rows))


@contextmanager
def contestants(
    layouts: Sequence[ParallelLayout], peers: Sequence[Peer], model: Path, folder: Path
) -> Iterator[list[Contestant]]:
    """One process first, then the layouts, then the peers; their processes end afterwards."""
    devices = Devices(kind="cpu", indices=tuple(range(max(layout.ranks for layout in layouts))))
    with ExitStack() as stack:
        client = stack.enter_context(temporary_backend(folder))
        ours = [LayoutContestant(layout, client, model, devices) for layout in layouts]
        theirs = [PeerContestant(peer, model, folder) for peer in (ONE, *peers)]
        for contestant in theirs:
            stack.callback(contestant.team.close)
        yield [theirs[0], *ours, *theirs[1:]]


def _write(case: Case, folder: Path) -> Path:
    path = folder / f"{case}.safetensors"
    if not path.exists():
        save_file(case.inputs(), path)
    return path
