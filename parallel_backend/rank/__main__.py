"""The process of one rank, which the supervisor starts: ``python -m parallel_backend.rank --control-fd N``.

It reads ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` from the
environment, where launchers set them.
With ``--spare`` it first waits for the supervisor to say which rank it is.
"""

import argparse
import faulthandler
import importlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from .. import env, packages
from ..processes import die_with_parent, pin_to_core_share
from ..progress import CONNECTING, PROGRESS, STARTING
from ..protocol.status import HostLink, RankStatus
from .device_gauge import DeviceGauge
from .diagnosis import diagnose
from .spare import Role, imports, wait_for_role
from .supervisor_link import SupervisorLink
from .worker import Worker, report_end

if TYPE_CHECKING:
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ..engine.elsewhere import Elsewhere
    from ..engine.engine import Engine
    from ..engine.planned import Planned, Planner
    from ..engine.request import Tensors
    from .rank_engine import RankEngine

Find = Callable[[int, int, "torch.device"], "tuple[Elsewhere | None, HostLink | None]"]
"""Returns the other machines of a rank, and its link to another one. Takes its number, the number of ranks, and its
device, and is collective over all ranks."""

log = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""Timeout of one collective, long enough for a slower rank to load its weights. The supervisor, which sees whether any
rank makes progress, gives up earlier (``Patience``)."""


def main(
    argv: Sequence[str] | None = None,
    *,
    engine: "Callable[..., RankEngine] | None" = None,
    prepare: Callable[[], Iterator[None]] = imports,
    elsewhere: Find | None = None,
) -> None:
    """Run one rank until the process is killed.

    Args:
        argv: the command line.
        engine: replaces the class ``Engine``.
        prepare: see ``wait_for_role``.
        elsewhere: finds other machines; None if there are none.
    """
    die_with_parent()
    faulthandler.enable()  # prints the stack when a signal such as SIGSEGV ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the supervisor's terminal is only for the supervisor
    packages.hide()
    options = _parse(argv)
    control = socket.socket(fileno=options.control_fd)
    if options.spare:
        role = wait_for_role(control, prepare)
    else:
        role = Role(device=options.device, collectives=options.collectives, store=options.store_fd)
    _run(role, control, engine, elsewhere or _alone)


def _alone(rank: int, world_size: int, device: "torch.device") -> tuple[None, None]:
    """There are no other machines."""
    return None, None


def _run(role: Role, control: socket.socket, engine: "Callable[..., RankEngine] | None", find: Find) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if role.device == "cpu":
        pin_to_core_share(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    logging.basicConfig(level=env.LOG_LEVEL.get(), format=f"%(asctime)s rank {rank} %(name)s: %(message)s")
    status = RankStatus(rank=rank, pid=os.getpid(), device=role.device, memory=0)
    link = SupervisorLink(control, describe=lambda: replace(status, progress=PROGRESS.read()))
    with PROGRESS.phase(STARTING):
        link.start()
        try:
            device, store = _join_group(role, rank, world_size)
            others, link_to_host = find(rank, world_size, device)
            status = replace(status, link=link_to_host)
            rank_engine: RankEngine = (engine or _engine_class())(
                rank=rank, world_size=world_size, device=device, elsewhere=others
            )
            rank_engine.trials, rank_engine.planner = {"probe": _probe}, _planned
        except Exception as error:
            log.exception("the rank does not start")
            report_end(link, diagnose(error, "", when=" while starting"))
            raise
    gauge = DeviceGauge(device)
    link.describe = lambda: _describe(rank_engine, gauge, status)
    worker = Worker(rank=rank, world_size=world_size, engine=rank_engine, link=link, store=store)
    link.report_ready()
    worker.run()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m parallel_backend.rank", description="One rank of the backend.")
    parser.add_argument("--control-fd", type=int, required=True, help="the supervisor's control socket")
    parser.add_argument("--store-fd", type=int, help="a listening socket for the store of rank 0")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:INDEX")
    parser.add_argument(
        "--collectives", default="nccl", choices=("nccl", "gloo"), help="communication backend of GPU ranks"
    )
    parser.add_argument("--spare", action="store_true", help="wait for the supervisor to say which rank this is")
    return parser.parse_args(argv)


def _join_group(role: Role, rank: int, world_size: int) -> "tuple[torch.device, TCPStore]":
    import torch
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from ..distributed import process_group

    device = torch.device(role.device)
    if device.type == "cuda":
        PROGRESS.marker = _mark_on_gpu
    with PROGRESS.phase(CONNECTING):
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size=world_size,
            is_master=rank == 0,
            timeout=COLLECTIVE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=role.store if rank == 0 else None,
        )
        group = PrefixStore("group", store)
        process_group.join(
            device, role.collectives, group, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT
        )
    return device, store


def _mark_on_gpu() -> Callable[[], bool]:
    """See ``ProgressCounter.marker``: the CPU runs many kernels ahead of a GPU, which may take minutes."""
    import torch

    event = torch.cuda.Event()
    event.record()

    def reached() -> bool:
        try:
            return bool(event.query())
        except RuntimeError:
            return True  # the GPU has failed; the working thread notices that itself

    return reached


def _engine_class() -> "type[Engine]":
    from ..engine.engine import Engine

    lab = env.LAB.get()
    found: type[Engine] = importlib.import_module(lab).LabEngine if lab else Engine
    return found


def _probe(*given: Any) -> "Tensors":
    from ..planner import probe  # most ranks measure nothing

    return probe.run(*given)


@cache
def _chooser() -> "Planner":
    from ..planner.choosing import Chooser  # most requests ask for no plan

    return Chooser()


def _planned(*given: Any) -> "Planned":
    return _chooser()(*given)


def _describe(engine: "RankEngine", gauge: DeviceGauge, status: RankStatus) -> RankStatus:
    models, device_memory, steps = engine.snapshot()
    known = gauge.added_to(status)
    return replace(known, device_memory=device_memory, models=models, steps=steps, progress=PROGRESS.read())


if __name__ == "__main__":
    main()
