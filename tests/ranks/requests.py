"""Requests with seeded inputs, and the plain single-process answers to compare with."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_backend.families.shared.patchify import pad_to_patch
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward, Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.samplers.interface import run_sampler
from parallel_backend.step_loop.request_sampler import RequestSampler
from tests.support import tiny

ODD = (3, 5, 7)
"""Frames, height and width of a latent, all odd: 36 tokens once padded to patches of (1, 2, 2)."""

SEED = 2**64 - 1
"""The largest seed that ComfyUI's nodes take."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs of a denoiser call: ``texts`` are the context lengths of the branches."""

    batch: int = 2
    size: tuple[int, int, int] = ODD
    texts: tuple[int, ...] = (9, 4)
    seed: int = 0

    @property
    def latent(self) -> Tensor:
        """``[B, 16, T, H, W]``."""
        return self._randn(0, self.batch, 16, *self.size)

    @property
    def timestep(self) -> Tensor:
        """``[B]``, a different one for each sample."""
        return torch.linspace(900.0, 300.0, self.batch)

    def text(self, branch: int) -> Tensor:
        """``[B, L, 32]``."""
        return self._randn(branch + 1, self.batch, self.texts[branch], 32)

    def forward_inputs(self) -> dict[str, Tensor]:
        """Tensors of a ``Forward``."""
        inputs = {}
        for i in range(len(self.texts)):
            inputs[f"{i}.hidden_states"] = self.latent
            inputs[f"{i}.timestep"] = self.timestep
            inputs[f"{i}.encoder_hidden_states"] = self.text(i)
        return inputs

    def sample_inputs(self, sigmas: tuple[float, ...] = (1.0, 0.75, 0.4, 0.0)) -> dict[str, Tensor]:
        """Tensors of a ``Sample``."""
        texts = {f"{i}.encoder_hidden_states": self.text(i) for i in range(len(self.texts))}
        return {"x": self.latent, "sigmas": torch.tensor(sigmas)} | texts

    def _randn(self, offset: int, *shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(100 * self.seed + offset))


def spec(path: Path, layout: str | None = None, *, ranks: int = 4) -> ModelSpec:
    """A model on ``ranks`` CPU ranks; a layout as text, None for ``auto``."""
    parsed = None if layout is None else ParallelLayout.parse(layout)
    return ModelSpec(path=str(path), devices=Devices(kind="cpu", indices=tuple(range(ranks))), layout=parsed)


def forward(model: ModelSpec, case: Case) -> tuple[Forward, dict[str, Tensor]]:
    """A ``Forward`` and its tensors."""
    return Forward(model=model, branches=len(case.texts)), case.forward_inputs()


def sample(model: ModelSpec, case: Case, **options: Any) -> tuple[Sample, dict[str, Tensor]]:
    """A ``Sample`` and its tensors."""
    chosen: dict[str, Any] = {"sampler": "euler", "cfg": 4.0, "seed": SEED} | options
    return Sample(model=model, branches=len(case.texts), **chosen), case.sample_inputs()


def stock_forward(sizes: tiny.Tiny, latent: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
    """diffusers' own ``forward`` on a latent padded as ComfyUI pads it, cropped again."""
    padded = pad_to_patch(latent, sizes.patch)
    with torch.no_grad():
        out = tiny.transformer(sizes)(padded, timestep, text, return_dict=False)[0]
    return out[:, :, : latent.shape[2], : latent.shape[3], : latent.shape[4]]


def stock_sample(sizes: tiny.Tiny, case: Case, *, sampler: str = "euler", cfg: float = 4.0) -> Tensor:
    """The plain loop: stock forwards, one branch after the other, guidance on the predicted x0."""
    inputs = case.sample_inputs()
    model = tiny.transformer(sizes)

    def predict(x: Tensor, sigma: Tensor, branch: int) -> Tensor:
        padded = pad_to_patch(x, sizes.patch)
        timestep = (sigma * 1000.0).expand(x.shape[0])
        with torch.no_grad():
            out = model(padded, timestep, inputs[f"{branch}.encoder_hidden_states"], return_dict=False)[0]
        return x - sigma * out[:, :, : x.shape[2], : x.shape[3], : x.shape[4]]

    def denoise(x: Tensor, sigma: Tensor) -> Tensor:
        cond = predict(x, sigma, 0)
        if cfg == 1.0:
            return cond
        uncond = predict(x, sigma, 1)
        return uncond + (cond - uncond) * cfg

    message = Sample(model=spec(Path()), branches=2, sampler=sampler, cfg=cfg, seed=SEED)
    steps = RequestSampler(message, inputs["sigmas"], inputs["x"].shape).of_part(lambda whole: whole)
    return run_sampler(steps, denoise, inputs["x"], inputs["sigmas"], lambda *_: None)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest value."""
    assert got.shape == wanted.shape, (got.shape, wanted.shape)
    return float((got - wanted).abs().max() / wanted.abs().max())
