"""Manage the backend by hand: ``python -m parallel_backend --help``."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .bench import measurements
from .bench import options as bench
from .certificates import options as certificates
from .client import query
from .client.launch import ALREADY_RUNS, START_TIMEOUT, connect_or_start
from .client.status_text import format_json, format_status
from .doctor import options as doctor
from .errors import BackendError, BackendUnavailable, InvalidRequest
from .protocol.address import Address
from .protocol.endpoint import REMOTE, Endpoint
from .soak import options as soak
from .verify import options as verify

if TYPE_CHECKING:
    from .supervisor.gateway_process import Listening

IDLE_TIMEOUT = 600.0
"""Default for the seconds without work after which a backend ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except BackendError as error:
        print(error, file=sys.stderr)
        return 1


class _Command(NamedTuple):
    """One command.

    Attributes:
        name: its name.
        run: runs it and returns the exit status.
        add_arguments: adds its options to its parser.
        help: what it does.
    """

    name: str
    run: Callable[[argparse.Namespace], int]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    help: str


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m parallel_backend", description="The backend of Parallel DiT.")
    commands = parser.add_subparsers(
        required=True,
        metavar="serve | status | stop | logs | certificates | doctor | verify | soak | "
        "bench | bench-wire | bench-memory | bench-lora | bench-streaming | bench-recovery | bench-resume",
    )
    for command in _COMMANDS:
        added = commands.add_parser(command.name, help=command.help)
        command.add_arguments(added)
        added.set_defaults(run=command.run)
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or more")
    return int(text)


def _spares(option: int | None) -> int | None:
    text = os.environ.get("PARALLEL_DIT_SPARES")
    try:
        return _count(text) if option is None and text else option
    except argparse.ArgumentTypeError as error:
        raise InvalidRequest(f"PARALLEL_DIT_SPARES: {error}") from error


def _idle_timeout(option: float | None, default: float | None) -> float:
    if option is not None:
        return option
    text = os.environ.get("PARALLEL_DIT_IDLE_TIMEOUT")
    try:
        return _seconds(text) if text else IDLE_TIMEOUT if default is None else default
    except argparse.ArgumentTypeError as error:
        raise InvalidRequest(f"PARALLEL_DIT_IDLE_TIMEOUT: {error}") from error


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--idle-timeout", type=_seconds, metavar="SECONDS", help="idle time after which it ends; 0 means never"
    )
    parser.add_argument(
        "--spares", type=_count, metavar="N",
        help="number of spare ranks, which take the place of dead ones; 0 for none (default: as many as there are "
        "ranks, if they take little of the machine's memory)",
    )  # fmt: skip
    parser.add_argument(
        "--listen", metavar="ADDRESS:PORT",
        help="let other machines connect here, with TLS and certificates; the backend then runs until it is stopped, "
        "unless an idle time is given",
    )  # fmt: skip
    parser.add_argument("--detach", action="store_true", help="run in the background; return once the backend answers")
    parser.add_argument("--quiet", action="store_true", help="log to the log folder alone, not to stderr as well")


def _listening(text: str | None) -> "Listening | None":
    """Where to listen for other machines, once its certificates are known to be usable."""
    if text is None:
        return None
    from .protocol.tls import Credentials, default_folder
    from .supervisor.gateway_process import Listening

    address, folder = Address.parse(text, what="--listen"), default_folder()
    Credentials.of_server(folder).server_context()
    return Listening(address=address, certificates=folder)


def _serve_detached(endpoint: Endpoint, idle_timeout: float, spares: int | None, listen: str | None) -> int:
    if spares is not None:
        os.environ["PARALLEL_DIT_SPARES"] = str(spares)  # the backend inherits it
    connect_or_start(
        endpoint, connect_seconds=query.ANSWER_TIMEOUT, start_seconds=START_TIMEOUT, idle_timeout=idle_timeout,
        options=("--listen", listen) if listen else (),
    ).close()  # fmt: skip
    status = query.status(endpoint)
    if listen and not status.listens:
        raise BackendUnavailable("a backend that does not listen for other machines already runs: stop it first")
    print(f"the backend runs, pid {status.pid}" + (f", and listens at {status.listens}" if status.listens else ""))
    return 0


