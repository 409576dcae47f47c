"""Random prompts to small random models, and whether their results are right."""

import random
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.client.client import Client
from parallel_backend.client.retry import Recovery, RetriedRequest
from parallel_backend.engine.validation import check_sample
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.tensors import describe
from parallel_backend.verify import examples

from ..verify.loops.run import SIGMAS, Loop

MODELS = (
    ("WanTransformer3DModel", "t2v"), ("FluxTransformer2DModel", "dev"), ("SD3Transformer2DModel", "sd3.5 medium"),
    ("QwenImageTransformer2DModel", "image"), ("LTXVideoTransformer3DModel", "2b"),
)  # fmt: skip
"""Class and variant of the families: image and video, joint and cross attention."""
SAMPLERS = ("euler", "euler", "euler", "dpmpp_2m", "uni_pc", "euler_ancestral", "heun")
LAYOUTS = (
    "ulysses={0}", "ring={0}", "ulysses=2", "cfg=2", "tensor=2", "data=2", "ulysses=2 shard_weights",
    "pipe=2 patches=2", "ring=2 stale=previous",
)  # fmt: skip
STEP_BY_STEP = 0.7
"""How many of the exact loops of ``euler`` run in this process."""
EXACT, APPROXIMATE = 1e-3, 0.5
"""Largest difference from one rank's samples, over their largest value. A wrong one differs by about 1."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One step loop.

    Attributes:
        loop: the request.
        ranks: number of available ranks.
        step_by_step: whether the loop runs in this process, as ComfyUI's samplers do.
    """

    loop: Loop
    ranks: int
    step_by_step: bool = False

    def __str__(self) -> str:
        return f"{self.loop}{', step by step' if self.step_by_step else ''}"

    @property
    def steps(self) -> int:
        """Its number of steps."""
        return len(self.loop.sigmas) - 1

    def model(self, folder: Path) -> ModelSpec:
        """Return the model in a folder."""
        devices = Devices(kind="cpu", indices=tuple(range(self.ranks)))
        return ModelSpec(path=str(folder), devices=devices, dtype="float32", layout=self.loop.layout)

    def message(self, folder: Path) -> Sample:
        """Return the request for the model in a folder."""
        return Sample(
            model=self.model(folder), branches=2, sampler=self.loop.sampler, cfg=self.loop.cfg, timestep_scale=1.0
        )


class Prompts:
    """Makes prompts, writes the models that they need, and judges results.

    Args:
        folder: where models are written.
        chooser: chooses.
        ranks: number of ranks.

    Attributes:
        ranks: number of ranks.
    """

    def __init__(self, folder: Path, chooser: random.Random, ranks: int) -> None:
        self._folder, self._random, self.ranks = folder, chooser, ranks
        self._references: dict[tuple[str, str, int], Tensor] = {}

    def next(self) -> Prompt:
        """Return a prompt that its family can run."""
        while True:
            class_name, variant = self._random.choice(MODELS)
            loop = Loop(
                class_name=class_name,
                variant=variant,
                layout=ParallelLayout.parse(self._random.choice(LAYOUTS).format(self.ranks)),
                sigmas=SIGMAS[: self._random.choice((5, 7, 9)) - 1] + SIGMAS[-1:],
                sampler=self._random.choice(SAMPLERS),
            )
            by_step = loop.exact and loop.sampler == "euler" and self._random.random() < STEP_BY_STEP
            prompt = Prompt(loop=loop, ranks=self.ranks, step_by_step=by_step)
            with suppress(InvalidRequest):
                folder = self.model(prompt)
                check_sample(prompt.message(folder), describe(loop.tensors()), open_checkpoint(folder), self.ranks)
                return prompt

    def model(self, prompt: Prompt) -> Path:
        """Return the folder of a prompt's model, which is written at its first use."""
        loop = prompt.loop
        folder = self._folder / f"{loop.class_name}-{loop.variant}"
        if not folder.exists():
            examples.write_checkpoint(folder, examples.module(loop.class_name, loop.variant))
        return folder

    def prepare(self, client: Client, prompt: Prompt) -> None:
        """Compute the reference for the prompt's result on one rank."""
        if (key := _key(prompt)) not in self._references:
            alone = Prompt(loop=replace(prompt.loop, layout=ParallelLayout()), ranks=1)
            request = RetriedRequest(
                client, alone.message(self.model(prompt)), alone.loop.tensors(), recovery=Recovery()
            )
            self._references[key] = request.run()["samples"]

    def is_right(self, prompt: Prompt, samples: Tensor) -> bool:
        """Whether samples equal the reference of one rank."""
        wanted = self._references[_key(prompt)]
        limit = EXACT if prompt.loop.exact else APPROXIMATE
        error = (samples - wanted).abs().max() / wanted.abs().max()
        return bool(torch.isfinite(samples).all() and error <= limit)


def _key(prompt: Prompt) -> tuple[str, str, int]:
    return prompt.loop.class_name, prompt.loop.sampler, prompt.steps
