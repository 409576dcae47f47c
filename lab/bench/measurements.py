"""The commands ``bench-wire``, ``bench-memory``, ...: each measures one thing on a backend of its own.

Their options are kept apart from the modules that import torch.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import msgspec

from parallel_backend.client import devices


def add_wire(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench-wire``."""
    parser.add_argument("--megabytes", type=int, default=900, help="size of the large reply (default %(default)s)")
    _add_common(parser)


def wire(options: argparse.Namespace) -> int:
    """Measure how fast requests and pixels are transferred; return the exit status, as all of these do."""
    from .wire import measure_alone

    measured = measure_alone(devices_text=options.devices, pixels=options.megabytes * 250_000)
    print(msgspec.json.encode(measured).decode() if options.json else measured.describe())
    return 0


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench-memory``."""
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the file (default %(default)g)")
    parser.add_argument(
        "--format", choices=("plain", "fp8", "int8", "mxfp8", "nvfp4", "gguf"), default="plain",
        help="how its weights are stored (default %(default)s, which is fp32)",
    )  # fmt: skip
    _add_common(parser)


def memory(options: argparse.Namespace) -> int:
    """Measure the memory that a model file takes on two ranks."""
    from .memory import measure

    return _print_results(measure(options.gigabytes, options.format, options.devices), as_json=options.json)


def add_lora(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench-lora``."""
    parser.add_argument("--rounds", type=int, default=9, help="pairs of steps (default %(default)s)")
    _add_common(parser)


def lora(options: argparse.Namespace) -> int:
    """Measure what a LoRA costs in a step."""
    from .lora import measure

    return _print_results(measure(options.rounds, options.devices), as_json=options.json)


def add_streaming(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench-streaming``."""
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the model (default %(default)g)")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each kind (default %(default)s)")
    _add_common(parser)


def streaming(options: argparse.Namespace) -> int:
    """Measure what a step costs whose blocks stream."""
    from .streaming import measure

    return _print_results(iter([measure(options.gigabytes, options.rounds, options.devices)]), as_json=options.json)


def add_recovery(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench-recovery``."""
    parser.add_argument("--rounds", type=int, default=3, help="backends of each kind (default %(default)s)")
    _add_common(parser)


def recovery(options: argparse.Namespace) -> int:
    """Measure how long a prompt takes after a rank died."""
    from .recovery import describe, measure

    results = measure(options.rounds, options.devices)
    print(msgspec.json.encode(results).decode() if options.json else describe(*results))
    return int(any(result.failed for result in results))


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench-resume``."""
    parser.add_argument("--rounds", type=int, default=15, help="pairs of runs (default %(default)s)")
    _add_common(parser)


def resume(options: argparse.Namespace) -> int:
    """Measure what it costs to keep what a run goes on from."""
    from .kept_state import measure

    return _print_results(iter([measure(options.rounds, options.devices)]), as_json=options.json)


def _add_common(parser: argparse.ArgumentParser) -> None:
    devices.add_option(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _print_results(measured: Iterator[Any], *, as_json: bool) -> int:
    results = []
    for result in measured:
        results.append(result)
        if not as_json:
            print(result.describe(), flush=True)
    if as_json:
        print(msgspec.json.encode(results).decode())
    return int(any(result.failed for result in results))
