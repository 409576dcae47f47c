"""Processes of one rank each, on all GPUs of the machine or on the CPU."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from lab.bench.ranks.peers import Peer
from lab.bench.ranks.team import Team
from parallel_backend.client.devices import parse_devices
from parallel_backend.protocol.model_spec import Devices


def all_cards(cpu_ranks: int) -> Devices:
    """Return all GPUs, which talk through NCCL; CPU ranks where there are fewer than two GPUs."""
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        return parse_devices("all")
    return Devices(kind="cpu", indices=tuple(range(cpu_ranks)))


class Ranks(Team):
    """One process for each device, each with its own variables.

    Args:
        module: what the processes run, see ``lab.bench.ranks.rank.serve``.
        devices: by rank.
        folder: where they write their logs.
        model: the checkpoint's folder; ``folder`` without a checkpoint.
        variables: environment variables, by rank.
    """

    def __init__(
        self,
        module: str,
        devices: Devices,
        folder: Path,
        *,
        model: Path | None = None,
        variables: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        logs = Path(tempfile.mkdtemp(prefix="ranks-", dir=folder))  # its own: ranks meet in a file there
        super().__init__(Peer(name="ranks", ranks=len(devices.indices)), devices, model or folder, logs)
        self.module, self._variables = module, variables or {}

    @property
    def running(self) -> bool:
        """Whether the processes go on: after a request that all of them refused alike, they do."""
        return bool(self._processes)

    def _environment(self, rank: int) -> Mapping[str, str]:
        return {**super()._environment(rank), **self._variables.get(rank, {})}
