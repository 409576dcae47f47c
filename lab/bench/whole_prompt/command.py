"""How long a whole prompt takes in a real ComfyUI, and where its time goes: ``python -m lab bench prompt``.

From the POST to the saved file: the first prompt of a new ComfyUI and backend, one with another seed, and one with
another text. The last two take turns between the ways in one ComfyUI, and the fastest of each is told.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from parallel_backend.errors import InvalidRequest
from parallel_backend.protocol.endpoint import Endpoint
from scripts import comfy_paths
from scripts.comfy_events import Events
from scripts.comfy_server import ComfyServer

from ..results import print_results
from .graphs import NATIVE, OURS, SHAPES, WAYS, Graph, write_files
from .timeline import RequestLog, Timed, timed

COLD, WARM, TEXT = "cold", "other seed", "other text"
LIMIT = 1.15
"""Seconds of KSampler with the shipped checkpoint, over Parallel Sampler's, that pass."""
DEADLINE = 600.0
SAMPLERS = ("KSampler", "ParallelSampler")
KEPT = ("--cache-lru", "64")
"""ComfyUI's option to keep the results of nodes that only other prompts use: each way finds its loader's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", choices=WAYS, default=SHAPES,
                        help="the shipped checkpoint, or a random transformer's file, whose prompts ComfyUI alone runs "
                        "as well (default %(default)s)")  # fmt: skip
    parser.add_argument("--way", action="append", help="a way to sample, see the output; repeatable (default all)")
    parser.add_argument("--steps", type=int, default=4, help="of a prompt (default %(default)s)")
    parser.add_argument("--cfg", type=float, default=1.0, help="guidance (default %(default)s)")
    parser.add_argument("--no-lora", action="store_true", help="without a LoRA")
    parser.add_argument("--side", type=int, default=160, help="of the picture in pixels (default %(default)s)")
    parser.add_argument("--text-seconds", type=float, default=0.0,
                        help="how long a text takes in ComfyUI, as a text encoder that reads its weights does, with "
                        "--model file (default 0)")  # fmt: skip
    parser.add_argument("--heads", type=int, default=8, help="of the random transformer (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the random transformer (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="prompts of each kind and way (default %(default)s)")
    parser.add_argument(
        "--no-cold", action="store_true", help="without the first prompts, each in a ComfyUI of its own"
    )
    parser.add_argument("--comfyui", type=Path, help="its folder (default: the newest that is found)")
    parser.add_argument("--devices", help='of the ranks (default "0,1", and with a single GPU "0")')
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for and return the exit status."""
    unknown = set(options.way or ()) - set(WAYS[options.model])
    if unknown:
        ways = ", ".join(WAYS[options.model])
        raise InvalidRequest(f"--way {sorted(unknown)[0]}: with --model {options.model} there are {ways}")
    return print_results(measure(options), as_json=options.json)


@dataclass(frozen=True, kw_only=True)
class Way:
    """The fastest prompts of one way.

    Attributes:
        name: of ``WAYS``.
        prompts: by kind.
    """

    name: str
    prompts: dict[str, Timed]

    def sampling(self, kind: str) -> float:
        """Seconds of the sampler's node."""
        return sum(seconds for name, seconds in self.prompts[kind].nodes.items() if name in SAMPLERS)


@dataclass(frozen=True, kw_only=True)
class Ways:
    """The results.

    Attributes:
        model: of ``WAYS``.
        ways: all that were measured; the others are compared with the first.
    """

    model: str
    ways: tuple[Way, ...]

    @property
    def ratio(self) -> float | None:
        """Seconds of a warm KSampler, over those of Parallel Sampler with the same MODEL; None without both."""
        found = {way.name: way.sampling(WARM) for way in self.ways if WARM in way.prompts}
        return found[NATIVE] / found[OURS] if {NATIVE, OURS} <= found.keys() else None

    @property
    def failed(self) -> bool:
        """Whether KSampler takes more than ``LIMIT`` with the shipped checkpoint."""
        return self.model == SHAPES and self.ratio is not None and self.ratio > LIMIT

    def describe(self) -> str:
        """Format the results as text."""
        lines = []
        for way in self.ways:
            for kind, prompt in way.prompts.items():
                part = prompt.seconds / self.ways[0].prompts[kind].seconds
                lines += [f"{way.name}, {kind}: {prompt.seconds:.3f} s, {part:.2f}x", prompt.describe()]
        if self.ratio is not None:
            outcome = "" if self.model != SHAPES else "FAILED   " if self.failed else "passed   "
            lines.append(f"{outcome}KSampler's node takes {self.ratio:.2f} times Parallel Sampler's, with another seed")
        return "\n".join(lines)


