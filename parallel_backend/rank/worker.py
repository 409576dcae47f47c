"""One rank: joins the process group, then carries out requests until its supervisor goes away.

Started by the supervisor as ``python -m parallel_backend.worker --control-fd N --device cuda:I``, with the
standard ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` in the environment. Rank 0 takes
requests from the supervisor and passes each on through the store, where the others wait for the next number.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import BackendError, Cancelled, DeadlineExceeded, InvalidRequest, OutOfMemory, RankFailed
from ..processes import die_with_parent, stay_on_own_cores
from ..protocol import frames, rank_control
from ..protocol.messages import Continue, Done, Echo, Error, Progress, RankStatus
from .supervisor_link import Job, Link

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ..engine.engine import Engine

log = logging.getLogger(__name__)

LONGEST_TEXT = 4000
"""Characters of an error that are passed on; the log has them all."""

SEND_PATIENCE = 60.0
"""Seconds that a client may take none of its reply's bytes, or send none of its request's."""

COLLECTIVE_PATIENCE = timedelta(minutes=10)
"""Deadline of one collective, long enough for a slower rank to load its weights."""

STORE_PATIENCE = timedelta(hours=1)
"""How often a waiting rank asks the store anew; the link ends the process long before it matters."""


def main(argv: Sequence[str] | None = None, *, engine: "Callable[..., Engine] | None" = None) -> None:
    """Run one rank until the process is ended. ``engine`` replaces the class ``Engine``."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the supervisor's terminal is the supervisor's
    options = _parse(argv)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.device == "cpu":
        stay_on_own_cores(rank, world)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {rank} %(name)s: %(message)s")
    status = RankStatus(rank=rank, pid=os.getpid(), device=options.device, memory=0)
    link = Link(socket.socket(fileno=options.control_fd), describe=lambda: status)
    link.start()
    device, store = _join(options, rank, world)
    built = (engine or _engine())(rank=rank, world_size=world, device=device)
    link.describe = lambda: _describe(built, status)
    worker = Worker(rank=rank, world=world, engine=built, link=link, store=store)
    link.ready()
    worker.run()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m parallel_backend.worker", description="One rank of the backend.")
    parser.add_argument("--control-fd", type=int, required=True, help="the supervisor's control socket")
    parser.add_argument("--store-fd", type=int, help="a listening socket for rank 0's store")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:INDEX")
    parser.add_argument("--collectives", default="nccl", choices=("nccl", "gloo"), help="what GPUs talk through")
    return parser.parse_args(argv)


def _join(options: argparse.Namespace, rank: int, world: int) -> "tuple[torch.device, TCPStore]":
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size=world,
        is_master=rank == 0,
        timeout=COLLECTIVE_PATIENCE,
        wait_for_workers=False,
        master_listen_fd=options.store_fd if rank == 0 else None,
    )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and options.collectives == "nccl" else "gloo"
    group = PrefixStore("group", store)
    dist.init_process_group(backend, store=group, rank=rank, world_size=world, timeout=COLLECTIVE_PATIENCE)
    return device, store


def _engine() -> "type[Engine]":
    from ..engine.engine import Engine

    return Engine


def _describe(engine: "Engine", status: RankStatus) -> RankStatus:
    models, device_memory, steps = engine.snapshot()
    return RankStatus(
        rank=status.rank,
        pid=status.pid,
        device=status.device,
        memory=0,
        device_memory=device_memory,
        models=models,
        steps=steps,
    )


