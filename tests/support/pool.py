"""Pools of gloo ranks that live for the whole test session, because starting one takes seconds.

A test runs a module-level function on all ranks at once and gets one result per rank.
"""

import importlib
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic
from typing import Any

PRELOAD = [
    "diffusers.models.transformers.transformer_wan",
    "diffusers.models.autoencoders.autoencoder_kl_wan",
    "transformers.models.umt5.modeling_umt5",
    "torch.distributed",
]
"""Modules that the fork server imports once, before it forks any rank."""
START_TIMEOUT = 120.0
RUN_TIMEOUT = 120.0
GRACE = 3.0
"""Seconds that the other ranks have after one has failed, since they may be waiting for it."""


class Pool:
    """``world_size`` processes in one gloo group. After a failure or a timeout the next call starts new ones."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = RUN_TIMEOUT, **kwargs: Any) -> list[Any]:
        """Call ``function(rank, *args, **kwargs)``, a module-level function, on every rank.

        Returns:
            The results, by rank.

        Raises:
            AssertionError: the function raises on a rank, whose traceback is in the text, or a rank does not answer
                within ``timeout`` seconds.
        """
        self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, args, kwargs))
        try:
            return self._collect(timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes: close their pipes, then kill those that are still alive."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join(5)
        if self._folder:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def _start(self) -> None:
        if self._processes:
            return
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        store = Path(self._folder.name) / "store"
        for rank in range(self.world_size):
            test_end, rank_end = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, str(store), rank_end), daemon=True)
            process.start()
            rank_end.close()
            self._processes.append(process)
            self._pipes.append(test_end)
        self._collect(START_TIMEOUT)

    def _collect(self, timeout: float) -> list[Any]:
        end = monotonic() + timeout
        results: list[Any] = [None] * self.world_size
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        failures: list[str] = []
        while waiting and (ready := wait(list(waiting), max(0.0, end - monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                failure, results[rank] = self._receive(rank)
                if failure:
                    failures.append(f"rank {rank} of {self.world_size}: {failure}")
                    end = min(end, monotonic() + GRACE)
        failures += [f"rank {rank} of {self.world_size} did not answer" for rank in waiting.values()]
        assert not failures, "\n".join(failures)
        return results

    def _receive(self, rank: int) -> tuple[str | None, Any]:
        try:
            reply: tuple[str | None, Any] = self._pipes[rank].recv()
        except EOFError:
            return "its process ended", None
        return reply


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    pipe.send((None, None))
    while True:
        try:
            pipe.send(_call(rank, *pipe.recv()))
        except (EOFError, OSError):
            os._exit(0)  # the pool is closed. Destroying the group could wait for a rank that has already ended.


def _call(rank: int, module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | None, Any]:
    try:
        return None, getattr(importlib.import_module(module), name)(rank, *args, **kwargs)
    except Exception:
        return traceback.format_exc(), None
