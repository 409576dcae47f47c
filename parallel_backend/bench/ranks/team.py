"""The processes of a peer as the benchmark sees them: started together, asked together, ended for sure."""

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

from ...errors import RankFailed
from ...processes import last_line
from .peers import Peer
from .rank import BUFFER, Answer

START_PATIENCE = 180.0
TURN_PATIENCE = 300.0
GRACE = 3.0
"""Seconds that the other ranks have after one failed: they may wait for it in vain."""
END_PATIENCE = 5.0
ROOT = Path(__file__).resolve().parents[3]


class Team:
    """One process a rank of a peer, kept from one step to the next. Where some failed alone, the next starts anew.

    ``module`` is what the processes run.
    """

    module = "parallel_backend.bench.ranks.rank"

    def __init__(self, peer: Peer, model: Path, folder: Path) -> None:
        self.peer, self._model, self._folder, self._starts = peer, model, folder, 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[socket.socket] = []

    def run(self, turn: msgspec.Struct, seconds: float = TURN_PATIENCE) -> list[Answer]:
        """What each rank says of a turn, which may take so many seconds.

        Raises:
            RankFailed: a rank raised, ended or missed its deadline; unless all raised, they are ended by then.
        """
        if not self._processes:
            self._start()
        for link in self._links:
            with contextlib.suppress(OSError):  # an end that is gone shows in the answers
                link.send(msgspec.json.encode(turn))
        return self._collect(seconds)

    def close(self) -> None:
        """End the processes: by closing their sockets, and those that do not mind that by force."""
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
        command += ["--model", str(self._model), "--store", str(store)]
        with theirs, self._log(rank).open("wb") as output:
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[theirs.fileno()],
                    env=self._environment(rank),
                )
            )  # fmt: skip

    def _prefix(self, rank: int) -> list[str]:
        """What a rank's process is started by."""
        return []

    def _environment(self, rank: int) -> Mapping[str, str]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        return {
            **os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(self.peer.threads), "GLOO_SOCKET_IFNAME": "lo",
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.peer.ranks),
        }  # fmt: skip

    def _log(self, rank: int) -> Path:
        return self._folder / f"{self.peer.name}.rank{rank}.log"

    def _collect(self, seconds: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        end = time.monotonic() + seconds
        while waiting := [link for rank, link in enumerate(self._links) if rank not in answers]:
            ready = select.select(waiting, [], [], max(0.0, end - time.monotonic()))[0]
            if not ready:
                break
            for link in ready:
                rank = self._links.index(link)
                answers[rank] = self._receive(rank)
                if answers[rank].error:
                    end = min(end, time.monotonic() + GRACE)
        errors = [f"rank {rank}: {answer.error}" for rank, answer in answers.items() if answer.error]
        if len(answers) == len(self._links) and not errors:
            return [answers[rank] for rank in range(len(answers))]
        if len(errors) < len(self._links):  # ranks that all refused a step have not left one another in it
            self.close()
        raise RankFailed(errors[0] if errors else f"no answer within {seconds:g} s")

    def _receive(self, rank: int) -> Answer:
        with contextlib.suppress(ConnectionError):
            message = self._links[rank].recv(BUFFER)
            if message:
                return msgspec.json.decode(message, type=Answer)
        return Answer(error=f"its process ended: {last_line(self._log(rank))}")