class Worker:
    """The loop of one rank."""

    def __init__(self, *, rank: int, world: int, engine: "Engine", link: Link, store: "TCPStore") -> None:
        self.rank, self._world, self._engine, self._link, self._store = rank, world, engine, link, store
        self._number = 0

    def run(self) -> None:
        """Carry out requests for as long as the process lives."""
        while True:
            if self.rank:
                self._follow()
            else:
                job = self._link.take(STORE_PATIENCE.total_seconds())
                if job:
                    self._lead(job)

    # Ranks 1 and up

    def _follow(self) -> None:
        import torch.distributed as dist

        key = f"request/{self._number}"
        try:
            self._store.wait([key], STORE_PATIENCE)
        except dist.DistStoreError:
            return
        frame = frames.unpack(self._store.get(key))
        self._tell(self._carry_out(frame, None, report=_ignore, cancelled=_never)[0])
        self._forget(self._number)
        self._number += 1

    def _forget(self, number: int) -> None:
        """Remove a request from the store once every other rank has read it."""
        if self._store.add(f"read/{number}", 1) == self._world - 1:
            self._store.delete_key(f"request/{number}")
            self._store.delete_key(f"read/{number}")

    # Rank 0

    def _lead(self, job: Job) -> None:
        with job.connection:
            try:
                tensors = _receive(job)
            except InvalidRequest as error:
                self._reply(job, _finished(job, error.code, str(error)), {})
                return
            except (BackendError, ConnectionError) as error:
                self._reply(job, _cancelled(job, f"its tensors did not arrive: {error}"), {})
                return
            if self._world > 1:
                self._store.set(f"request/{self._number}", job.header.decode())
                self._number += 1
            finished, results = self._carry_out(
                job.frame, tensors, report=_Reporter(job), cancelled=job.cancelled.is_set
            )
            self._reply(job, finished, results)

    def _reply(self, job: Job, finished: rank_control.Finished, results: "Mapping[str, Tensor]") -> None:
        from ..protocol.tensors import send

        deadline = frames.Deadline(SEND_PATIENCE, "sending a reply")
        try:
            if finished.code == rank_control.DONE:
                send(job.connection, Done(), results, deadline=deadline)
            elif finished.code in rank_control.HARMLESS:
                send(job.connection, Error(code=finished.code, message=finished.message), deadline=deadline)
        except (DeadlineExceeded, ConnectionError) as error:
            finished = _cancelled(job, f"its reply was not taken: {error}")
        job.connection.close()
        self._tell(finished)

    # All ranks

    def _carry_out(
        self,
        frame: frames.Frame,
        tensors: "Mapping[str, Tensor] | None",
        *,
        report: "Callable[[Progress, Mapping[str, Tensor]], None]",
        cancelled: Callable[[], bool],
    ) -> "tuple[rank_control.Finished, Mapping[str, Tensor]]":
        message, code, text, by_peer = frame.message, rank_control.DONE, "", False
        results: Mapping[str, Tensor] = {}
        try:
            if isinstance(message, Echo):
                results = _echo(message, tensors, report)
            else:
                results = self._engine.handle(message, frame.tensors, tensors, report=report, cancelled=cancelled)
        except (InvalidRequest, Cancelled) as error:
            code, text = error.code, str(error)
        except BaseException as error:
            log.exception("request %s failed", message.request_id)
            code, text, by_peer = _diagnose(error)
        return rank_control.Finished(request_id=message.request_id, code=code, message=text, by_peer=by_peer), results

    def _tell(self, finished: rank_control.Finished) -> None:
        """Report the end of a request; after an error that spoils the ranks, wait to be ended."""
        self._link.finished(finished)
        if finished.code not in rank_control.HARMLESS:
            time.sleep(SEND_PATIENCE)
            sys.exit(1)


class _Reporter:
    """Sends progress to the client; a client that does not take it has its request cancelled."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, progress: Progress, tensors: "Mapping[str, Tensor]") -> None:
        from ..protocol.tensors import send

        if self._job.cancelled.is_set():
            return
        try:
            deadline = frames.Deadline(SEND_PATIENCE, "sending progress")
            send(self._job.connection, progress, tensors, deadline=deadline)
        except (DeadlineExceeded, ConnectionError) as error:
            log.info("request %s is cancelled: %s", self._job.frame.message.request_id, error)
            self._job.cancelled.set()


def _receive(job: Job) -> "dict[str, Tensor]":
    from ..protocol.tensors import recv_tensors, send

    def poll() -> None:
        if job.cancelled.is_set():
            raise Cancelled("the request was cancelled")

    poll()
    deadline = frames.Deadline(SEND_PATIENCE, "receiving a request's tensors")
    send(job.connection, Continue(), deadline=deadline)
    return recv_tensors(job.connection, job.frame.tensors, deadline=deadline, poll=poll)


def _echo(message: Echo, tensors: "Mapping[str, Tensor] | None", report: Any) -> "dict[str, Tensor]":
    import torch

    if tensors is None:
        return {}
    results = dict(tensors)
    if message.make:
        results["made"] = torch.full((message.make,), 0.5)
    report(Progress(phase="reply", value=0, total=1), {})
    return results


def _diagnose(error: BaseException) -> tuple[str, str, bool]:
    """Code, text for the user, and whether the cause is likely another rank."""
    import torch

    cause = error.__cause__ if isinstance(error, OutOfMemory) else error
    text = " ".join(str(cause).split())[:LONGEST_TEXT] or "no message"
    if isinstance(error, (torch.OutOfMemoryError, OutOfMemory)):
        return OutOfMemory.code, f"ran out of memory: {text}", False
    communication = isinstance(error, torch.distributed.DistError) or "gloo" in text.lower()
    return RankFailed.code, f"failed: {type(error).__name__}: {text}", communication


def _cancelled(job: Job, why: str) -> rank_control.Finished:
    return _finished(job, Cancelled.code, f"the request was cancelled: {why}")


def _finished(job: Job, code: str, message: str) -> rank_control.Finished:
    return rank_control.Finished(request_id=job.frame.message.request_id, code=code, message=message)


def _ignore(progress: Progress, tensors: "Mapping[str, Tensor]") -> None:
    """Progress is rank 0's to report."""


def _never() -> bool:
    return False


if __name__ == "__main__":
    main()
