"""Open-Sora 2.0's prompts and whole samplings against the authors' sampler."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from parallel_backend.errors import InvalidRequest
from parallel_backend.families.open_sora2.given_frames import GivenFrames, are_images, given_frames, put_back
from parallel_backend.families.open_sora2.guidance import Guidance, Scales
from parallel_backend.families.open_sora2.prompt import with_frame_rate, with_motion_score
from parallel_backend.families.open_sora2.times import times
from parallel_backend.families.open_sora2.transformer import OpenSora2
from parallel_backend.families.shared.patchify import to_tokens
from parallel_backend.interfaces.geometry import LATENT, TIMESTEP

from .difference import SAMPLING, Difference, of_tensors, of_texts
from .open_sora2 import model
from .part import Part

_RATE, _MOTION = re.compile(r"with (\d+) fps"), re.compile(r"and motion score (\d+)")
_PLACES = {"head": (True, False), "tail": (False, True), "loop": (True, True)}
"""Whether frames are given at the start and at the end, by a part of the kind of a run."""

Branch = Mapping[str, Tensor]
"""Inputs of a forward besides latent and timestep."""


def prompts(part: Part) -> Iterator[Difference]:
    """Compare the ends of prompts."""
    for pair in part.entry("pairs"):
        text = pair["prompt"]
        for name, wanted in pair.items():
            if rate := _RATE.fullmatch(name):
                text = with_frame_rate(text, int(rate[1]))
            elif motion := _MOTION.fullmatch(name):
                text = with_motion_score(text, motion[1])
            elif name == "prompt":
                continue
            else:
                raise InvalidRequest(f"{part.file} has a pair with {name!r}, which says nothing to us")
            yield of_texts(f"{part.name} {pair['prompt']!r} {name}", text, wanted)


def sampling(part: Part) -> Iterator[Difference]:
    """Compare whole samplings with the times of the reference, and our times with those of published sizes."""
    family = model(part)
    for cell, run in part.entry("runs").items():
        yield from _Run(part, cell, run, family).compare()
    for name, schedules in part.described.items():
        if steps := re.fullmatch(r"published schedules, (\d+) steps", name):
            yield from _schedules(part.name, int(steps[1]), schedules)


def _schedules(kind: str, steps: int, schedules: Mapping[str, Any]) -> Iterator[Difference]:
    for name, schedule in schedules.items():
        size = (schedule["latent frames"], schedule["height"] // 8, schedule["width"] // 8)
        yield of_tensors(
            f"{kind} times of {name}", torch.tensor(times(steps, size)), torch.tensor(schedule["times"]), SAMPLING
        )


class _Run:
    """One sampling of a reference."""

    def __init__(self, part: Part, cell: str, described: Mapping[str, Any], family: OpenSora2) -> None:
        self.part, self.cell, self.described, self.family = part, cell, described, family
        self.noise = part.tensor(f"{cell}.in.noise")
        self.frames = self._given_frames()
        self.times: list[float] = described["times"]
        self.guidance = self._guidance(described["guidance"])

    def compare(self) -> Iterator[Difference]:
        """Compare what the sampler passes on, and the result."""
        steps, title = len(self.times) - 1, f"{self.part.name} {self.cell}"
        yield from self._compare_times(title, steps)
        yield from self._compare_scales(title, steps)
        branches, latent = self._branches(), self.noise
        middle = self.part.under(self.cell, "mid")
        if "cond" in middle:
            packed = torch.cat([to_tokens(each["concat"], (1, 2, 2), "c pt ph pw") for each in branches])
            yield of_tensors(f"{title} cond", packed, middle["cond"], SAMPLING)
        before = []
        for step, (time, following) in enumerate(pairwise(self.times)):
            before.append(latent)
            scales = self.guidance.at(step, steps, latent.shape[2])
            velocities = [self._velocity(latent, time, each) for each in branches]
            if step == 0 and "velocity" in middle:
                yield of_tensors(f"{title} velocity", torch.cat(velocities), middle["velocity"], SAMPLING)
            latent = latent + (following - time) * scales.combine(*velocities)
        if "latents" in middle:
            yield of_tensors(f"{title} latents", torch.stack(before), middle["latents"], SAMPLING)
        yield of_tensors(title, self._result(latent), self.part.tensor(f"{self.cell}.out"), SAMPLING)

    def _guidance(self, scales: Mapping[str, Any]) -> Guidance:
        """Return the guidance whose first step has the reference's scales."""
        first = scales["image"][0]
        return Guidance(
            text=scales["text"][0], frames=first[-1] if isinstance(first, list) else first,
            oscillates=len(set(scales["text"])) > 1, ramp=self._gives_images,
        )  # fmt: skip

    @property
    def _gives_images(self) -> bool:
        return self.frames is not None and are_images(self.frames.given)

    def _compare_times(self, title: str, steps: int) -> Iterator[Difference]:
        ours = times(steps, self.noise.shape[2:])
        yield of_tensors(f"{title} times", torch.tensor(ours), torch.tensor(self.times), SAMPLING)

    def _compare_scales(self, title: str, steps: int) -> Iterator[Difference]:
        for name in ("text", "image"):
            pairs = [
                (_of(self.guidance.at(step, steps, self.noise.shape[2]), name), wanted)
                for step, wanted in enumerate(self.described["guidance"][name])
            ]
            ours, theirs = (torch.cat([_flat(each) for each in side]) for side in zip(*pairs, strict=True))
            yield of_tensors(f"{title} {name} guidance", ours, theirs, SAMPLING)

    def _result(self, latent: Tensor) -> Tensor:
        """Return the result of a sampling. The authors put given images over the first sample's, and we over all."""
        if self.frames is None or not self._gives_images:
            return latent
        return torch.cat([put_back(latent, self.frames)[:1], latent[1:]])

    def _velocity(self, latent: Tensor, time: float, branch: Branch) -> Tensor:
        inputs = {**branch, LATENT: latent, TIMESTEP: torch.full((len(latent),), time) * 1000}
        state = self.family.run(self.family.embed(inputs))
        return self.family.unpatchify(self.family.head(state), latent.shape[2:])

    def _branches(self) -> list[Branch]:
        """Return the inputs of the branches: prompt, negative prompt, and that without given frames."""
        size = self.noise.shape
        none = torch.zeros(size[0], size[1] + 1, *size[2:])
        frames = none if self.frames is None else self._concat(self.frames)
        prompt, negative = self._text("positive"), self._text("negative")
        return [{**prompt, "concat": frames}, {**negative, "concat": frames}, {**negative, "concat": none}]

    def _concat(self, frames: GivenFrames) -> Tensor:
        return torch.cat([frames.given.expand(len(frames.latent), -1, -1, -1, -1), frames.latent], dim=1)

    def _text(self, name: str) -> Branch:
        inputs = {}
        for encoder, key in (("t5", "encoder_hidden_states"), ("clip", "pooled_projections")):
            found = self.part.under(self.cell, "in", encoder)
            texts = [found[name]] if name in found else [found[f"{name}.{i}"] for i in range(len(self.noise))]
            stacked = torch.stack(texts)
            inputs[key] = stacked.expand(len(self.noise), *stacked.shape[1:])
        return inputs

    def _given_frames(self) -> GivenFrames | None:
        """Return the frames that the kind of the run places at the start, the end or both. An image has none.

        Raises:
            InvalidRequest: it is a kind that we do not know.
        """
        clips = self.part.under(self.cell, "in", "reference")
        batch, channels, *size = self.noise.shape
        if not clips or size[0] == 1:
            return None
        kind = self.described["kind"]
        places = next((places for place, places in _PLACES.items() if f"_{place}" in kind), None)
        if places is None:
            raise InvalidRequest(f"{self.part.file}: a run of kind {kind!r} is not known; known: {', '.join(_PLACES)}")
        samples = [given_frames(*_clips_of(clips, sample, places), size, channels) for sample in range(batch)]
        return GivenFrames(given=samples[0].given, latent=torch.cat([each.latent for each in samples]))


def _clips_of(clips: Mapping[str, Tensor], sample: int, places: tuple[bool, bool]) -> list[Tensor | None]:
    """Return the clips at the start and the end of a sample. They are numbered sample by sample."""
    first = sample * sum(places)
    numbers = (first, first + places[0])
    return [clips[str(number)] if there else None for number, there in zip(numbers, places, strict=True)]


def _of(scales: Scales, name: str) -> float | Tensor:
    return scales.text if name == "text" else scales.frames


def _flat(scale: Any) -> Tensor:
    return torch.as_tensor(scale).float().flatten()