def measure(options: argparse.Namespace) -> Iterator[Ways]:
    """Measure all ways.

    Raises:
        InvalidRequest: there is no ComfyUI.
    """
    found = [options.comfyui] if options.comfyui else comfy_paths.candidates()[:1]
    if not found:
        raise InvalidRequest("no ComfyUI is found here: --comfyui PATH names one")
    devices = options.devices or ("0" if torch.cuda.device_count() == 1 else "0,1")
    names = [name for name in WAYS[options.model] if not options.way or name in options.way]
    graphs = [
        Graph(
            model=options.model, way=name, devices=devices, steps=options.steps, cfg=options.cfg,
            lora=not options.no_lora, side=options.side, text_seconds=options.text_seconds,
        )
        for name in names
    ]  # fmt: skip

    def opened() -> "Bench":
        return Bench(
            found[0], lambda base: write_files(base, options.model, heads=options.heads, layers=options.layers)
        )

    cold = {} if options.no_cold else {graph.way: _cold(opened(), graph) for graph in graphs}
    warm = _warm(opened(), graphs, options.rounds)
    yield Ways(
        model=options.model,
        ways=tuple(Way(name=each.way, prompts=cold.get(each.way, {}) | warm[each.way]) for each in graphs),
    )


def _cold(bench: "Bench", graph: Graph) -> dict[str, Timed]:
    with bench:
        return {COLD: bench.timed(graph, 1, "a red star")}


def _warm(bench: "Bench", graphs: list[Graph], rounds: int) -> dict[str, dict[str, Timed]]:
    """Return the fastest prompts by way and kind."""
    found: dict[str, dict[str, Timed]] = {graph.way: {} for graph in graphs}
    seeds = itertools.count(2)
    with bench:
        for graph in graphs:
            bench.timed(graph, 1, "a red star")
        for number in range(rounds):
            for kind, graph in itertools.product((WARM, TEXT), graphs):
                text = f"{graph.way} {number}" if kind == TEXT else "a red star"
                once = bench.timed(graph, next(seeds), text)
                best = found[graph.way].get(kind)
                found[graph.way][kind] = once if best is None or once.seconds < best.seconds else best
    return found


class Bench:
    """A ComfyUI whose prompts are timed while the ``with`` block runs.

    Args:
        comfyui: its folder.
        prepare: writes files into its base folder.
    """

    def __init__(self, comfyui: Path, prepare: Callable[[Path], None]) -> None:
        on_gpu = torch.cuda.is_available()
        env = {} if on_gpu else {"OMP_NUM_THREADS": "1"}  # ComfyUI alone has what a rank has
        self._server = ComfyServer(comfyui, cpu=not on_gpu, arguments=KEPT, env=env)
        self._events = Events(self._server.client)
        self._log = RequestLog(Endpoint(folder=self._server.runtime).request_log)
        prepare(self._server.base)

    def timed(self, graph: Graph, seed: int, text: str) -> Timed:
        """Run a prompt, see ``timeline.timed``."""
        return timed(self._server.client, self._events, self._log, graph.prompt(seed, text), deadline=DEADLINE)

    def __enter__(self) -> "Bench":
        self._server.__enter__()
        try:
            self._events.__enter__()
        except BaseException:
            self._server.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._events.__exit__(None, None, None)
        finally:
            self._server.stop()
