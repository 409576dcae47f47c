"""The quality that step caches lose: pictures and clips of the shipped checkpoint against those of all steps."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize

from parallel_backend.client.client import Client
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import FORECASTS, Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.step_cache.settings import PRESETS, StepCache, preset

from .quality import GUIDANCE, SHAPES, SHIFT, Pictures, check_installed, psnr

STEPS = (4, 8, 24, 50)
PROMPTS = 64
"""Prompts that the checkpoint was never trained on."""
SIZE = 128
FRAMES = {"image": 1, "video": 9}
"""Frames in pixels, by kind."""
BATCH = 32
PROMISED = {
    ("safe", 24): (1.84, 50.0, 47.0),
    ("safe", 50): (2.9, 50.0, 47.0),
    ("fast", 24): (2.6, 42.0, 38.0),
    ("fast", 50): (3.8, 47.0, 44.0),
}
"""By preset and steps: what a cache of images saves at least, and the least PSNR on average and of the worst tenth."""


@dataclass(frozen=True, kw_only=True)
class CacheQuality:
    """How close the results of a step cache are to those of all steps.

    Attributes:
        kind: ``image`` or ``video``.
        mode: the preset.
        saved: calls of the model, divided by those that were computed.
        psnr: mean over the prompts, in dB.
        low: the tenth percentile of it.
        ssim: mean over the prompts and frames.
        distance: mean distance of features of the checkpoint's VAE, as LPIPS has them of another network: 0 to 4.
    """

    kind: str
    mode: str
    steps: int
    saved: float
    psnr: float
    low: float
    ssim: float
    distance: float


class ClipSampler:
    """Generates a picture or a clip for held-out prompts, on one rank of a backend.

    Args:
        prompts: how many of the 64.
    """

    def __init__(self, client: Client, devices: Devices, prompts: int) -> None:
        from training import sampling
        from training.scenes import DIRECTIONS, Scene, held_out

        self.client, self.devices = client, devices
        self.pipeline = sampling.load(SHAPES, shift=SHIFT)
        triples, directions = held_out()[:: PROMPTS // prompts][:prompts], list(DIRECTIONS)
        self.texts: dict[str, Any] = {}
        for kind in FRAMES:
            scenes = [
                Scene(shape=s, colour=c, background=b, direction=directions[i % 4] if kind == "video" else None)
                for i, (s, c, b) in enumerate(triples)
            ]
            with torch.no_grad():
                captions = [scene.caption for scene in scenes]
                self.texts[kind] = self.pipeline.encode_prompt(captions, "", max_sequence_length=512)

    def generate(self, kind: str, steps: int, cache: StepCache | None) -> tuple[Pictures, float]:
        """Return clips ``[N, T, H, W, 3]``, and calls of the model divided by those that were computed."""
        texts, frames = self.texts[kind], (FRAMES[kind] - 1) // 4 + 1
        shape = (len(texts[0]), 16, frames, SIZE // 8, SIZE // 8)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(steps))
        self.pipeline.scheduler.set_timesteps(steps)
        latents, counts = list[Tensor](), list[Tensor]()
        for i in range(0, len(noise), BATCH):
            part = slice(i, i + BATCH)
            reply = self._sample(noise[part], [text[part] for text in texts], cache)
            latents.append(self._decode(reply["samples"]))
            counts.append(reply.get(FORECASTS, torch.tensor([0, 1])))
        forecasts, calls = torch.stack(counts).sum(0).tolist()
        return torch.cat(latents).numpy(), calls / (calls - forecasts)

    def _sample(self, noise: Tensor, texts: Sequence[Tensor], cache: StepCache | None) -> dict[str, Tensor]:
        spec = ModelSpec(path=str(SHAPES), devices=self.devices, dtype="float32", layout=ParallelLayout())
        message = Sample(model=spec, branches=2, sampler="euler", cfg=GUIDANCE, cache=cache)
        named = {f"{i}.encoder_hidden_states": text for i, text in enumerate(texts)}
        return self.client.call(message, {"x": noise, "sigmas": self.pipeline.scheduler.sigmas, **named})

    @torch.no_grad()
    def _decode(self, latent: Tensor) -> Tensor:
        vae = self.pipeline.vae
        mean, std = (
            torch.tensor(numbers).view(1, -1, 1, 1, 1) for numbers in (vae.config.latents_mean, vae.config.latents_std)
        )
        pixels: Tensor = vae.decode(latent * std + mean).sample
        return pixels.add(1).div(2).clamp(0, 1).permute(0, 2, 3, 4, 1)

    @torch.no_grad()
    def distance(self, one: Pictures, other: Pictures) -> float:
        """Return the mean squared distance of features of two sets of clips, each of length 1."""
        pairs = zip(self._features(one), self._features(other), strict=True)
        return statistics.fmean(float((a - b).pow(2).sum(1).mean()) for a, b in pairs)

    def _features(self, clips: Pictures) -> Iterator[Tensor]:
        """Yield what each level of the VAE's encoder makes of the first frames."""
        seen: list[Tensor] = []
        hooks = [
            block.register_forward_hook(lambda module, args, out: seen.append(out))
            for block in self.pipeline.vae.encoder.down_blocks
        ]
        try:
            self.pipeline.vae.encode(torch.from_numpy(clips[:, :1]).permute(0, 4, 1, 2, 3).mul(2).sub(1))
        finally:
            for hook in hooks:
                hook.remove()
        yield from (normalize(features, dim=1) for features in seen)


