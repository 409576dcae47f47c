"""``python -m parallel_backend serve``: run the backend by hand, for this or several machines."""

import argparse
import contextlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from . import env
from .client import query
from .client.launch import ALREADY_RUNS, START_TIMEOUT, connect_or_start
from .errors import BackendUnavailable, InvalidRequest
from .other_machines import machines
from .protocol.endpoint import Endpoint, passed_over
from .protocol.status import Status
from .supervisor.limits import Limits
from .supervisor.other_machines import Machines
from .supervisor.ranks.compiled_code import keep_compiled_code
from .supervisor.supervisor import Supervisor

STARTS = 5
"""How often a backend that ends at once is started."""

log = logging.getLogger(__name__)

IDLE_TIMEOUT = 600.0
"""Default for the seconds without work after which a backend ends that only this machine uses."""


class AskedFor(Machines, Protocol):
    """What the options say about other machines, see ``machines.settings``."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """These settings as options of ``serve``."""

    def advice(self, endpoint: Endpoint) -> list[str]:
        """Return notes for the user: what to know, and what to do on other machines."""

    def difference(self, status: Status, listen: str | None) -> str:
        """Return how a running backend differs, as the end of a sentence; "" if it does not."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The parsed options of ``serve``.

    Attributes:
        endpoint: the backend's.
        idle_timeout: returns the seconds without work after which it ends, as they are set now; 0 for never.
        spares: target number of spare ranks; None: as many as fit.
        machines: settings for other machines; None without any.
    """

    endpoint: Endpoint
    idle_timeout: Callable[[], float]
    spares: int | None
    machines: AskedFor | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """The options for a process in the background, which inherits the environment."""
        return self.machines.arguments if self.machines else ()

    @property
    def advice(self) -> list[str]:
        """Notes for the user: what to know, and what to do on other machines."""
        return self.machines.advice(self.endpoint) if self.machines else []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument(
        "--idle-timeout", type=_seconds, metavar="SECONDS", help="idle time after which it ends; 0 means never"
    )
    add_spares(parser)
    parser.add_argument(
        "--listen", metavar="ADDRESS:PORT",
        help="let other machines connect here, with TLS and certificates; the backend then runs until it is stopped, "
        "unless an idle time is given",
    )  # fmt: skip
    parser.add_argument(
        "--nnodes", type=_count, default=1, metavar="N",
        help="number of hosts whose devices ranks may use, this one included; the others join with the command that "
        "is printed, at the interface's address and port 7400 unless --listen says otherwise",
    )  # fmt: skip
    parser.add_argument(
        "--interface", default="", metavar="NAME",
        help="the private network interface over which ranks of different hosts talk, without encryption",
    )  # fmt: skip
    parser.add_argument(
        "--forwarded", action="store_true",
        help="let ComfyUI on another machine connect through ssh -L; the backend then runs until it is stopped, unless "
        "an idle time is given",
    )  # fmt: skip
    parser.add_argument("--share-models", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--detach", action="store_true", help="run in the background; return once the backend answers")
    parser.add_argument("--quiet", action="store_true", help="log to the log folder alone, not to stderr as well")


def add_spares(parser: argparse.ArgumentParser) -> None:
    """Add the option that sets the number of spare ranks on this host."""
    parser.add_argument(
        "--spares", type=_count, metavar="N",
        help="number of spare ranks, which take the place of dead ones; 0 for none (default: as many as there are "
        "ranks on this machine, if they take little of its memory)",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Serve until stopped, or start a backend in the background.

    Raises:
        BackendError: an option does not fit, or the backend does not start.
    """
    serving = parse(options)
    if options.detach:
        return _detach(serving, options)
    return serve(serving, quiet=options.quiet)


def parse(options: argparse.Namespace) -> Serving:
    """Check the options and the environment.

    Raises:
        InvalidRequest: an option or a variable does not fit.
    """
    endpoint = own_endpoint()
    if options.share_models:
        raise InvalidRequest(
            "--share-models is not there any more: copy the models to each host with rsync, give all hosts one folder "
            "by NFS, or get them on each with hf download (docs/hosts.md)"
        )
    asks = options.listen or options.interface or options.nnodes != 1 or options.forwarded
    asked: AskedFor | None = machines("settings").parse(options) if asks else None
    return Serving(
        endpoint=endpoint,
        idle_timeout=_IdleTimeout(options.idle_timeout, 0.0 if asked else IDLE_TIMEOUT),
        spares=spares_asked(options.spares),
        machines=asked,
    )


