"""Manage the backend by hand: ``python -m parallel_backend --help``."""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from .bench import options as bench
from .client import devices, query
from .client.launch import ALREADY_RUNS, START_TIMEOUT, connect_or_start
from .client.status_text import format_json, format_status
from .doctor import options as doctor
from .errors import BackendError, BackendUnavailable, InvalidRequest
from .protocol.endpoint import Endpoint
from .soak import options as soak
from .verify import options as verify

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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m parallel_backend", description="The backend of Parallel DiT.")
    commands = parser.add_subparsers(
        required=True,
        metavar="serve | status | stop | logs | doctor | verify | soak | "
        "bench | bench-wire | bench-memory | bench-lora | bench-streaming | bench-recovery",
    )
    serve = commands.add_parser("serve", help="run the backend (the first node that needs it starts it automatically)")
    serve.add_argument(
        "--idle-timeout", type=_seconds, metavar="SECONDS", help="idle time after which it ends; 0 means never"
    )
    serve.add_argument(
        "--spares", type=_count, metavar="N",
        help="number of spare ranks, which take the place of dead ones; 0 for none (default: as many as there are "
        "ranks, if they take little of the machine's memory)",
    )  # fmt: skip
    serve.add_argument("--detach", action="store_true", help="run in the background; return once the backend answers")
    serve.add_argument("--quiet", action="store_true", help="log to the log folder alone, not to stderr as well")
    serve.set_defaults(run=_serve)
    status = commands.add_parser("status", help="show ranks, memory, models, layout and queue")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(run=_status)
    stop = commands.add_parser("stop", help="stop the backend and all its ranks")
    stop.set_defaults(run=_stop)
    logs = commands.add_parser("logs", help="show the folder of the logs, and the last requests")
    logs.add_argument("--last", type=int, default=20, metavar="N", help="requests to show (default %(default)s)")
    logs.set_defaults(run=_logs)
    examiner = commands.add_parser("doctor", help="check this machine and this installation, and say what to do")
    doctor.add_arguments(examiner)
    examiner.set_defaults(run=_doctor)
    wire_bench = commands.add_parser("bench-wire", help="measure how fast requests and pixels are transferred")
    wire_bench.add_argument("--megabytes", type=int, default=900, help="size of the large reply (default %(default)s)")
    devices.add_option(wire_bench)
    wire_bench.add_argument("--json", action="store_true", help="print JSON")
    wire_bench.set_defaults(run=_bench_wire)
    memory_bench = commands.add_parser("bench-memory", help="measure the memory that a model file takes on two ranks")
    memory_bench.add_argument("--gigabytes", type=float, default=4.0, help="size of the file (default %(default)g)")
    memory_bench.add_argument(
        "--format", choices=("plain", "fp8", "int8", "mxfp8", "nvfp4", "gguf"), default="plain",
        help="how its weights are stored (default %(default)s, which is fp32)",
    )  # fmt: skip
    devices.add_option(memory_bench)
    memory_bench.add_argument("--json", action="store_true", help="print JSON")
    memory_bench.set_defaults(run=_bench_memory)
    lora_bench = commands.add_parser("bench-lora", help="measure what a LoRA costs in a step")
    lora_bench.add_argument("--rounds", type=int, default=9, help="pairs of steps (default %(default)s)")
    devices.add_option(lora_bench)
    lora_bench.add_argument("--json", action="store_true", help="print JSON")
    lora_bench.set_defaults(run=_bench_lora)
    streaming_bench = commands.add_parser("bench-streaming", help="measure what a step costs whose blocks stream")
    streaming_bench.add_argument("--gigabytes", type=float, default=1.0, help="size of the model (default %(default)g)")
    streaming_bench.add_argument("--rounds", type=int, default=7, help="steps of each kind (default %(default)s)")
    devices.add_option(streaming_bench)
    streaming_bench.add_argument("--json", action="store_true", help="print JSON")
    streaming_bench.set_defaults(run=_bench_streaming)
    soak_parser = commands.add_parser("soak", help="make random prompts and faults, and tell what came of them")
    soak.add_arguments(soak_parser)
    soak_parser.set_defaults(run=_soak)
    recovery_bench = commands.add_parser("bench-recovery", help="measure how long a prompt takes after a rank died")
    recovery_bench.add_argument("--rounds", type=int, default=3, help="backends of each kind (default %(default)s)")
    devices.add_option(recovery_bench)
    recovery_bench.add_argument("--json", action="store_true", help="print JSON")
    recovery_bench.set_defaults(run=_bench_recovery)
    step_bench = commands.add_parser(
        "bench", help="time a denoiser step in several layouts, against one process and against other projects"
    )
    bench.add_arguments(step_bench)
    step_bench.set_defaults(run=_bench)
    verifier = commands.add_parser("verify", help="compare families and layouts with diffusers' own forward")
    verify.add_arguments(verifier)
    verifier.set_defaults(run=_verify)
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


