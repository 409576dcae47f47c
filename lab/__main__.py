"""Measure and compare: ``python -m lab --help``. It needs a checkout, since the product does not install it."""

import argparse
import importlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, Protocol, cast

from lab.engine import lab_ranks
from parallel_backend.errors import BackendError


class Module(Protocol):
    """The functions of a command's module.

    Attributes:
        add_arguments: adds the command's options to its parser.
        run: runs it and returns the exit status.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class Command(NamedTuple):
    """One command.

    Attributes:
        module: its ``Module``. Imported only for this command, since most import torch.
        help: a description for the list of commands.
    """

    module: str
    help: str


COMMANDS = {
    "bench": Command("bench.command", "time a step in several layouts, against one process and other projects"),
    "bench wire": Command("bench.wire", "measure how fast requests and pixels are transferred"),
    "bench memory": Command("bench.memory", "measure the memory that a model file takes on two ranks"),
    "bench compiled": Command("bench.compiled", "measure what compiled blocks save of a step"),
    "bench lora": Command("bench.lora", "measure what a LoRA costs in a step"),
    "bench streaming": Command("bench.streaming", "measure what a step costs whose blocks stream"),
    "bench recovery": Command("bench.recovery", "measure how long a prompt takes after a rank died"),
    "bench resume": Command("bench.resume", "measure what it costs to keep what a run goes on from"),
    "bench cache": Command("bench.cache", "measure what a step cache saves of a step loop"),
    "bench cache-peers": Command("bench.cache_peers", "compare step caches with cache-dit's"),
    "bench host": Command("bench.host", "measure what the host does for a layer and a step beside the model"),
    "bench projections": Command("bench.projections.command", "time ways to exchange tokens for heads"),
    "bench unequal": Command("bench.unequal", "measure what shares by speed gain where one rank is slower"),
    "bench relayout": Command("bench.relayout", "measure what another layout costs beside loading the model for it"),
    "bench sent": Command("bench.sent", "compute the bytes that a rank sends in a step of published models"),
    "bench text": Command("bench.text_layers", "measure what layers for the prompt take beside a step"),
    "bench prompt": Command("bench.whole_prompt.command", "time a whole prompt in ComfyUI, and where its time goes"),
    "plan published": Command("planner.published", "compare the planner's predictions with published results"),
    "plan measured": Command("planner.cells", "time some layouts here, beside what the planner predicts"),
    "soak": Command("soak.command", "make random prompts and faults, and tell what came of them"),
    "verify": Command("verify.command", "compare families, layouts, step loops and VAEs with diffusers' own"),
    "memory": Command("memory", "measure ComfyUI's own memory with a large model file"),
    "room": Command("room", "tell what two cards hold of published model files: docs/room.md"),
    "working-memory": Command("working_memory", "measure the tables of parallel_backend/engine/working_memory.py"),
    "synchronisations": Command("synchronisations", "count where the host waits for the GPU: docs/synchronisations.md"),
    "gpu-check": Command("gpu_check.start", "try on real GPUs what tests only on CPU ranks elsewhere"),
}
"""By name, in the order in which ``--help`` lists them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((name for name in (" ".join(arguments[:2]), *arguments[:1]) if name in COMMANDS), None)
    if name is None:
        _refuse(arguments)
    command = COMMANDS[name]
    module = cast(Module, importlib.import_module(f"lab.{command.module}"))
    parser = argparse.ArgumentParser(
        prog=f"python -m lab {name}", description=command.help, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.add_arguments(parser)
    options = parser.parse_args(arguments[len(name.split()) :])
    try:
        with lab_ranks():
            return module.run(options)
    except BackendError as error:
        print(error, file=sys.stderr)
        return 1


def _refuse(arguments: Sequence[str]) -> NoReturn:
    """Show all commands, or refuse an unknown command, and exit."""
    commands = "\n".join(f"  {name:18}{command.help}" for name, command in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m lab", description=f"Measure and compare. The commands:\n{commands}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS)
    parser.parse_args(arguments[:1])
    raise SystemExit(2)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every with block exits cleanly
    sys.exit(main())
