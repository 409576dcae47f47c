"""Bytes that a rank sends in a step of a published model, by the strategies' formulas. Nothing is computed or sent."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel_backend.denoiser.plan import DenoisingPlan
from parallel_backend.engine.validation import is_refused
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.registry import family_of
from parallel_backend.interfaces.geometry import LATENT
from parallel_backend.interfaces.input_shapes import input_shapes
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.strategies import STRATEGIES

from .results import print_results

LAYOUTS = tuple(f"{axis}={ranks}" for axis in ("ulysses", "dsp", "ring") for ranks in (2, 4, 8))
ITEMSIZE = 2
"""Bytes of a value: bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published model at a published size.

    Attributes:
        class_name: of its module.
        config: what differs from the family's defaults.
        size: of the latent.
        text: text tokens.
        what: the size as its authors say it.
        variant: the family's variant whose inputs a request has; by default the first.
    """

    class_name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, ...]
    text: int
    what: str
    variant: str = ""


MODELS: Mapping[str, Published] = {
    "open_sora2": Published(
        class_name="OpenSora2Transformer3DModel", size=(33, 96, 96), text=512, what="129 frames of 768 x 768"
    ),
    "open_sora1": Published(class_name="STDiT3", size=(30, 60, 106), text=300, what="102 frames of 480 x 854"),
    "latte": Published(
        class_name="LatteTransformer3DModel",
        config={
            "num_layers": 28, "attention_head_dim": 72, "in_channels": 4, "out_channels": 8, "patch_size": 2,
            "cross_attention_dim": 1152, "caption_channels": 4096, "activation_fn": "gelu-approximate",
            "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "attention_bias": True,
        },
        size=(16, 64, 64), text=120, what="16 frames of 512 x 512",
    ),
    "minimax_h3": Published(
        class_name="MiniMaxH3Transformer3DModel", size=(37, 48, 84), text=512,
        what="124 frames of 1344 x 768, without its 414 times of sound",
    ),
    "ltx2": Published(
        class_name="LTX2VideoTransformer3DModel", size=(16, 22, 40), text=1024, variant="2",
        what="121 frames of 1280 x 704, without most of its sound",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What the busiest rank sends in one forward.

    Attributes:
        model: one of ``MODELS``.
        by_layout: bytes, by layout.
    """

    model: str
    by_layout: Mapping[str, int]

    @property
    def failed(self) -> bool:
        """Nothing is a failure."""
        return False

    def describe(self) -> str:
        """Format the results as a table."""
        chosen = MODELS[self.model]
        lines = [f"{self.model}, {chosen.what}, one sample in bfloat16: MB that the busiest rank sends in a forward"]
        return "\n".join([*lines, *(f"{name:>12} {sent / 1e6:10,.0f}" for name, sent in self.by_layout.items())])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", action="append", choices=tuple(MODELS), help="repeatable (default: all)")
    parser.add_argument("--layout", action="append", metavar="LAYOUT", help=f"repeatable (default: {LAYOUTS})")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Compute what the options ask for; return the exit status."""
    layouts = [ParallelLayout.parse(text) for text in options.layout or LAYOUTS]
    found = [Sent(model=name, by_layout=dict(_sent(name, layouts))) for name in options.model or MODELS]
    if not all(each.by_layout for each in found):
        raise InvalidRequest(f"--layout {' '.join(options.layout)}: a model takes none of these layouts")
    return print_results(found, as_json=options.json)


def _sent(name: str, layouts: list[ParallelLayout]) -> Iterator[tuple[str, int]]:
    for layout in layouts:
        plan = plan_of(MODELS[name], layout)
        workload = plan.workload(ITEMSIZE)
        if not is_refused(layout, workload):
            by_rank = [sum(each.bytes_sent(layout, workload, i) for each in STRATEGIES) for i in range(layout.ranks)]
            yield str(layout), max(by_rank)


def plan_of(model: Published, layout: ParallelLayout) -> DenoisingPlan:
    """Return the plan of a forward."""
    family = family_of(model.class_name)
    config = family.complete(model.config)
    variants = family.variants()
    inputs = variants[model.variant or next(iter(variants))].inputs
    shapes = input_shapes(family, config, inputs, batch=1, size=model.size, text=model.text)
    return DenoisingPlan(
        layout=layout, geometry=family.describe(config), samples=(1,), latents=({LATENT: shapes[LATENT][1:]},),
        extents=(family.extent(config, shapes),), alike=("",), skipped=(frozenset(),), adapters=((),), guided=False,
    )  # fmt: skip
