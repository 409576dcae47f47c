"""What a random mixture takes as given: texts, masks, latents, and files of LoRAs for one model."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from comfy.nested_tensor import NestedTensor
from helpers import loras
from helpers.inside_fixtures import parts_of
from mixtures.graph import Graph, Link
from natives.case import seeded
from natives.loadable import CASES

WITHOUT_AREAS = ("hunyuan_video", "ltx", "ltx2", "minimax_h3", "pixart")
"""Families that ComfyUI alone cannot sample in areas of every size."""
LORAS = ("plain", "plain", "plain", *loras.KINDS)
"""Kinds of LoRA files; plain ones are as frequent as they are in the world."""


@dataclass(frozen=True, kw_only=True)
class LoraFile:
    """A random LoRA.

    Attributes:
        case: the model that it is for.
        kind: one of ``LORAS``.
        seed: of its numbers, and of the way of naming layers.
    """

    case: str
    kind: str
    seed: int

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.case} {self.kind} {self.seed}.safetensors"

    def factors(self) -> loras.Lora:
        """Return the file's content."""
        native = CASES[self.case].native()
        if self.kind != "plain":
            return loras.other(native, self.kind, seed=self.seed)
        dialects = sorted(loras.targets(native))
        return loras.plain(native, dialects[self.seed % len(dialects)], rank=2 + self.seed, seed=self.seed, alpha=2.0)


class Source:
    """Draws what a model's prompt begins with.

    Args:
        number: the mixture's random numbers.
        name: the model's case.
        given: takes what the prompt's ``Given`` nodes output.
        files: takes the LoRAs that the prompt names.

    Attributes:
        batch: the number of samples.
        video: whether latents have frames.
        areas: whether prompts may have areas.
        masks: whether they may have masks. In a video ComfyUI cannot sample both.
        joins: whether prompts can be joined. ComfyUI does not join their masks.
    """

    def __init__(self, number: random.Random, name: str, given: dict[str, Any], files: set[LoraFile]) -> None:
        self.random, self.name, self.case, self._given, self._files = number, name, CASES[name], given, files
        latent = self.case.samples()
        samples = len(parts_of(latent["samples"])[0])
        self.batch = number.choice((1, 2, 3)) if len(latent) == 1 and samples > 1 else samples
        self.video = len(self.case.latent) == 5
        self.areas = name.split()[0] not in WITHOUT_AREAS and not (self.video and self.chance(0.5))
        self.masks = not (self.video and self.areas)
        self.joins = "attention_mask" not in self.case.conditioning(0)[0][1]

    def chance(self, probability: float) -> bool:
        """Return True with a probability."""
        return self.random.random() < probability

    def given(self, graph: Graph, value: Any) -> Link:
        """Return the output of a node that gives a value."""
        key = str(len(self._given))
        self._given[key] = value
        return graph.add("Given", key=key)

    def number(self, graph: Graph, value: float) -> float | Link:
        """Return a number as a widget has it, or the output of a node that gives it as another kind of number."""
        kind = self.random.choice((None, None, None, np.float64, torch.tensor))
        return value if kind is None else self.given(graph, kind(value))

    def text(self, graph: Graph) -> Link:
        """Return a conditioning of one text."""
        shorter = self.random.choice((0, 0, self.case.shorter))
        return self.given(graph, self.case.conditioning(self.random.randrange(8), shorter=shorter))

    def mask(self, graph: Graph) -> Link:
        """Return a mask, hard or soft, of the picture's size."""
        mask = seeded(self.random.randrange(8))(1, *(8 * size for size in self.case.latent[-2:]))
        return self.given(graph, (mask > 0).float() if self.chance(0.7) else mask.sigmoid())

    def lora(self) -> str:
        """Return the name of a LoRA's file."""
        file = LoraFile(case=self.name, kind=self.random.choice(LORAS), seed=self.random.randrange(3))
        self._files.add(file)
        return file.name

    def latent(self, graph: Graph) -> Link:
        """Return a latent: empty or not, of one to three samples, with a mask or without."""
        latent = self.case.samples()
        shapes = [(self.batch, *part.shape[1:]) for part in parts_of(latent["samples"])]
        drawn = seeded(self.random.randrange(8)) if self.chance(0.4) else torch.zeros
        parts = [drawn(*shape) for shape in shapes]
        samples = NestedTensor(parts) if latent["samples"].is_nested else parts[0]
        link = self.given(graph, {**latent, "samples": samples})
        masked = self.chance(0.25) and "noise_mask" not in latent
        return graph.add("SetLatentNoiseMask", samples=link, mask=self.mask(graph)) if masked else link
