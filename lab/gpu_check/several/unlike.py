"""Unlike cards: layouts that adapt to speeds, a rank with less memory than the others, and agreements of the ranks.

Cards that are all alike are made unlike: the last rank sleeps (``PARALLEL_DIT_HANDICAP``) and may use less memory
(``PARALLEL_DIT_MEMORY_LIMIT``). Without two GPUs this happens to CPU ranks, on a small shape.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lab.bench.loop.rank import LoopRequest
from lab.bench.ranks.cases import Case, write_model
from lab.gpu_check.several.ranks import Ranks, all_cards
from parallel_backend import env
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.errors import BackendError
from parallel_backend.interfaces.geometry import LATENT, TIMESTEP
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.verify import examples, real
from parallel_backend.verify.run import forward_request

CPU_RANKS = 2
TOKENS = {"cuda": 4096, "cpu": 256}
STEPS, TURNS = 4, 3
FACTOR = 2
"""How much slower the last rank is made."""
SHARE = 0.75
"""Memory of the last rank, relative to the whole model."""
LIMIT = 1e-3
"""Largest relative error of an exact layout that passes."""
SECONDS = 120.0
"""Seconds that one loop may take."""
_MODULE = "lab.bench.loop.rank"


def main() -> int:
    """Print the figures as JSON, and fail if a result is wrong."""
    devices = all_cards(CPU_RANKS)
    cards = _cards(devices)
    found: dict[str, Any] = {"ranks": ", ".join(cards)}
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        loops = Loops(Path(folder), devices)
        found |= loops.speeds(handicap=len(set(cards)) == 1)
        found |= loops.memory()
        found |= _automatic(Path(folder), loops.model, devices)
    print(json.dumps(found))
    return int("WRONG" in json.dumps(found))


def _cards(devices: Devices) -> list[str]:
    """Return each rank's device, in words."""
    if devices.kind == "cpu":
        return ["CPU"] * len(devices.indices)
    properties = [torch.cuda.get_device_properties(index) for index in devices.indices]
    return [f"{each.name} {each.major}.{each.minor}, {each.total_memory / 1e9:.0f} GB" for each in properties]


class Loops:
    """Step loops of a model on all ranks, each with variables of its own."""

    def __init__(self, folder: Path, devices: Devices) -> None:
        self.folder, self.devices, self.ranks = folder, devices, len(devices.indices)
        self.case = Case(family="flux", tokens=TOKENS[devices.kind], text_tokens=128, branches=1)
        self.model = write_model(folder / "model", "flux")
        self.inputs, self.output = folder / "inputs.safetensors", folder / "samples.safetensors"
        inputs = self.case.inputs()
        texts = {f"0.{name}": tensor for name, tensor in inputs.items() if name not in (LATENT, TIMESTEP)}
        save_file({"x": inputs[LATENT], "sigmas": torch.linspace(1, 0, STEPS + 1), **texts}, self.inputs)

    def speeds(self, *, handicap: bool) -> dict[str, Any]:
        """Return the gain of stages cut by speed over equal stages, and whether both compute the same."""
        last = self.ranks - 1
        variables = {env.HANDICAP.name: f"{last}={FACTOR}"} if handicap else {}
        ranks = self._start(dict.fromkeys(range(self.ranks), variables))
        equal = ":".join(["1"] * self.ranks)
        layouts = [f"pipe={self.ranks}", f"pipe={self.ranks} balance={equal}"]
        layouts += [f"ring={self.ranks} stale=previous", f"ring={self.ranks} stale=previous balance={equal}"]
        found: dict[str, Any] = {"slower": f"rank {last}, {FACTOR} times" if handicap else "as the cards are"}
        try:
            found |= self._exact(ranks, ["pipe={n} patches=1", "ring={n}", "ulysses={n}"])
            seconds = {layout: [self._seconds(ranks, layout) for _ in range(1 + TURNS)][1:] for layout in layouts}
        except BackendError as error:
            return found | {"speeds": f"WRONG: {error}"}
        finally:
            ranks.close()
        for adapted, even in zip(layouts[::2], layouts[1::2], strict=True):
            figures = {"ms by speed": 1e3 * min(seconds[adapted]), "ms cut evenly": 1e3 * min(seconds[even])}
            found[adapted] = figures | {"x faster": min(seconds[even]) / min(seconds[adapted])}
        return found

    def memory(self) -> dict[str, Any]:
        """Return the errors if the last rank has no room for the whole model, so that blocks stream or ranks share."""
        size = sum(file.stat().st_size for file in self.model.glob("*/*.safetensors"))
        ranks = self._start({self.ranks - 1: {env.MEMORY_LIMIT.name: str(int(SHARE * size))}})
        try:
            return {"a rank with too little memory": self._exact(ranks, ["ulysses={n}", "tensor={n}"])}
        except BackendError as error:
            return {"a rank with too little memory": f"WRONG: {error}"}
        finally:
            ranks.close()

    def _start(self, variables: Mapping[int, Mapping[str, str]]) -> Ranks:
        return Ranks(_MODULE, self.devices, self.folder, model=self.model, variables=variables)

    def _exact(self, ranks: Ranks, layouts: list[str]) -> dict[str, str]:
        """Return the errors of exact layouts, relative to one rank."""
        expected, found = self._samples(ranks, "one rank"), dict[str, str]()
        for layout in (text.format(n=self.ranks) for text in layouts):
            error = float((self._samples(ranks, layout) - expected).abs().max() / expected.abs().max())
            found[layout] = f"{'' if error <= LIMIT else 'WRONG: '}error {error:.1e}"
        return found

    def _samples(self, ranks: Ranks, layout: str) -> torch.Tensor:
        ranks.run(LoopRequest(inputs=str(self.inputs), layout=layout, output=str(self.output)), SECONDS)
        return load_file(self.output)["samples"]

    def _seconds(self, ranks: Ranks, layout: str) -> float:
        return ranks.run(LoopRequest(inputs=str(self.inputs), layout=layout), SECONDS)[0].seconds


def _automatic(folder: Path, model: Path, devices: Devices) -> dict[str, str]:
    """Return the error of all ranks against one if the ranks choose dtype and kernel themselves."""
    case = Case(family="flux", tokens=TOKENS[devices.kind], text_tokens=128, branches=1)
    tensors = examples.branches([case.inputs()])
    name = "dtype and kernel that the ranks choose"
    layout = ParallelLayout(ulysses=len(devices.indices))
    with temporary_backend(folder) as client:
        many = forward_request(model, "auto", layout, devices, 1)
        one = replace(many, model=replace(many.model, layout=ParallelLayout()))
        try:
            got, expected = (client.call(message, tensors)["0"].float() for message in (many, one))
        except BackendError as reason:
            return {name: f"WRONG: {reason}"}
        chosen = client.status().ranks[0].models[0].dtype
    error = float((got - expected).norm() / expected.norm())
    right = error <= real.tolerance(getattr(torch, chosen), blocks=64)
    return {name: f"{'' if right else 'WRONG: '}{chosen}, error {error:.1e}"}


if __name__ == "__main__":
    sys.exit(main())
