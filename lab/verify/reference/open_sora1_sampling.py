"""Open-Sora 1.2's samplings against the authors' ``RFLOW``."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from parallel_backend.families.open_sora1.times import STEPS, add_noise, generated, shift
from parallel_backend.families.open_sora1.transformer import GENERATED, OpenSora1
from parallel_backend.families.shared.streams import TEXT_MASK
from parallel_backend.interfaces.geometry import LATENT, TIMESTEP

from .difference import SAMPLING, Difference, of_tensors
from .open_sora1 import model, predict, stock
from .part import Part


def sampling(part: Part) -> Iterator[Difference]:
    """Compare whole samplings with the times of the reference, and our times with those of the reference."""
    family = model(part)
    for cell, run in part.entry("runs").items():
        yield from _Run(part, cell, run, family).compare()
    for name, size in part.described.get("published timesteps", {}).items():
        frames, wanted = int(name.split()[-2]), size["float32 sizes"]["timesteps"]
        ours = times(len(wanted), size["height"], size["width"], frames)
        yield of_tensors(f"{part.name} times of {name}", ours, torch.tensor(wanted), SAMPLING)


def times(steps: int, height: int, width: int, frames: int) -> Tensor:
    """Return the timesteps of a sampling, as ``ModelSamplingSD3`` shifts them."""
    even, alpha = 1 - torch.arange(steps) / steps, shift(height, width, frames)
    return alpha * even / (1 + (alpha - 1) * even) * STEPS


class _Run:
    """One sampling of a reference."""

    def __init__(self, part: Part, cell: str, described: Mapping[str, Any], family: OpenSora1) -> None:
        self.part, self.cell, self.described, self.family = part, cell, described, family
        self.inputs, self.middle = part.under(cell, "in"), part.under(cell, "mid")
        self.noise, self.frames = self.inputs["noise"], self.inputs["frame_mask"]
        self.timesteps: list[float] = described["timesteps"]

    def compare(self) -> Iterator[Difference]:
        """Compare what the sampler passes on, and the result."""
        title, seen = f"{self.part.name} {self.cell}", []
        size = [self.described[f"pixel {name}"] for name in ("height", "width", "frames")]
        ours = times(len(self.timesteps), *size)
        yield of_tensors(f"{title} times", ours, torch.tensor(self.timesteps), SAMPLING)
        latent, joined = self.inputs.get("start", self.noise), self.frames == 1
        masks = []
        for step, number in enumerate(self.timesteps):
            time = torch.full((len(latent),), number)
            before, joins = latent, generated(self.frames, time)
            latent = self._with_noise(latent, joins & ~joined, time, step)
            joined = joins
            seen.append(latent)
            masks.append(joins)
            if step == 0 and "prediction" in self.middle:
                yield of_tensors(
                    f"{title} prediction", self._predictions(latent, time), self.middle["prediction"], 1e-5
                )
            latent = torch.where(_over(joins), latent + self._velocity(latent, time) * self._length(step), before)
        yield from self._on_the_way(title, seen, masks)
        yield of_tensors(title, latent, self.part.tensor(f"{self.cell}.out"), SAMPLING)

    def _on_the_way(self, title: str, latents: list[Tensor], masks: list[Tensor]) -> Iterator[Difference]:
        for name, ours in (("latents", latents), ("x_mask", masks)):
            if name in self.middle:
                wanted = self.middle[name].float()
                yield of_tensors(f"{title} {name}", torch.stack(ours).float(), wanted, SAMPLING)

    def _with_noise(self, latent: Tensor, joining: Tensor, time: Tensor, step: int) -> Tensor:
        """Return a latent whose joining frames have the noise that the authors' sampler drew in this step."""
        if not joining.any():
            return latent
        return torch.where(_over(joining), add_noise(latent, self.inputs["added"][step], time), latent)

    def _length(self, step: int) -> float:
        following = self.timesteps[step + 1] if step + 1 < len(self.timesteps) else 0.0
        return (self.timesteps[step] - following) / STEPS

    def _velocity(self, latent: Tensor, time: Tensor) -> Tensor:
        prompt, null = (predict(self.family, each) for each in self._branches(latent, time))
        guided: Tensor = null + self.described["cfg"] * (prompt - null)
        return guided

    def _predictions(self, latent: Tensor, time: Tensor) -> Tensor:
        return torch.cat([stock(self.family, each) for each in self._branches(latent, time)])

    def _branches(self, latent: Tensor, time: Tensor) -> list[dict[str, Tensor]]:
        """Return the inputs of the prompt and of the learned text that stands for no prompt."""
        text, batch = self.inputs["y"], len(latent)
        sides = torch.tensor([[self.described["pixel height"], self.described["pixel width"]]], dtype=torch.float32)
        shared = {
            LATENT: latent,
            TIMESTEP: time,
            TEXT_MASK: self.inputs["mask"].bool(),
            "frame_rate": torch.tensor(self.described["fps given to the model"]),
            "resolution": sides.expand(batch, -1),
            GENERATED: self.frames,
        }
        learned = self.family.module.y_embedder.y_embedding[: text.shape[1]].expand(batch, -1, -1)
        return [{**shared, "encoder_hidden_states": each} for each in (text, learned)]


def _over(frames: Tensor) -> Tensor:
    """Return a mask ``[B, T]`` of frames as ``[B, 1, T, 1, 1]``."""
    return frames[:, None, :, None, None]
