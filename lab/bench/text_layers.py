"""Layers for the prompt alone in a transformer's file: ``python -m lab bench text``.

ComfyUI runs them once in a sampling. The command measures what they take in one process beside a step, and computes
their weights and a prompt's bytes before and after them. On the ranks, each rank runs and holds them; in ComfyUI's
process, one process does. Widths, heads and tokens are a part of the published ones, all the same, so that products of
weights and attention keep their proportion, and so do the layers and the step.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from parallel_backend.errors import InvalidRequest
from parallel_backend.families.modules import module_class_of
from parallel_backend.families.registry import family_of
from parallel_backend.interfaces.family import Family
from parallel_backend.interfaces.input_shapes import input_shapes
from parallel_backend.verify.examples import fill, random_module, variant

from .results import print_results

PART = 8
"""What published widths and tokens are divided by."""
ITEMSIZE = 2
"""Bytes of a value: bfloat16."""
STEPS = 20
"""Forwards of a prompt that the result tells of."""
BLOCKS = 2
"""Blocks that are run for a step; the published number takes as many times longer."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published model at a published size.

    Attributes:
        class_name: of its module.
        variant: of its family, whose inputs it takes.
        config: what differs from the variant's config, at the published size.
        divided: names in ``config`` that are divided.
        size: of the latent.
        text: tokens of the prompt as the text encoder gives it.
        after: tokens of the prompt in and after its layers, which may fill it up.
        what: the size as people say it.
        layers: makes the layers for the prompt from a complete config.
        runs: what of them runs, on a prompt ``[1, tokens, width]``.
        widths: features of a token of the prompt before and after the layers.
    """

    class_name: str
    variant: str
    config: Mapping[str, Any]
    divided: frozenset[str]
    size: tuple[int, int, int]
    text: int
    after: int
    what: str
    layers: Callable[[Mapping[str, Any]], nn.Module]
    runs: Callable[[nn.Module, Tensor], object]
    widths: tuple[str, tuple[str, ...]]

    def at(self, part: int, blocks: int) -> dict[str, Any]:
        """Return the config of a model of a part of the width."""
        divided = {name: value // part if name in self.divided else value for name, value in self.config.items()}
        return {**variant(self.class_name, self.variant).config, **divided, "num_layers": blocks}


def _h3_layers(config: Mapping[str, Any]) -> nn.Module:
    whole = module_class_of("MiniMaxH3Transformer3DModel")(**{**config, "num_layers": 0})
    return nn.Sequential(whole.context_embedder, whole.token_refiner)


def _ltx2_layers(config: Mapping[str, Any]) -> nn.Module:
    from diffusers.pipelines.ltx2.connectors import LTX2ConnectorTransformer1d

    projects = config.get("use_prompt_embeddings", True)
    widths = (config["caption_channels"],) * 2 if projects else _ltx2_widths(config)
    return nn.ModuleList(
        LTX2ConnectorTransformer1d(
            num_attention_heads=config["connector_heads"], attention_head_dim=width // config["connector_heads"],
            num_layers=2 if projects else 8, num_learnable_registers=None, rope_type="split",
            gated_attention=not projects,
        )
        for width in widths
    )  # fmt: skip


def _ltx2_widths(config: Mapping[str, Any]) -> tuple[int, int]:
    return config["cross_attention_dim"], config["audio_cross_attention_dim"]


def _run_connectors(layers: nn.Module, text: Tensor) -> None:
    """Run both on texts of their widths, of which ``text`` has the features of both."""
    assert isinstance(layers, nn.ModuleList)
    widths = [int(layer.inner_dim) for layer in layers]  # type: ignore[arg-type]
    texts = text.split(widths, dim=2) if text.shape[2] == sum(widths) else [text] * len(widths)
    for layer, each in zip(layers, texts, strict=True):
        layer(each)


_LTX2 = {
    "num_layers": 48, "num_attention_heads": 32, "attention_head_dim": 128, "cross_attention_dim": 4096,
    "audio_num_attention_heads": 32, "audio_attention_head_dim": 64, "audio_cross_attention_dim": 2048,
    "caption_channels": 3840, "in_channels": 128, "out_channels": 128, "audio_in_channels": 128,
    "audio_out_channels": 128,
}  # fmt: skip
_LTX2_DIVIDED = frozenset(
    {"attention_head_dim", "audio_attention_head_dim", "cross_attention_dim", "audio_cross_attention_dim",
     "caption_channels"}
)  # fmt: skip
_LTX2_SIZE: dict[str, Any] = {
    "class_name": "LTX2VideoTransformer3DModel", "divided": _LTX2_DIVIDED, "size": (16, 16, 24), "text": 128,
    "after": 1024, "what": "121 frames of 768 x 512", "layers": _ltx2_layers, "runs": _run_connectors,
}  # fmt: skip
"""Learned registers fill a prompt to 1,024 tokens, whatever its length."""

MODELS: Mapping[str, Published] = {
    "minimax_h3": Published(
        class_name="MiniMaxH3Transformer3DModel",
        variant="pruned",
        config={
            "num_layers": 50, "num_attention_heads": 56, "attention_head_dim": 128, "hidden_size": 5376,
            "num_refiner_layers": 2, "ffn_dim": 14336, "text_dim": 5120, "time_embed_dim": 24, "rope_freq_dim": 16,
            "adaln_curve_grid": 1025,
        },
        divided=frozenset({"num_attention_heads", "hidden_size", "ffn_dim", "text_dim"}),
        size=(37, 30, 52),
        text=512,
        after=512,
        what="124 frames of 832 x 480",
        layers=_h3_layers,
        runs=lambda layers, text: layers(text),
        widths=("text_dim", ("hidden_size",)),
    ),
    "ltx2": Published(
        variant="2", config={**_LTX2, "connector_heads": 30},
        widths=("caption_channels", ("caption_channels",) * 2), **_LTX2_SIZE,
    ),
    "ltx2.3": Published(
        variant="2.3 keyframes", config={**_LTX2, "connector_heads": 32},
        widths=("", ("cross_attention_dim", "audio_cross_attention_dim")), **_LTX2_SIZE,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TextLayers:
    """What the layers for a prompt take.

    Attributes:
        model: one of ``MODELS``.
        weights: bytes of the published layers in bfloat16.
        prompt: bytes of a prompt before and after them, in bfloat16.
        seconds: of the layers on a prompt, at a part of the size.
        step: seconds of a forward of all blocks, at the same part.
    """

    model: str
    weights: int
    prompt: tuple[int, int]
    seconds: float
    step: float

    @property
    def failed(self) -> bool:
        """Nothing is a failure."""
        return False

    def describe(self) -> str:
        """Format the result as text."""
        share, (before, after) = 100 * self.seconds / self.step, self.prompt
        return (
            f"{self.model}, {MODELS[self.model].what}: the prompt's layers take {share:.2f} % of a forward, so of "
            f"{STEPS} forwards {share / STEPS:.3f} % if they run once, and {share:.2f} % if they run in each; weights "
            f"{self.weights / 1e9:.2f} GB; a prompt {before / 1e6:.1f} MB before and {after / 1e6:.1f} MB after them"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", action="append", choices=tuple(MODELS), help="repeatable (default: all)")
    parser.add_argument("--rounds", type=int, default=9, help="calls of which the fastest counts (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Measure what the options ask for; return the exit status."""
    if options.rounds < 1:
        raise InvalidRequest(f"--rounds {options.rounds}: at least one is needed")
    return print_results((measure(name, options.rounds) for name in options.model or MODELS), as_json=options.json)


