"""The contestants of a benchmark: our layouts, all on one backend, and peers, each on its own team of processes."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward, Measure
from parallel_backend.protocol.model_spec import Devices, DType, ModelSpec
from parallel_backend.verify.examples import branches

from ..ranks.cases import Case
from ..ranks.peers import ONE_PROCESS, Peer
from ..ranks.rank import StepRequest
from ..ranks.team import Team


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """A contestant's first, untimed step of a case.

    Attributes:
        prediction: of all branches, concatenated along the batch.
        sent: bytes that each rank sent.
    """

    prediction: Tensor
    sent: tuple[int, ...]


class Contestant(Protocol):
    """Runs steps of a case. Both step methods raise a ``BackendError`` if it cannot."""

    @property
    def name(self) -> str:
        """Its name in the table."""

    def supports(self, case: Case) -> bool:
        """Whether it can run the case at all."""

    def first_step(self, case: Case) -> FirstStep:
        """Load the model if necessary and run a step."""

    def timed_step(self, case: Case) -> float:
        """Run a step and return the seconds that the ranks measured."""


class PeerContestant:
    """A peer, or the single process that serves as the baseline."""

    def __init__(self, peer: Peer, devices: Devices, model: Path, folder: Path, dtype: DType) -> None:
        self.peer, self.team, self._folder = peer, Team(peer, devices, model, folder, dtype=dtype), folder

    @property
    def name(self) -> str:
        """See ``Contestant``."""
        return self.peer.name

    def supports(self, case: Case) -> bool:
        """See ``Contestant``."""
        return True

    def first_step(self, case: Case) -> FirstStep:
        """See ``Contestant``."""
        output = self._folder / "prediction.safetensors"
        results = self.team.run(StepRequest(inputs=str(_write(case, self._folder)), output=str(output)))
        return FirstStep(prediction=load_file(output)["prediction"], sent=tuple(result.sent for result in results))

    def timed_step(self, case: Case) -> float:
        """See ``Contestant``."""
        return self.team.run(StepRequest(inputs=str(_write(case, self._folder))))[0].seconds


class LayoutContestant:
    """One of our layouts; all layouts share the ranks of one backend."""

    def __init__(self, layout: ParallelLayout, client: Client, model: Path, devices: Devices, dtype: DType) -> None:
        self._client, self.layout = client, layout
        self._spec = ModelSpec(path=str(model), devices=devices, dtype=dtype, layout=layout)

    @property
    def name(self) -> str:
        """See ``Contestant``."""
        return str(self.layout)

    def supports(self, case: Case) -> bool:
        """See ``Contestant``. A cfg group without a branch has nothing to do."""
        return self.layout.cfg <= case.branches

    def first_step(self, case: Case) -> FirstStep:
        """See ``Contestant``."""
        answer = self._call(case, "bytes")
        prediction = torch.cat([answer[str(i)] for i in range(case.branches)])
        return FirstStep(prediction=prediction, sent=tuple(answer["sent_bytes"].tolist()))

    def timed_step(self, case: Case) -> float:
        """See ``Contestant``."""
        return float(self._call(case, "seconds")["seconds"])

    def _call(self, case: Case, measure: Measure) -> dict[str, Tensor]:
        inputs = case.inputs()
        by_branch = [{name: tensor[i : i + 1] for name, tensor in inputs.items()} for i in range(case.branches)]
        message = Forward(model=self._spec, branches=case.branches, measure=measure)
        return self._client.call(message, branches(by_branch))


@contextmanager
def contestants(
    layouts: Sequence[ParallelLayout],
    peers: Sequence[Peer],
    devices: Devices,
    model: Path,
    folder: Path,
    dtype: DType,
) -> Iterator[list[Contestant]]:
    """Yield one process, then the layouts, then the peers, and end all processes afterwards."""
    of_layouts = devices.first(max(layout.ranks for layout in layouts))
    with ExitStack() as stack:
        client = stack.enter_context(temporary_backend(folder))
        ours = [LayoutContestant(layout, client, model, of_layouts, dtype) for layout in layouts]
        baseline, *theirs = [PeerContestant(peer, devices, model, folder, dtype) for peer in (ONE_PROCESS, *peers)]
        for contestant in (baseline, *theirs):
            stack.callback(contestant.team.close)
        yield [baseline, *ours, *theirs]


def _write(case: Case, folder: Path) -> Path:
    """Write the inputs of a case to a file, once."""
    path = folder / f"{case}.safetensors"
    if not path.exists():
        save_file(case.inputs(), path)
    return path
