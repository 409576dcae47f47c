"""Brings a model of the first host to the hosts that lack it, if that is allowed."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from .. import env
from ..checkpoint.opening import open_checkpoint
from ..distributed.collectives import gather_numbers, gather_texts, refused_alike
from ..distributed.mesh import Axis
from ..errors import Cancelled, InvalidRequest
from ..progress import PROGRESS
from ..protocol.messages import Progress
from ..step_loop.setting import Report
from .download import PATIENCE, Download, Open, SharedFile

log = logging.getLogger(__name__)

ROUND = 0.5
"""Seconds between two agreements of the ranks on whether to go on."""
STALLED = 5 * PATIENCE
"""Seconds in which at least one host has to receive something. Each gives up earlier, unless its disk hangs."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How a rank takes part in it.

    Attributes:
        offer: of rank 0: lets other hosts read these files, and no others. None if models are not shared.
        open_file: of the other hosts' ranks, see ``Download``.
    """

    offer: Callable[[Sequence[str]], None] | None = None
    open_file: Open | None = None


def is_allowed(sharing: Sharing, world: Axis) -> bool:
    """Whether rank 0 may share models; all ranks know it then. Collective."""
    return gather_numbers([int(sharing.offer is not None)], world)[0] == (1,)


def receive(
    path: str,
    content: str,
    world: Axis,
    sharing: Sharing,
    *,
    lacks: bool,
    report: Report,
    cancelled: Callable[[], bool],
) -> str:
    """Bring a model from the first host to others. Collective over the world.

    Args:
        path: where rank 0 has the model.
        content: the model's.
        world: all ranks.
        sharing: how this rank takes part.
        lacks: whether this rank's host lacks the model.
        report: takes progress in MiB. Called on rank 0 only.
        cancelled: whether the client cancelled, read on rank 0 only.

    Returns:
        Why this rank's host has not got it; "" if it has, or if another rank of it knows.

    Raises:
        InvalidRequest: rank 0 cannot share it, or nothing arrives anywhere; on all ranks alike.
        Cancelled: on all ranks alike.
    """
    files = _offered(path, world, sharing)
    receives = _is_first_of_host(world) and lacks
    download = _started(files, content, sharing) if receives else None
    try:
        _wait(download, world, report, cancelled)
    finally:
        if download:
            download.stop()
        if sharing.offer:
            sharing.offer(())
    return download.error if download else ""


def _offered(path: str, world: Axis, sharing: Sharing) -> list[SharedFile]:
    """Return the model's files, which rank 0 shares from now on."""
    text = ""
    with refused_alike(world):
        if world.index == 0:
            assert sharing.offer
            try:
                files = open_checkpoint(path).shared_files()
                text = json.dumps([asdict(SharedFile(name=name, size=file.stat().st_size)) for name, file in files])
                sharing.offer([str(file) for _, file in files])
            except (OSError, UnicodeError) as error:
                raise InvalidRequest(f"{path} cannot be shared: {error}") from error
    return [SharedFile(**file) for file in json.loads(gather_texts(text, world)[0])]


def _started(files: Sequence[SharedFile], content: str, sharing: Sharing) -> Download:
    assert sharing.open_file, "a rank of another host knows the way to the first one"
    download = Download(files, content, sharing.open_file)
    log.info("receiving %s from the first host, %.1f GB", content, download.total / 1e9)
    download.start()
    return download


def _is_first_of_host(world: Axis) -> bool:
    hosts = gather_texts(env.HOST.get(), world)
    return hosts.index(hosts[world.index]) == world.index


def _wait(download: Download | None, world: Axis, report: Report, cancelled: Callable[[], bool]) -> None:
    """Wait until all hosts have received it, one has failed, or the client cancels."""
    before, moved_at = -1, time.monotonic()
    while True:
        if download is None:
            time.sleep(ROUND)
        ended = download is None or download.ended(ROUND)
        failed = download is not None and bool(download.error)
        got, total = (download.received, download.total) if download else (0, 0)
        silence = time.monotonic() - moved_at
        states = gather_numbers([got, total, ended, failed, int(silence), world.index == 0 and cancelled()], world)
        received, of = (sum(state[i] for state in states) for i in range(2))
        _report(received, of, world, report)
        if states[0][5]:
            raise Cancelled("the request was cancelled while hosts received the model; what has arrived is kept")
        if received != before:
            before, moved_at = received, time.monotonic()
        elif states[0][4] > STALLED:
            raise InvalidRequest(f"no host has received any of it for {states[0][4]} s: see the ranks' logs")
        if all(state[2] for state in states) or any(state[3] for state in states):
            return


def _report(received: int, of: int, world: Axis, report: Report) -> None:
    done, total = received >> 20, of >> 20
    PROGRESS.step(done, total)
    if world.index == 0:
        report(Progress(phase="receiving", value=done, total=total), {})