def _idle_timeout(option: float | None) -> float:
    if option is not None:
        return option
    text = os.environ.get("PARALLEL_DIT_IDLE_TIMEOUT")
    try:
        return _seconds(text) if text else IDLE_TIMEOUT
    except argparse.ArgumentTypeError as error:
        raise InvalidRequest(f"PARALLEL_DIT_IDLE_TIMEOUT: {error}") from error


def _serve_detached(endpoint: Endpoint, idle_timeout: float, spares: int | None) -> int:
    if spares is not None:
        os.environ["PARALLEL_DIT_SPARES"] = str(spares)  # the backend inherits it
    connect_or_start(
        endpoint, connect_seconds=query.ANSWER_TIMEOUT, start_seconds=START_TIMEOUT, idle_timeout=idle_timeout
    ).close()
    print(f"the backend runs, pid {query.status(endpoint).pid}")
    return 0


def _serve(options: argparse.Namespace) -> int:
    endpoint, idle_timeout = Endpoint.default(), _idle_timeout(options.idle_timeout)
    spares = _spares(options.spares)
    if options.detach:
        return _serve_detached(endpoint, idle_timeout, spares)
    from .supervisor.limits import Limits
    from .supervisor.supervisor import Supervisor

    try:
        supervisor = Supervisor(endpoint=endpoint, idle_timeout=idle_timeout, limits=Limits(spares=spares))
    except BackendUnavailable as error:
        print(error, file=sys.stderr)
        return ALREADY_RUNS
    handlers = [supervisor.logs.handler(), *([] if options.quiet else [logging.StreamHandler()])]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s supervisor: %(message)s", handlers=handlers)
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


def _logs(options: argparse.Namespace) -> int:
    from .client.request_table import format_table
    from .protocol.request_log import read

    endpoint = Endpoint.default()
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


def _bench_wire(options: argparse.Namespace) -> int:
    from .bench.wire import measure_alone

    measured = measure_alone(devices_text=options.devices, pixels=options.megabytes * 250_000)
    print(msgspec.json.encode(measured).decode() if options.json else measured.describe())
    return 0


def _bench_memory(options: argparse.Namespace) -> int:
    from .bench.memory import measure

    return _print_results(measure(options.gigabytes, options.format, options.devices), as_json=options.json)


def _bench_lora(options: argparse.Namespace) -> int:
    from .bench.lora import measure

    return _print_results(measure(options.rounds, options.devices), as_json=options.json)


def _bench_streaming(options: argparse.Namespace) -> int:
    from .bench.streaming import measure

    return _print_results(iter([measure(options.gigabytes, options.rounds, options.devices)]), as_json=options.json)


def _soak(options: argparse.Namespace) -> int:
    checked = soak.parse(options)
    from .soak.command import soak as run

    ledger = run(checked)
    print(ledger.as_json() if options.json else ledger)
    return 0 if ledger.passed else 1


def _bench_recovery(options: argparse.Namespace) -> int:
    from .bench.recovery import describe, measure

    results = measure(options.rounds, options.devices)
    print(msgspec.json.encode(results).decode() if options.json else describe(*results))
    return int(any(result.failed for result in results))


def _print_results(measured: Iterator[Any], *, as_json: bool) -> int:
    results = []
    for result in measured:
        results.append(result)
        if not as_json:
            print(result.describe(), flush=True)
    if as_json:
        print(msgspec.json.encode(results).decode())
    return int(any(result.failed for result in results))


def _bench(options: argparse.Namespace) -> int:
    from .bench import command

    return command.run(options)


def _verify(options: argparse.Namespace) -> int:
    from .verify import command

    return command.run(options)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every with block exits cleanly
    sys.exit(main())
