"""Manage the backend by hand: ``python -m parallel_backend --help``."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lab.bench import measurements
from lab.bench import options as bench
from lab.soak import options as soak
from lab.verify import options as verify

from . import env, serve
from .certificates import options as certificates
from .client import query
from .client.status_text import format_json, format_status
from .doctor import options as doctor
from .errors import BackendError, InvalidRequest
from .host import command as host
from .protocol.endpoint import Endpoint, passed_over


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
        metavar="serve | host | status | stop | logs | certificates | doctor | verify | soak | "
        "bench | bench-wire | bench-memory | bench-lora | bench-streaming | bench-recovery | bench-resume",
    )
    for command in _COMMANDS:
        added = commands.add_parser(command.name, help=command.help)
        command.add_arguments(added)
        added.set_defaults(run=command.run)
    return parser


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def _status(options: argparse.Namespace) -> int:
    endpoint = Endpoint.default()
    status, note = query.status(endpoint), passed_over(endpoint)
    print(format_json(status) if options.json else format_status(status))
    if note:
        print(note, file=sys.stderr)
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
        raise InvalidRequest(
            f"the logs are on {host}: run python -m parallel_backend logs there, without {env.BACKEND}"
        )
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
    from lab.soak.command import soak as run

    ledger = run(checked)
    print(ledger.as_json() if options.json else ledger)
    return 0 if ledger.passed else 1


def _bench(options: argparse.Namespace) -> int:
    from lab.bench import command

    return command.run(options)


def _verify(options: argparse.Namespace) -> int:
    from lab.verify import command

    return command.run(options)


_COMMANDS = (
    _Command(
        "serve", serve.run, serve.add_arguments,
        "run the backend (the first node that needs it starts it automatically)",
    ),
    _Command("host", host.run, host.add_arguments, "let a backend on another host run ranks on this host's devices"),
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
