"""One process of a peer: ``python -m parallel_backend.bench.ranks.rank``, started by ``team``, ended with its parent.

It takes a ``Turn`` at a time from a socket and answers each with what it took.
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

from ...processes import die_with_parent, stay_on_own_cores
from .peers import BY_NAME

COLLECTIVE_PATIENCE = timedelta(minutes=5)
BUFFER = 1 << 16
LONGEST_TEXT = 200
"""Characters of an error that are passed on."""


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A step with the inputs of a file; ``output`` is where to leave the prediction and counts bytes, unless empty."""

    inputs: str
    output: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds from the ranks' meeting to the whole prediction, and bytes that were sent; or what went wrong."""

    seconds: float = 0.0
    sent: int = 0
    error: str = ""


class Runner:
    """A peer's model on this rank."""

    def __init__(self, peer: str, model: Path, store: Path) -> None:
        chosen = BY_NAME[peer]
        self.rank, self.ranks = int(os.environ["RANK"]), chosen.ranks
        stay_on_own_cores(self.rank, self.ranks)
        import torch
        import torch.distributed as dist

        from ...models import FAMILIES

        torch.set_num_threads(chosen.threads)
        if chosen.ranks > 1:
            dist.init_process_group(
                "gloo", f"file://{store}", COLLECTIVE_PATIENCE, world_size=chosen.ranks, rank=self.rank
            )
        module = _module(model)
        family = FAMILIES[type(module).__name__]
        self.family = family(chosen.prepare(module) if chosen.prepare else module)

    def run(self, turn: Turn) -> Answer:
        """One step."""
        import torch
        from safetensors.torch import load_file, save_file

        inputs = load_file(turn.inputs)
        with torch.inference_mode():
            if not turn.output:
                return Answer(seconds=self._step(inputs)[0])
            from ...distributed.sent_bytes import SentBytes

            with SentBytes() as sent:
                seconds, prediction = self._step(inputs)
        if self.rank == 0:
            save_file({"prediction": prediction.contiguous()}, turn.output)
        return Answer(seconds=seconds, sent=sent.total)

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


def _tried(work: Callable[[], Answer]) -> Answer:
    """What comes of it, or the error, which goes to the log as a whole."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:LONGEST_TEXT] or "no message"
        return Answer(error=f"{type(error).__name__}: {text}")


def serve(kind: Callable[[argparse.Namespace], Any], turns: type[msgspec.Struct]) -> None:
    """Make what answers, then take turns until the other end closes."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is the parent's
    parser = argparse.ArgumentParser(description="A rank of a benchmark.")
    for name in ("--peer", "--model", "--store", "--link-fd"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    link = socket.socket(fileno=int(options.link_fd))
    runner: list[Any] = []

    def prepare() -> Answer:
        runner.append(kind(options))
        return Answer()

    link.send(msgspec.json.encode(_tried(prepare)))
    while message := link.recv(BUFFER):
        turn = msgspec.json.decode(message, type=turns)
        link.send(msgspec.json.encode(_tried(partial(runner[0].run, turn))))
    os._exit(0)  # without the group's own farewell, for which the other rank may be missing


if __name__ == "__main__":
    serve(lambda options: Runner(options.peer, Path(options.model), Path(options.store)), Turn)
