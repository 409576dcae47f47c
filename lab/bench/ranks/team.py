"""The processes of a peer, from the parent's side: started together, called together, and always ended."""

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from parallel_backend.errors import RankFailed
from parallel_backend.last_words import last_line, tail
from parallel_backend.protocol.model_spec import Devices, DType

from .peers import Peer
from .rank import BUFFER, Result

START_PATIENCE = 180.0
STEP_PATIENCE = 300.0
GRACE = 3.0
"""Seconds that the other ranks have to reply after one failed; they may be waiting for it."""
END_PATIENCE = 5.0
ROOT = Path(__file__).resolve().parents[3]


class Team:
    """The processes of a peer, one per rank, kept from one step to the next.

    If only some ranks fail, all are ended, and the next step starts new ones.

    Attributes:
        module: the module that the processes run.
        peer: the peer.
        devices: by rank; there may be more devices than ranks.
        dtype: of a peer's computation.
    """

    module = "lab.bench.ranks.rank"

    def __init__(self, peer: Peer, devices: Devices, model: Path, folder: Path, *, dtype: DType = "float32") -> None:
        self.peer, self.devices, self.dtype = peer, devices, dtype
        self._model, self._folder, self._starts = model, folder, 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[socket.socket] = []

    def run(self, request: msgspec.Struct, seconds: float = STEP_PATIENCE) -> list[Result]:
        """Send a request to all ranks and return their results.

        Args:
            request: of a type that the ranks' module accepts.
            seconds: deadline.

        Raises:
            RankFailed: a rank raised, ended or missed the deadline. Unless all ranks raised, they have been ended.
        """
        if not self._processes:
            self._start()
        for link in self._links:
            with contextlib.suppress(OSError):  # _collect reports a closed link
                link.send(msgspec.json.encode(request))
        return self._collect(seconds)

    def close(self) -> None:
        """End the processes by closing their sockets, and kill the ones that do not end in time."""
        for link in self._links:
            link.close()
        end = time.monotonic() + END_PATIENCE
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes, self._links = [], []

    def _start(self) -> None:
        self._starts += 1
        try:
            for rank in range(self.peer.ranks):
                self._start_rank(rank)
            self._collect(START_PATIENCE)
        except BaseException:
            self.close()
            raise

    def _start_rank(self, rank: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._links.append(ours)
        store = self._folder / f"{self.peer.name}.{self._starts}.store"
        command = [*self._prefix(rank), sys.executable, "-m", self.module]
        command += ["--link-fd", str(theirs.fileno()), "--peer", self.peer.name]
        command += ["--model", str(self._model), "--store", str(store), "--dtype", self.dtype]
        command += ["--device", self.devices.of_rank(rank), "--collectives", self.devices.collectives]
        with theirs, self._log(rank).open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[theirs.fileno()],
                    env=self._environment(rank),
                )
            )  # fmt: skip

    def _prefix(self, rank: int) -> list[str]:
        """Command prefix of a rank's process."""
        return []

    def _environment(self, rank: int) -> Mapping[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # Other projects take LOCAL_RANK for the index of the rank's GPU.
        local = self.devices.indices[rank] if self.devices.kind == "cuda" else rank
        return {
            **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(self.peer.threads), "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo", "RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(self.peer.ranks),
        }  # fmt: skip

    def _log(self, rank: int) -> Path:
        return self._folder / f"{self.peer.name}.rank{rank}.log"

    def _collect(self, seconds: float) -> list[Result]:
        results: dict[int, Result] = {}
        end = time.monotonic() + seconds
        while waiting := [link for rank, link in enumerate(self._links) if rank not in results]:
            ready = select.select(waiting, [], [], max(0.0, end - time.monotonic()))[0]
            if not ready:
                break
            for link in ready:
                rank = self._links.index(link)
                results[rank] = self._receive(rank)
                if results[rank].error:
                    end = min(end, time.monotonic() + GRACE)
        errors = [f"rank {rank}: {result.error}" for rank, result in results.items() if result.error]
        if len(results) == len(self._links) and not errors:
            return [results[rank] for rank in range(len(results))]
        if len(errors) < len(self._links):  # ranks that did not fail may be stuck in a collective
            self.close()
        raise RankFailed(errors[0] if errors else f"no answer within {seconds:g} s")

    def _receive(self, rank: int) -> Result:
        with contextlib.suppress(ConnectionError):
            message = self._links[rank].recv(BUFFER)
            if message:
                return msgspec.json.decode(message, type=Result)
        return Result(error=f"its process ended: {last_line(tail(self._log(rank)))}")