def _serve(options: argparse.Namespace) -> int:
    endpoint, idle_timeout = Endpoint.default(), _idle_timeout(options.idle_timeout, 0.0 if options.listen else None)
    if endpoint.remote is not None:
        raise InvalidRequest(f"{REMOTE} names the backend at {endpoint.remote}: unset it to run one on this machine")
    spares, listening = _spares(options.spares), _listening(options.listen)
    if options.detach:
        return _serve_detached(endpoint, idle_timeout, spares, options.listen)
    from .supervisor.limits import Limits
    from .supervisor.supervisor import Supervisor

    try:
        supervisor = Supervisor(
            endpoint=endpoint, idle_timeout=idle_timeout, limits=Limits(spares=spares), listening=listening
        )
    except BackendUnavailable as error:
        print(error, file=sys.stderr)
        return ALREADY_RUNS
    handlers = [supervisor.logs.handler(), *([] if options.quiet else [logging.StreamHandler()])]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s supervisor: %(message)s", handlers=handlers)
    supervisor.serve()
    return 0


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _status(options: argparse.Namespace) -> int:
    status = query.status(Endpoint.default())
    print(format_json(status) if options.json else format_status(status))
    return 0


def _add_nothing(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def _stop(options: argparse.Namespace) -> int:
    query.stop(Endpoint.default())
    print("stopped")
    return 0


def _add_logs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--last", type=int, default=20, metavar="N", help="requests to show (default %(default)s)")


def _logs(options: argparse.Namespace) -> int:
    from .client.request_table import format_table
    from .protocol.request_log import read

    endpoint = Endpoint.default()
    if endpoint.remote is not None:
        host = endpoint.remote.host
        raise InvalidRequest(f"the logs are on {host}: run python -m parallel_backend logs there, without {REMOTE}")
    try:
        lines = list(read(endpoint.request_log))[-options.last :] if options.last > 0 else []
    except OSError as error:
        raise InvalidRequest(f"{endpoint.request_log} cannot be read: {error.strerror}") from error
    print(endpoint.logs)
    print(format_table(lines) if lines else "no requests yet")
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import command

    return command.run(options)


def _soak(options: argparse.Namespace) -> int:
    checked = soak.parse(options)
    from .soak.command import soak as run

    ledger = run(checked)
    print(ledger.as_json() if options.json else ledger)
    return 0 if ledger.passed else 1


def _bench(options: argparse.Namespace) -> int:
    from .bench import command

    return command.run(options)


def _verify(options: argparse.Namespace) -> int:
    from .verify import command

    return command.run(options)


_COMMANDS = (
    _Command(
        "serve", _serve, _add_serve, "run the backend (the first node that needs it starts it automatically)"
    ),
    _Command("status", _status, _add_status, "show ranks, memory, models, layout and queue"),
    _Command("stop", _stop, _add_nothing, "stop the backend and all its ranks"),
    _Command("logs", _logs, _add_logs, "show the folder of the logs, and the last requests"),
    _Command(
        "certificates", certificates.run, certificates.add_arguments,
        "make the certificates with which other machines connect to this one",
    ),
    _Command("doctor", _doctor, doctor.add_arguments, "check this machine and this installation, and say what to do"),
    _Command(
        "bench-wire", measurements.wire, measurements.add_wire, "measure how fast requests and pixels are transferred"
    ),
    _Command(
        "bench-memory", measurements.memory, measurements.add_memory,
        "measure the memory that a model file takes on two ranks",
    ),
    _Command("bench-lora", measurements.lora, measurements.add_lora, "measure what a LoRA costs in a step"),
    _Command(
        "bench-streaming", measurements.streaming, measurements.add_streaming,
        "measure what a step costs whose blocks stream",
    ),
    _Command("soak", _soak, soak.add_arguments, "make random prompts and faults, and tell what came of them"),
    _Command(
        "bench-recovery", measurements.recovery, measurements.add_recovery,
        "measure how long a prompt takes after a rank died",
    ),
    _Command(
        "bench-resume", measurements.resume, measurements.add_resume,
        "measure what it costs to keep what a run goes on from",
    ),
    _Command(
        "bench", _bench, bench.add_arguments,
        "time a denoiser step in several layouts, against one process and against other projects",
    ),
    _Command("verify", _verify, verify.add_arguments, "compare families and layouts with diffusers' own forward"),
)  # fmt: skip
"""In the order in which ``--help`` lists them."""

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every with block exits cleanly
    sys.exit(main())
