"""A whole random prompt, which follows from a seed and the version of ComfyUI."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import comfy.samplers
from helpers.executor import Prompt
from mixtures.graph import Graph, Link
from mixtures.models import changed, parallel_model
from mixtures.prompts import conditioning
from mixtures.source import LoraFile, Source
from natives import HEAVY
from natives.loadable import CASES

NAMES = tuple(name for name in CASES if name not in HEAVY)
CFG = (1.0, 1.5, 2.5, 4.0, 6.0, 7.5)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A prompt with our nodes.

    Attributes:
        seed: what it follows from.
        names: the cases of its models.
        prompt: its nodes.
        given: what its ``Given`` nodes output.
        loras: the files that it names.
    """

    seed: int
    names: tuple[str, ...]
    prompt: Prompt
    given: dict[str, Any]
    loras: frozenset[LoraFile]

    def __str__(self) -> str:
        """Name the models and nodes in one line."""
        kinds = [node["class_type"] for node in self.prompt.values()]
        shown = [kind for kind in kinds if kind not in ("Given", "Recorder", "UNETLoader", "ParallelLayout")]
        return f"{' and '.join(self.names)}: {', '.join(dict.fromkeys(shown))}"


def draw(seed: int, kinds: Mapping[str, Any]) -> Mixture:
    """Return the mixture of a seed.

    Args:
        seed: any number.
        kinds: ComfyUI's nodes and ours, by their ids.
    """
    number, graph = random.Random(seed), Graph(kinds)
    given: dict[str, Any] = {}
    files: set[LoraFile] = set()
    names = tuple(number.choice(NAMES) for _ in range(2 if number.random() < 0.1 else 1))
    for name in names:
        graph.add("Recorder", value=_Sampling(Source(number, name, given, files), graph).run())
    return Mixture(seed=seed, names=names, prompt=graph.prompt, given=given, loras=frozenset(files))


class _Sampling:
    """One model's samplers, from its loader to the last latent."""

    def __init__(self, source: Source, graph: Graph) -> None:
        self.source, self.graph, number = source, graph, source.random
        self.model = parallel_model(source, graph)
        self.positive = conditioning(source, graph, parts=number.choice((1, 1, 2, 3)))
        self.negative = conditioning(source, graph, parts=number.choice((1, 1, 1, 2)))
        self.sampler = "euler" if source.chance(0.4) else number.choice(comfy.samplers.KSampler.SAMPLERS)
        self.schedule = number.choice(comfy.samplers.KSampler.SCHEDULERS)
        self.cfg = source.number(graph, number.choice(CFG))
        self.steps, self.seed = number.choice((3, 4, 5)), number.randrange(1000)

    def run(self) -> Link:
        """Return the last latent."""
        latent = self.source.latent(self.graph)
        first = self.source.random.choice((self._whole, self._whole, self._whole, self._halves, self._custom))
        latent = first(latent)
        if self.source.chance(0.15):
            if self.source.chance(0.5):
                self.model = changed(self.source, self.graph, self.model)
            if self.source.chance(0.5):
                latent = self.graph.add("LatentUpscaleBy", samples=latent, upscale_method="bilinear", scale_by=1.5)
            latent = self._whole(latent, denoise=0.5)
        return latent

    @property
    def _prompts(self) -> dict[str, Any]:
        return {"positive": self.positive, "negative": self.negative}

    def _whole(self, latent: Link, denoise: float | None = None) -> Link:
        denoise = denoise or self.source.random.choice((1.0, 1.0, 0.6))
        return self.graph.add(
            self.source.random.choice(("KSampler", "ParallelSampler")), model=self.model, latent_image=latent,
            seed=self.seed, steps=self.steps, cfg=self.cfg, sampler_name=self.sampler, scheduler=self.schedule,
            denoise=denoise, **self._prompts,
        )  # fmt: skip

    def _halves(self, latent: Link) -> Link:
        """Sample the first steps with the model, and the rest with it or a changed one."""
        half = self.source.random.randrange(1, self.steps)
        later = changed(self.source, self.graph, self.model) if self.source.chance(0.5) else self.model
        for model, first in ((self.model, True), (later, False)):
            latent = self.graph.add(
                "KSamplerAdvanced", model=model, latent_image=latent, noise_seed=self.seed, steps=self.steps,
                cfg=self.cfg, sampler_name=self.sampler, scheduler=self.schedule,
                add_noise="enable" if first else "disable", return_with_leftover_noise="enable" if first else "disable",
                start_at_step=0 if first else half, end_at_step=half if first else 10000, **self._prompts,
            )  # fmt: skip
        return latent

    def _custom(self, latent: Link) -> Link:
        """Sample with a guider, in one run or in two halves of the sigmas."""
        sampler = self.graph.add("KSamplerSelect", sampler_name=self.sampler)
        sigmas = self.graph.add("BasicScheduler", model=self.model, scheduler=self.schedule, steps=self.steps)
        noise, guider = self.graph.add("RandomNoise", noise_seed=self.seed), self._guider()
        if not self.source.chance(0.4):
            return self._advanced(noise, guider, sampler, sigmas, latent)
        split = self.graph.add("SplitSigmas", sigmas=sigmas, step=self.source.random.randrange(1, self.steps))
        latent = self._advanced(noise, guider, sampler, split, latent)
        return self._advanced(self.graph.add("DisableNoise"), guider, sampler, [split[0], 1], latent)

    def _advanced(self, noise: Link, guider: Link, sampler: Link, sigmas: Link, latent: Link) -> Link:
        return self.graph.add(
            "SamplerCustomAdvanced", noise=noise, guider=guider, sampler=sampler, sigmas=sigmas, latent_image=latent
        )

    def _guider(self) -> Link:
        kinds = ("CFGGuider", "CFGGuider", "BasicGuider", "DualCFGGuider", "PerpNegGuider", "DualModelGuider")
        kind = self.source.random.choice([kind for kind in kinds if kind in self.graph.kinds])
        inputs: dict[str, Any] = {"model": self.model}
        if kind == "BasicGuider":
            inputs |= {"conditioning": self.positive}
        elif kind == "DualCFGGuider":
            second = conditioning(self.source, self.graph, parts=1)
            inputs |= {"cond1": self.positive, "cond2": second, "negative": self.negative, "cfg_conds": self.cfg}
            inputs |= {"cfg_cond2_negative": 2.0, "style": self.source.random.choice(("regular", "nested"))}
        else:
            inputs |= {"cfg": self.cfg, **self._prompts}
        if kind == "PerpNegGuider":
            inputs["empty_conditioning"] = self.source.text(self.graph)
        if kind == "DualModelGuider" and self.source.chance(0.5):
            inputs["model_negative"] = changed(self.source, self.graph, self.model)
        return self.graph.add(kind, **inputs)
