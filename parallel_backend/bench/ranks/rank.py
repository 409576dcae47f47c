"""One process of a peer: ``python -m parallel_backend.bench.ranks.rank``, started by ``team``.

The process reads one ``StepRequest`` at a time from a socket and replies with a ``Result``. It ends with its parent.
"""

import argparse
import os
import signal
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from ...processes import die_with_parent, pin_to_core_share
from .peers import BY_NAME

COLLECTIVE_PATIENCE = timedelta(minutes=5)
BUFFER = 1 << 16
LONGEST_TEXT = 200
"""Characters of an error message that are sent to the parent."""


class StepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one step.

    Attributes:
        inputs: safetensors file of the inputs.
        output: safetensors file for the prediction; if empty, nothing is saved and no bytes are counted.
    """

    inputs: str
    output: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's result.

    Attributes:
        seconds: from the ranks' barrier to the complete prediction.
        sent: bytes that this rank sent, if they were counted.
        error: what went wrong; empty if nothing did.
    """

    seconds: float = 0.0
    sent: int = 0
    error: str = ""


class Runner:
    """A peer's model on this rank."""

    def __init__(self, name: str, model: Path, store: Path) -> None:
        peer = BY_NAME[name]
        self.rank, self.ranks = int(os.environ["RANK"]), peer.ranks
        pin_to_core_share(self.rank, self.ranks)
        import torch
        import torch.distributed as dist

        from ...models import FAMILIES

        torch.set_num_threads(peer.threads)
        if peer.ranks > 1:
            dist.init_process_group(
                "gloo", f"file://{store}", COLLECTIVE_PATIENCE, world_size=peer.ranks, rank=self.rank
            )
        module = _module(model)
        self.family = FAMILIES[type(module).__name__](peer.prepare(module) if peer.prepare else module)

    def run(self, request: StepRequest) -> Result:
        """Run one step."""
        import torch
        from safetensors.torch import load_file, save_file

        inputs = load_file(request.inputs)
        with torch.inference_mode():
            if not request.output:
                return Result(seconds=self._step(inputs)[0])
            from ...distributed.sent_bytes import SentBytes

            with SentBytes() as sent:
                seconds, prediction = self._step(inputs)
        if self.rank == 0:
            save_file({"prediction": prediction.contiguous()}, request.output)
        return Result(seconds=seconds, sent=sent.total)

    def _step(self, inputs: Any) -> tuple[float, Any]:
        import torch.distributed as dist

        if self.ranks > 1:
            dist.barrier()
        start = perf_counter()
        prediction = self.family.stock(inputs)
        return perf_counter() - start, prediction


def _module(path: Path) -> Any:
    import diffusers

    config = msgspec.json.decode((path / "transformer" / "config.json").read_bytes())
    return getattr(diffusers, config["_class_name"]).from_pretrained(path / "transformer").eval()


def _caught(call: Callable[[], Result]) -> Result:
    """Return the result of a call, or its error in short; the full traceback goes to the log."""
    try:
        return call()
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:LONGEST_TEXT] or "no message"
        return Result(error=f"{type(error).__name__}: {text}")


def serve(create: Callable[[argparse.Namespace], Any], request_type: type[msgspec.Struct]) -> None:
    """Create a runner, then serve requests until the parent closes the socket.

    Args:
        create: makes the runner, whose ``run`` takes a request and returns a ``Result``, from the command line.
        request_type: type of the requests.
    """
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is for the parent to handle
    parser = argparse.ArgumentParser(description="A rank of a benchmark.")
    for name in ("--peer", "--model", "--store", "--link-fd"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    link = socket.socket(fileno=int(options.link_fd))
    runner: list[Any] = []

    def prepare() -> Result:
        runner.append(create(options))
        return Result()

    link.send(msgspec.json.encode(_caught(prepare)))
    while message := link.recv(BUFFER):
        request = msgspec.json.decode(message, type=request_type)
        link.send(msgspec.json.encode(_caught(partial(runner[0].run, request))))
    os._exit(0)  # skips the process group's shutdown, which could wait for a rank that is gone


if __name__ == "__main__":
    serve(lambda options: Runner(options.peer, Path(options.model), Path(options.store)), StepRequest)