@torch.inference_mode()
def measure(name: str, rounds: int) -> TextLayers:
    """Measure one model. Rounds of the layers and of a forward take turns."""
    model = MODELS[name]
    config, published = model.at(PART, BLOCKS), model.at(1, 0)
    with torch.device("meta"):
        weights = sum(each.numel() for each in model.layers(published).parameters()) * ITEMSIZE
    layers, (before, _) = model.layers(config).eval(), _features(model, config)
    text = torch.randn(1, model.after // PART, before)
    family, inputs = _transformer(model, config)
    calls = (lambda: model.runs(layers, text)), (lambda: family.head(family.run(family.embed(inputs))))
    seconds, blocks = (min(each) for each in zip(*_rounds(calls, rounds), strict=True))
    whole_before, whole_after = _features(model, published)
    return TextLayers(
        model=name, weights=weights,
        prompt=(model.text * whole_before * ITEMSIZE, model.after * whole_after * ITEMSIZE),
        seconds=seconds, step=blocks * model.config["num_layers"] / BLOCKS,
    )  # fmt: skip


def _features(model: Published, config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the features of a prompt's token before and after its layers."""
    before, after = model.widths
    features = sum(config[name] for name in after)
    return (config[before] if before else features), features


def _transformer(model: Published, config: Mapping[str, Any]) -> tuple[Family, dict[str, Tensor]]:
    known = {name: value for name, value in config.items() if name != "connector_heads"}
    chosen, class_of_family = variant(model.class_name, model.variant), family_of(model.class_name)
    side = PART ** (1 / 3)
    frames, *sides = model.size
    size = [max(1, round(frames / side)), *(2 * max(1, round(each / side / 2)) for each in sides)]
    shapes = input_shapes(class_of_family, known, chosen.inputs, batch=1, size=size, text=model.after // PART)
    return class_of_family(random_module(model.class_name, known)), fill(shapes, seed=0)


def _rounds(calls: tuple[Callable[[], object], ...], rounds: int) -> Iterator[list[float]]:
    for call in calls:  # once to warm up
        call()
    for _ in range(rounds):
        found = []
        for call in calls:
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
        yield found
