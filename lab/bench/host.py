"""Host time: what this process does for a layer and a step beside the model itself, while a GPU could compute.

Each call computes next to nothing: published numbers of layers, few tokens, narrow layers. torch's fake process group
stands for the other ranks, and takes the path of NCCL. So the difference to the plain model is what our code costs.
How often the host waits for a GPU is counted by ``python -m lab synchronisations``.
"""

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_backend.attention.kernels import KERNELS
from parallel_backend.attention.routing import Route, routed
from parallel_backend.client.constant_tensors import ConstantTensors
from parallel_backend.denoiser.attention_chain import LocalAttention
from parallel_backend.distributed import collectives
from parallel_backend.engine.engine import Engine
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.registry import family_of
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.verify.examples import branches, write_checkpoint

from .ranks.cases import MODELS, Case
from .results import print_results

WIDTHS: dict[str, dict[str, Any]] = {
    "flux": {"num_layers": 19, "num_single_layers": 38, "num_attention_heads": 8, "attention_head_dim": 8,
             "axes_dims_rope": (4, 2, 2)},
    "wan": {"num_layers": 40, "num_attention_heads": 8, "attention_head_dim": 8, "ffn_dim": 64},
}  # fmt: skip
"""Published numbers of layers; eight heads, so that eight ranks have one each."""
LAYOUTS = ("ulysses=2", "ulysses=4", "ulysses=8", "ring=2", "ring=4", "ring=8")
TOKENS, TEXT_TOKENS = 16, 8
ROUNDS = 15
ROUTED = "one rank, routed"
_EMPTY = ("empty", "new_empty", "detach", "_unsafe_view", "alias")
"""Begins of names of operations that start no kernel and are no views."""


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """Seconds of one family's calls.

    Attributes:
        layers: number of attention layers.
        plain: diffusers' own forward, beside each of ``calls``.
        calls: the same in a layout, on rank 0: its blocks alone.
        steps: a whole request that repeats an earlier one, without the connection.
        launches: operations of each of ``calls``, beyond those of the plain forward, for which a GPU starts kernels.
    """

    family: str
    layers: int
    plain: dict[str, float]
    calls: dict[str, float]
    steps: dict[str, float]
    launches: dict[str, int]

    @property
    def failed(self) -> bool:
        """Nothing is a failure."""
        return False

    def describe(self) -> str:
        """Format the results as a table."""
        lines = [
            f"{self.family}, {self.layers} layers: us a layer over plain | x of plain | launches a layer over plain | "
            "ms a step over its call"
        ]
        for name, call in self.calls.items():
            plain, step = self.plain[name], self.steps.get(name)
            beside = "" if step is None else f"{1e3 * (step - call):8.2f}"
            launches = self.launches[name] / self.layers
            lines.append(
                f"{name:>18} {1e6 * (call - plain) / self.layers:8.1f} {call / plain:8.2f} {launches:8.1f} {beside}"
            )
        return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--family", action="append", choices=tuple(WIDTHS), help="repeatable (default: all)")
    parser.add_argument("--layout", action="append", metavar="LAYOUT", help=f"repeatable (default: {LAYOUTS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="calls of which the fastest counts (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; return the exit status."""
    layouts = [ParallelLayout.parse(text) for text in options.layout or LAYOUTS]
    if options.rounds < 1:
        raise InvalidRequest(f"--rounds {options.rounds}: at least one is needed")
    measured = (measure(family, layouts, options.rounds) for family in options.family or WIDTHS)
    return print_results(measured, as_json=options.json)


def measure(family: str, layouts: Sequence[ParallelLayout], rounds: int) -> HostTime:
    """Measure one family in each layout."""
    import diffusers

    model = MODELS[family]
    torch.manual_seed(0)
    module = getattr(diffusers, model.class_name)(**{**model.config, **WIDTHS[family]}).eval()
    inputs = Case(family=family, tokens=TOKENS, text_tokens=TEXT_TOKENS, branches=1).inputs()
    adapter = family_of(model.class_name)(module)
    layers = len(adapter.attentions)
    forward = partial(_forward, adapter, inputs)
    plain, calls, steps = dict[str, float](), dict[str, float](), dict[str, float]()
    attend = LocalAttention(KERNELS["sdpa"], None)
    routes = [Route(site.module, attend, site.each_sample) for site in adapter.attentions]
    here = partial(_routed_forward, adapter, inputs, routes)
    plain[ROUTED], calls[ROUTED] = _paired(forward, here, rounds)
    launches = {ROUTED: _launches(here) - _launches(forward)}
    with tempfile.TemporaryDirectory(prefix="bench-host-") as folder:
        path = write_checkpoint(Path(folder) / "model", module)
        for layout in layouts:
            with _ranks(path, layout, inputs) as (step, call):
                plain[str(layout)], calls[str(layout)] = _paired(forward, call, rounds)
                _, steps[str(layout)] = _paired(forward, step, rounds)
                launches[str(layout)] = _launches(call) - _launches(forward)
    return HostTime(family=family, layers=layers, plain=plain, calls=calls, steps=steps, launches=launches)


@torch.inference_mode()
def _forward(adapter: Any, inputs: dict[str, torch.Tensor]) -> None:
    adapter.head(adapter.run(adapter.embed(inputs)))


def _routed_forward(adapter: Any, inputs: dict[str, torch.Tensor], routes: Sequence[Route]) -> None:
    with routed(routes):
        _forward(adapter, inputs)


@contextlib.contextmanager
def _ranks(
    path: Path, layout: ParallelLayout, inputs: dict[str, torch.Tensor]
) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    """Be rank 0 of a layout. Yields a whole step, and its blocks alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks)
    coalescing = mock.patch.object(collectives, "coalesces", _coalesces)
    try:
        engine = Engine(rank=0, world_size=layout.ranks, device=torch.device("cpu"))
        devices = Devices(kind="cpu", indices=tuple(range(layout.ranks)))
        message = Forward(model=ModelSpec(path=str(path), devices=devices, dtype="float32", layout=layout), branches=1)
        tensors = branches([inputs])
        metas = ConstantTensors().describe(message, tensors)
        step = partial(engine.handle, message, metas, tensors, report=_ignore, cancelled=bool)
        step()
        (run_of_steps,) = engine._runs._runs.values()
        arranged = run_of_steps._arranged
        assert arranged is not None
        with coalescing:
            yield step, torch.inference_mode()(partial(arranged.denoiser.shards, {0: inputs}))
    finally:
        dist.destroy_process_group()


def _coalesces(*_: object) -> bool:
    """Take the path of NCCL. A mock that returns this would take longer than the path itself."""
    return True


class _Operations(TorchDispatchMode):
    """Counts the operations that compute, copy or exchange: views and empty tensors start no kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode, operations come as they are called, such as ``reshape``, which may copy
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        self.count += not (func.is_view or func.__name__.startswith(_EMPTY))
        return func(*args, **(kwargs or {}))


def _launches(work: Callable[[], object]) -> int:
    operations = _Operations()
    with operations:
        work()
    return operations.count


def _ignore(*_: object) -> None:
    """Nobody reads the progress."""


def _paired(plain: Callable[[], object], ours: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the seconds of the fastest of calls in turns, after two of each that are not timed."""
    seconds: list[tuple[float, float]] = []
    for turn in range(2 + rounds):
        pair = _seconds(plain), _seconds(ours)
        seconds += [pair] if turn > 1 else []
    one, other = zip(*seconds, strict=True)
    return min(one), min(other)


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