def measure(
    client: Client, devices: Devices, prompts: int, steps: Sequence[int], log: Callable[[str], None]
) -> list[CacheQuality]:
    """Generate what each preset makes of each number of steps, and compare it with all steps computed.

    Args:
        client: connected to the backend.
        prompts: how many, up to 64.
        log: called with each finished row.

    Raises:
        InvalidRequest: a package is not installed.
    """
    check_installed()
    sampler, rows = ClipSampler(client, devices, prompts), []
    for kind in FRAMES:
        for number in steps:
            exact, _ = sampler.generate(kind, number, None)
            for mode in PRESETS:
                cache = preset(mode, number)
                clips, saved = sampler.generate(kind, number, cache) if cache else (exact, 1.0)
                rows.append(_compare(sampler, kind, mode, number, exact, clips, saved))
                log(_line(rows[-1]))
    return rows


def failures(rows: Sequence[CacheQuality]) -> list[str]:
    """Return a sentence for each row of images that saves less, or is less close, than the page promises."""
    sentences = []
    for row in rows:
        saved, mean, low = PROMISED.get((row.mode, row.steps), (1.0, 41.0, 0.0))
        if row.kind == "image" and not (row.saved >= saved and row.psnr >= mean and row.low >= low):
            sentences.append(
                f"{row.mode} with {row.steps} steps saves {row.saved:.2f}x at {row.psnr:.1f} / {row.low:.1f} dB, and "
                f"{saved:g}x at {mean:g} / {low:g} dB is promised"
            )
    return sentences


def markdown(rows: Sequence[CacheQuality]) -> str:
    """Format the results as a Markdown table."""
    head = "| | steps | cache | calls saved | PSNR, mean / worst tenth | SSIM | distance of features |"
    return "\n".join([head, "|" + "---|" * (head.count("|") - 1), *map(_line, rows)])


def _line(row: CacheQuality) -> str:
    return (
        f"| {row.kind} | {row.steps} | `{row.mode}` | {row.saved:.2f}x | {row.psnr:.1f} / {row.low:.1f} dB | "
        f"{row.ssim:.4f} | {row.distance:.5f} |"
    )


def _compare(
    sampler: ClipSampler, kind: str, mode: str, steps: int, exact: Pictures, clips: Pictures, saved: float
) -> CacheQuality:
    each = np.array([psnr(one, other) for one, other in zip(exact, clips, strict=True)])
    return CacheQuality(
        kind=kind,
        mode=mode,
        steps=steps,
        saved=saved,
        psnr=float(each.mean()),
        low=float(np.percentile(each, 10)),
        ssim=statistics.fmean(_ssim(one, other) for one, other in zip(exact, clips, strict=True)),
        distance=sampler.distance(exact, clips),
    )


def _ssim(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    from skimage.metrics import structural_similarity

    options: dict[str, Any] = {
        "channel_axis": -1, "data_range": 1.0, "gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False,
    }  # fmt: skip
    return statistics.fmean(float(structural_similarity(a, b, **options)) for a, b in zip(one, other, strict=True))