def own_endpoint() -> Endpoint:
    """Return the endpoint of a backend on this machine.

    Raises:
        InvalidRequest: the environment names one on another machine.
    """
    endpoint = Endpoint.default()
    if endpoint.remote is not None:
        raise InvalidRequest(
            f"{env.BACKEND} names the backend at {endpoint.remote}: unset it to run one on this machine"
        )
    return endpoint


def serve(serving: Serving, *, quiet: bool = False) -> int:
    """Serve until stopped, and return the exit status.

    Raises:
        BackendError: the backend does not start.
    """
    try:
        supervisor = Supervisor(
            endpoint=serving.endpoint, idle_timeout=serving.idle_timeout, limits=Limits(spares=serving.spares),
            machines=serving.machines,
        )  # fmt: skip
    except BackendUnavailable as error:
        print(error, file=sys.stderr)
        return ALREADY_RUNS
    handlers = [supervisor.logs.handler(), *([] if quiet else [logging.StreamHandler()])]
    logging.basicConfig(level=env.LOG_LEVEL.get(), format="%(asctime)s supervisor: %(message)s", handlers=handlers)
    notes = passed_over(serving.endpoint), keep_compiled_code(serving.endpoint), *serving.advice
    for line in filter(None, notes):
        log.warning(line)
    supervisor.serve()
    return 0


def _detach(serving: Serving, options: argparse.Namespace) -> int:
    if serving.spares is not None:
        env.SPARES.set(str(serving.spares))  # the backend inherits it
    status = _status_of_started(serving)
    if other := _difference(status, serving, options):
        raise BackendUnavailable(f"a backend that {other} already runs: stop it first")
    print(f"the backend runs, pid {status.pid}" + (f", and listens at {status.listens}" if status.listens else ""))
    for line in serving.advice:
        print(line)
    return 0


def _status_of_started(serving: Serving) -> Status:
    for _ in range(STARTS):
        _connect(serving)
        with contextlib.suppress(
            BackendUnavailable
        ):  # it may still end, as where a port is in use: most new starts say why
            return query.status(serving.endpoint)
    return query.status(serving.endpoint)


def _connect(serving: Serving) -> None:
    connect_or_start(
        serving.endpoint, connect_seconds=query.ANSWER_TIMEOUT, start_seconds=START_TIMEOUT,
        idle_timeout=serving.idle_timeout(), options=serving.arguments,
    ).close()  # fmt: skip


def _difference(status: Status, serving: Serving, options: argparse.Namespace) -> str:
    """Return how the running backend differs from the options, as the end of a sentence; "" if it does not."""
    if serving.machines and (other := serving.machines.difference(status, options.listen)):
        return other
    if options.idle_timeout not in (None, status.idle_timeout):
        return f"ends after {status.idle_timeout:g} s without work" if status.idle_timeout else "never ends by itself"
    if options.spares not in (None, status.most_spares):
        kept = "as many spare ranks as fit" if status.most_spares is None else f"{status.most_spares} spare ranks"
        return f"keeps {kept}"
    return ""


def _seconds(text: str) -> float:
    try:
        return env.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more") from error


def _count(text: str) -> int:
    try:
        return env.count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or more") from error


def spares_asked(option: int | None) -> int | None:
    """Return the number of spare ranks from the option or the environment; None if neither sets it.

    Raises:
        InvalidRequest: the environment's value is not a number.
    """
    return env.SPARES.get() if option is None else option


class _IdleTimeout:
    """Returns the idle time as it is set now: what is chosen in ComfyUI's page reaches a backend that runs.

    Args:
        option: the command line's.
        default: without any setting.

    Raises:
        InvalidRequest: the environment's value is not a number.
    """

    def __init__(self, option: float | None, default: float) -> None:
        self._option, self._default = option, default
        self._last = self._read()

    def __call__(self) -> float:
        with contextlib.suppress(InvalidRequest):  # a file that cannot be read any more
            self._last = self._read()
        return self._last

    def _read(self) -> float:
        asked = env.IDLE_TIMEOUT.get() if self._option is None else self._option
        return self._default if asked is None else asked
