"""How much faster a denoiser call is on several ranks than on one, each rank with one thread.

All layouts run through the backend on the same ranks, turn by turn, so that whatever else the machine does
meets them alike. The model has Wan 2.1 1.3B's widths and random weights.
"""

import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from .client import Client
from .errors import InvalidRequest
from .layout import ParallelLayout
from .messages import Devices, Forward, ModelSpec
from .own_backend import own_backend

WIDTH, HEADS, FEED_FORWARD, TEXT, TEXT_TOKENS = 1536, 12, 8960, 512, 128
ROW = 64
"""Tokens along the height and the width of the latent that is denoised."""


@dataclass(frozen=True, kw_only=True)
class StepMeasurement:
    """Median seconds of a call with two branches; ``speedup`` is the median of the rounds' ratios to one rank."""

    tokens: int
    layers: int
    rounds: int
    seconds: dict[str, float]
    speedup: dict[str, float]
    largest_difference: float
    load: float

    def describe(self) -> str:
        """The same for people."""
        lines = [
            f"{layout:>16}: {seconds:7.2f} s a step, {self.speedup[layout]:.2f}x"
            for layout, seconds in self.seconds.items()
        ]
        return "\n".join(
            [
                f"{self.tokens} tokens, 2 branches, {self.layers} layers of width {WIDTH}, float32, one thread a rank, "
                f"{self.rounds} rounds; the machine's load was {self.load:.1f}",
                *lines,
                f"largest difference to one rank, relative: {self.largest_difference:.1e}",
            ]
        )


def measure(layouts: tuple[str, ...], *, tokens: int = 4096, layers: int = 2, rounds: int = 3) -> StepMeasurement:
    """Measure on a backend of its own, which is stopped at the end.

    Args:
        layouts: as ``ParallelLayout.parse`` reads them, without the one rank that all are compared with.
        tokens: of one branch, rounded up to whole rows of 64.

    Raises:
        InvalidRequest: a layout or a number that makes no sense.
        BackendError: the backend fails.
    """
    if min(tokens, layers, rounds) < 1:
        raise InvalidRequest(f"tokens={tokens}, layers={layers}, rounds={rounds}: each is a whole number of at least 1")
    parsed = (ParallelLayout(), *map(ParallelLayout.parse, layouts))
    inputs = _inputs(-(-tokens // ROW))
    with tempfile.TemporaryDirectory(prefix="bench-step-") as folder:
        path = _write_model(Path(folder) / "model", layers)
        with own_backend(Path(folder)) as client:
            seconds, difference = _rounds(client, path, parsed, inputs, rounds)
    alone = seconds[str(parsed[0])]
    return StepMeasurement(
        tokens=inputs["0.hidden_states"][0, 0].numel() // 4,
        layers=layers,
        rounds=rounds,
        seconds={layout: statistics.median(took) for layout, took in seconds.items()},
        speedup={
            layout: statistics.median(one / many for one, many in zip(alone, took, strict=True))
            for layout, took in seconds.items()
        },
        largest_difference=difference,
        load=os.getloadavg()[0],
    )


def _rounds(
    client: Client, path: Path, layouts: tuple[ParallelLayout, ...], inputs: dict[str, torch.Tensor], rounds: int
) -> tuple[dict[str, list[float]], float]:
    devices = Devices(kind="cpu", indices=tuple(range(max(layout.ranks for layout in layouts))))
    messages = [
        Forward(model=ModelSpec(path=str(path), devices=devices, dtype="float32", layout=layout), branches=2)
        for layout in layouts
    ]
    wanted, *results = [_call(client, message, inputs)[0] for message in messages]  # loads the weights as well
    difference = max((float((got - wanted).abs().max() / wanted.abs().max()) for got in results), default=0.0)
    seconds: dict[str, list[float]] = {str(layout): [] for layout in layouts}
    for _ in range(rounds):
        for layout, message in zip(layouts, messages, strict=True):
            seconds[str(layout)].append(_call(client, message, inputs)[1])
    return seconds, difference


def _call(client: Client, message: Forward, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
    start = time.perf_counter()
    outputs = client.call(Forward(model=message.model, branches=message.branches), inputs)
    return torch.stack([outputs["0"], outputs["1"]]), time.perf_counter() - start


def _inputs(rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(1, 16, 1, 2 * rows, 2 * ROW, generator=generator)
    texts = torch.randn(2, 1, TEXT_TOKENS, TEXT, generator=generator)
    return {
        f"{branch}.{name}": tensor
        for branch in range(2)
        for name, tensor in {
            "hidden_states": latent,
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": texts[branch],
        }.items()
    }


def _write_model(path: Path, layers: int) -> Path:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        ffn_dim=FEED_FORWARD,
        text_dim=TEXT,
        num_layers=layers,
    )
    model.save_pretrained(path / "transformer")
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    (path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    return path
