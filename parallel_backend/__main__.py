"""Manage the backend by hand: ``python -m parallel_backend --help``."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from . import env, serve
from .client import query
from .client.status_text import format_json, format_requests, format_status
from .doctor import options as doctor
from .errors import BackendError, InvalidRequest
from .planner import options as planner
from .protocol.endpoint import Endpoint, passed_over
from .verify import options as verify
from .version import version


def run() -> int:
    """Run the command of this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every with block exits cleanly
    return main()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        _check_moved(arguments[:1])
        options = _parser(arguments).parse_args(arguments)
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


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of these words. Only a command that is named imports what its options need."""
    parser = argparse.ArgumentParser(prog="python -m parallel_backend", description="The backend of Parallel DiT.")
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(
        required=True,
        metavar="serve | host | status | stop | logs | certificates | doctor | verify | plan | make-parallel",
    )
    for command in _COMMANDS:
        added = commands.add_parser(command.name, help=command.help)
        if command.name in words:
            command.add_arguments(added)
        added.set_defaults(run=command.run)
    return parser


class _ShowVersion(argparse.Action):
    """Prints the version, which is read only where it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print("parallel-dit", version())
        parser.exit()


def _check_moved(command: Sequence[str]) -> None:
    """Say where measurements are, which are no part of the product."""
    for name in command:
        if name.partition("-")[0] in ("bench", "soak"):
            raise InvalidRequest(f"{name} is in the checkout alone: run python -m lab {name.replace('-', ' ')} there")


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
    from .protocol.request_log import read

    endpoint = Endpoint.default()
    if endpoint.remote is not None:
        host = endpoint.remote.place
        raise InvalidRequest(
            f"the logs are on {host}: run python -m parallel_backend logs there, without {env.BACKEND}"
        )
    try:
        lines = list(read(endpoint.request_log))[-options.last :] if options.last > 0 else []
    except OSError as error:
        raise InvalidRequest(f"{endpoint.request_log} cannot be read: {error.strerror}") from error
    print(endpoint.logs)
    print(format_requests(lines) if lines else "no requests yet")
    return 0


def _add_host(parser: argparse.ArgumentParser) -> None:
    from .machines.nodes import command

    command.add_arguments(parser)


def _host(options: argparse.Namespace) -> int:
    from .machines.nodes import command

    return command.run(options)


def _add_certificates(parser: argparse.ArgumentParser) -> None:
    from .machines.certificates import options as certificates

    certificates.add_arguments(parser)


def _certificates(options: argparse.Namespace) -> int:
    from .machines.certificates import options as certificates

    return certificates.run(options)


def _doctor(options: argparse.Namespace) -> int:
    from .doctor import command

    return command.run(options)


def _add_make_parallel(parser: argparse.ArgumentParser) -> None:
    from .make_parallel import command

    command.add_arguments(parser)


def _make_parallel(options: argparse.Namespace) -> int:
    from .make_parallel import command

    return command.run(options)


def _verify(options: argparse.Namespace) -> int:
    from .verify import command

    return command.run(options)


def _plan(options: argparse.Namespace) -> int:
    from .planner import command

    return command.run(options)


_COMMANDS = (
    _Command(
        "serve", serve.run, serve.add_arguments,
        "run the backend (the first node that needs it starts it automatically)",
    ),
    _Command("host", _host, _add_host, "let a backend on another host run ranks on this host's devices"),
    _Command("status", _status, _add_status, "show ranks, memory, models, layout and queue"),
    _Command("stop", _stop, _add_nothing, "stop the backend and all its ranks"),
    _Command("logs", _logs, _add_logs, "show the folder of the logs, and the last requests"),
    _Command(
        "certificates", _certificates, _add_certificates,
        "make the certificates with which other machines connect to this one",
    ),
    _Command("doctor", _doctor, doctor.add_arguments, "check this machine and this installation, and say what to do"),
    _Command("verify", _verify, verify.add_arguments, "compare a checkpoint in many layouts with diffusers' forward"),
    _Command("plan", _plan, planner.add_arguments, "predict a prompt in each layout, and say which is the fastest"),
    _Command(
        "make-parallel", _make_parallel, _add_make_parallel,
        "put Parallel Model and Parallel VAE behind every loader of a workflow",
    ),
)  # fmt: skip
"""In the order in which ``--help`` lists them."""

if __name__ == "__main__":
    sys.exit(run())
