"""One process of a peer: ``python -m lab.bench.ranks.rank``, started by ``team``.

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
from typing import TYPE_CHECKING, Any

import msgspec

from parallel_backend.processes import die_with_parent, pin_to_core_share

from .peers import BY_NAME

if TYPE_CHECKING:
    import torch

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
        error: what went wrong; empty on success.
    """

    seconds: float = 0.0
    sent: int = 0
    error: str = ""


class Runner:
    """A peer's model on this rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        peer = BY_NAME[options.peer]
        self.rank, self.ranks = int(os.environ["RANK"]), peer.ranks
        self.device = start(options, threads=peer.threads)
        from parallel_backend.families.registry import family_of

        module = _module(Path(options.model), options.dtype, self.device)
        self.family = family_of(type(module).__name__)(peer.prepare(module) if peer.prepare else module)

    def run(self, request: StepRequest) -> Result:
        """Run one step."""
        import torch
        from safetensors.torch import load_file, save_file

        inputs = {name: tensor.to(self.device) for name, tensor in load_file(request.inputs).items()}
        with torch.inference_mode():
            if not request.output:
                return Result(seconds=self._step(inputs)[0])
            from parallel_backend.distributed.sent_bytes import SentBytes

            with SentBytes() as sent:
                seconds, prediction = self._step(inputs)
        if self.rank == 0:
            save_file({"prediction": prediction.cpu().contiguous()}, request.output)
        return Result(seconds=seconds, sent=sent.total)

    def _step(self, inputs: Any) -> tuple[float, Any]:
        import torch.distributed as dist

        from parallel_backend.distributed.rank_speeds import synchronize

        synchronize(self.device)
        if self.ranks > 1:
            dist.barrier()
        begin = perf_counter()
        prediction = self.family.stock(inputs)
        synchronize(self.device)
        return perf_counter() - begin, prediction


def start(options: argparse.Namespace, *, threads: int, eager: bool = False) -> "torch.device":
    """Select this rank's device and, if there are several ranks, join their process group; return the device.

    Args:
        options: the command line.
        threads: of the CPU.
        eager: see ``process_group.join``. It does not work with groups of only gloo, which other projects make.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.device == "cpu":
        pin_to_core_share(rank, ranks)
    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    from parallel_backend.distributed import process_group

    torch.set_num_threads(threads)
    device = torch.device(options.device)
    if ranks > 1:
        store = FileStore(options.store, ranks)
        process_group.join(
            device, options.collectives, store, rank=rank, world_size=ranks, timeout=COLLECTIVE_PATIENCE,
            eager=eager,
        )  # fmt: skip
    elif device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _module(path: Path, dtype: str, device: "torch.device") -> Any:
    import torch

    from parallel_backend.checkpoint.opening import open_checkpoint
    from parallel_backend.families.modules import module_class_of
    from parallel_backend.loading.load import load_whole

    checkpoint = open_checkpoint(path)
    module_class = module_class_of(checkpoint.components["transformer"])
    return load_whole(module_class, checkpoint, "transformer", device, getattr(torch, dtype))


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles a Ctrl-C at the terminal
    parser = argparse.ArgumentParser(description="A rank of a benchmark.")
    for name in ("--peer", "--model", "--store", "--link-fd", "--device", "--collectives", "--dtype"):
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
    serve(Runner, StepRequest)
