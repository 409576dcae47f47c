"""Manage the backend by hand: ``python -m parallel_backend --help``."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

import msgspec

from .bench import options as bench
from .client import query
from .client.launch import ALREADY_RUNS, START_PATIENCE, connect_or_start
from .client.status_text import format_json, format_status
from .errors import BackendError, BackendUnavailable, InvalidRequest
from .protocol.endpoint import Endpoint
from .verify import options as verify

IDLE_TIMEOUT = 600.0
"""Seconds without work after which a backend ends, unless told otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except BackendError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m parallel_backend", description="Parallel DiT's backend.")
    commands = parser.add_subparsers(required=True, metavar="serve | status | stop | verify | bench | bench-wire")
    serve = commands.add_parser("serve", help="run the backend (the first node that needs it does this by itself)")
    serve.add_argument("--idle-timeout", type=_seconds, metavar="SECONDS", help="end without work; 0 is never")
    serve.add_argument("--detach", action="store_true", help="run in the background; returns when it answers")
    serve.set_defaults(run=_serve)
    status = commands.add_parser("status", help="show ranks, memory, models, layout and queue")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.set_defaults(run=_status)
    stop = commands.add_parser("stop", help="end the backend and all its ranks")
    stop.set_defaults(run=_stop)
    pipe = commands.add_parser("bench-wire", help="measure how fast requests and pixels travel")
    pipe.add_argument("--megabytes", type=int, default=900, help="size of the large reply (default %(default)s)")
    pipe.add_argument("--json", action="store_true", help="as JSON")
    pipe.set_defaults(run=_bench_wire)
    step = commands.add_parser("bench", help="time a denoiser step under layouts, against one process and peers")
    bench.add_arguments(step)
    step.set_defaults(run=_bench)
    checked = commands.add_parser("verify", help="hold families and layouts to diffusers' own forward")
    verify.add_arguments(checked)
    checked.set_defaults(run=_verify)
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return seconds


def _idle_timeout(given: float | None) -> float:
    if given is not None:
        return given
    text = os.environ.get("PARALLEL_DIT_IDLE_TIMEOUT")
    try:
        return _seconds(text) if text else IDLE_TIMEOUT
    except argparse.ArgumentTypeError as error:
        raise InvalidRequest(f"PARALLEL_DIT_IDLE_TIMEOUT: {error}") from error


def _serve(options: argparse.Namespace) -> int:
    endpoint, idle_timeout = Endpoint.default(), _idle_timeout(options.idle_timeout)
    if options.detach:
        connect_or_start(
            endpoint, connect_seconds=query.PATIENCE, start_seconds=START_PATIENCE, idle_timeout=idle_timeout
        ).close()
        print(f"backend runs, pid {query.status(endpoint).pid}")
        return 0
    from .supervisor.supervisor import Supervisor

    logging.basicConfig(level=logging.INFO, format="%(asctime)s supervisor: %(message)s")
    try:
        supervisor = Supervisor(endpoint=endpoint, idle_timeout=idle_timeout)
    except BackendUnavailable as error:
        print(error, file=sys.stderr)
        return ALREADY_RUNS
    supervisor.serve()
    return 0


def _status(options: argparse.Namespace) -> int:
    status = query.status(Endpoint.default())
    print(format_json(status) if options.json else format_status(status))
    return 0


def _stop(options: argparse.Namespace) -> int:
    query.stop(Endpoint.default())
    print("stopped")
    return 0


def _bench_wire(options: argparse.Namespace) -> int:
    from .bench.wire import measure_alone

    measured = measure_alone(pixels=options.megabytes * 250_000)
    print(msgspec.json.encode(measured).decode() if options.json else measured.describe())
    return 0


def _bench(options: argparse.Namespace) -> int:
    from .bench import command

    return command.run(options)


def _verify(options: argparse.Namespace) -> int:
    from .verify import command

    return command.run(options)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every with block is left in order
    sys.exit(main())
