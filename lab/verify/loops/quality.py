"""The quality that approximate layouts lose: pictures of the shipped checkpoint, compared with exact ones."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel_backend.client.client import Client
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec

Pictures = npt.NDArray[np.float32]
"""``[N, H, W, 3]``, values in 0..1."""

SHAPES = Path(__file__).resolve().parents[3] / "checkpoints" / "shapes"
SIZES = ((128, 128), (96, 160), (112, 144), (176, 112))
"""Height and width in pixels; a picture is generated for each of the 64 held-out prompts in each size."""
STEPS, GUIDANCE, SHIFT = 30, 3.0, 8.0
BATCH = 64
WARMUPS = (1, 2, 4)
LAYOUTS = ("pipe=2", "ring=2 stale=previous", "ring=2 stale=none")
MAX_LOSS = 2.0
"""Percentage points of accuracy that PipeFusion may lose, by the upper end of the confidence interval."""
NAIVE_MARGIN = 6.0
"""dB of PSNR, twice the error, by which naive patch must be worse than other layouts, to show that PSNR can tell."""
_IDENTICAL = 100.0
"""PSNR in dB to report for identical pictures."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How close a layout's pictures are to the exact ones.

    Attributes:
        layout: the layout without warm-up, as text.
        approximation: name of the algorithm.
        warmup: exact steps at the start.
        pairs: number of pictures compared.
        psnr: mean over the pairs, in dB.
        ssim: mean over the pairs, as in Wang et al., 2004.
        accuracy: percentage of the prompts' attributes that the pictures have.
        lost: percentage points by which the accuracy of the exact pictures is higher: the mean over the pairs and the
            ends of its 95 % confidence interval.
    """

    layout: str
    approximation: str
    warmup: int
    pairs: int
    psnr: float
    ssim: float
    accuracy: float
    lost: tuple[float, float, float]


class PictureSampler:
    """Generates pictures for the held-out prompts on a backend."""

    def __init__(self, client: Client, devices: Devices) -> None:
        from training import sampling
        from training.scenes import Scene, held_out

        self.client, self.devices = client, devices
        self.pipeline = sampling.load(SHAPES, shift=SHIFT)
        self.scenes = [Scene(shape=s, colour=c, background=b) for s, c, b in held_out()]
        with torch.no_grad():
            self.positive, self.negative = self.pipeline.encode_prompt(
                [scene.caption for scene in self.scenes], "", max_sequence_length=512
            )
        self.pipeline.scheduler.set_timesteps(STEPS)

    def generate(self, layout: ParallelLayout) -> list[Pictures]:
        """Generate all prompts in all sizes, from the same noise for every layout; one array per size."""
        return [self._generate(layout, seed, *size) for seed, size in enumerate(SIZES)]

    def _generate(self, layout: ParallelLayout, seed: int, height: int, width: int) -> Pictures:
        shape = (len(self.scenes), 16, 1, height // 8, width // 8)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        latents = [
            self._sample(layout, noise[i : i + BATCH], self.positive[i : i + BATCH], self.negative[i : i + BATCH])
            for i in range(0, len(noise), BATCH)
        ]
        return decoded(self.pipeline, torch.cat(latents))

    def _sample(self, layout: ParallelLayout, noise: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        spec = ModelSpec(path=str(SHAPES), devices=self.devices, dtype="float32", layout=layout)
        message = Sample(model=spec, branches=2, sampler="euler", cfg=GUIDANCE)
        texts = {"0.encoder_hidden_states": positive, "1.encoder_hidden_states": negative}
        return self.client.call(message, {"x": noise, "sigmas": self.pipeline.scheduler.sigmas, **texts})["samples"]


@torch.no_grad()
def decoded(pipeline: Any, latents: Tensor) -> Pictures:
    """Return the pictures of latents ``[N, C, 1, H, W]``, by the pipeline's VAE."""
    vae = pipeline.vae
    mean, std = (
        torch.tensor(numbers).view(1, -1, 1, 1, 1) for numbers in (vae.config.latents_mean, vae.config.latents_std)
    )
    pixels = vae.decode(latents * std + mean).sample
    pictures: Pictures = pipeline.video_processor.postprocess_video(pixels, output_type="np")[:, 0]
    return pictures.astype(np.float32)


def measure(
    client: Client, devices: Devices, layouts: Sequence[ParallelLayout], log: Callable[[str], None]
) -> tuple[float, list[Quality]]:
    """Generate the pictures of one rank and of each layout, and compare them.

    Args:
        client: connected to the backend.
        devices: as many as the largest layout needs.
        layouts: the approximate layouts.
        log: called with what is under way, and with each finished row.

    Returns:
        The accuracy of one rank's pictures in percent, and one row per layout.

    Raises:
        InvalidRequest: a package is not installed.
    """
    check_installed()
    sampler = PictureSampler(client, devices)
    log(str(ParallelLayout()))
    exact = sampler.generate(ParallelLayout())
    hits, rows = _hits(sampler, exact), []
    for layout in layouts:
        log(str(layout))
        rows.append(_compare(layout, exact, hits, sampler))
        log(_line(rows[-1]))
    return 100 * float(hits.mean()), rows


def with_warmups(layouts: Sequence[str] = LAYOUTS, warmups: Sequence[int] = WARMUPS) -> list[ParallelLayout]:
    """Return each layout with each number of exact steps at the start."""
    return [replace(ParallelLayout.parse(text), warmup=warmup) for text in layouts for warmup in warmups]


def failures(rows: Sequence[Quality]) -> list[str]:
    """Return a sentence for each PipeFusion row that loses too much, and for each row too close to naive patch."""
    losses = [
        f"{row.layout} after {row.warmup} steps of warm-up may lose {row.lost[2]:.1f} points, more than {MAX_LOSS:g}"
        for row in rows
        if row.approximation == "PipeFusion" and not row.lost[2] <= MAX_LOSS
    ]
    naive = {row.warmup: row for row in rows if row.approximation == "naive patch"}
    return losses + [
        f"{row.layout} after {row.warmup} steps of warm-up is not clearly closer to the exact pictures than naive patch"
        for row in rows
        if row.warmup in naive and row is not naive[row.warmup] and row.psnr < naive[row.warmup].psnr + NAIVE_MARGIN
    ]


def markdown(rows: Sequence[Quality], exact: float) -> str:
    """Format the results as a Markdown table; ``exact`` is the accuracy of one rank's pictures in percent."""
    head = "| layout | algorithm | warm-up steps | PSNR | SSIM | attributes as prompted | loss against exact pictures |"
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    lines.append(f"| one rank | exact | | | | {exact:.1f} % | |")
    return "\n".join([*lines, *map(_line, rows)])


def _line(row: Quality) -> str:
    mean, low, high = row.lost
    return (
        f"| `{row.layout}` | {row.approximation} | {row.warmup} | {row.psnr:.1f} dB | {row.ssim:.3f} | "
        f"{row.accuracy:.1f} % | {mean:+.1f} points ({low:+.1f} to {high:+.1f}) |"
    )


def _compare(
    layout: ParallelLayout, exact: Sequence[Pictures], hits: npt.NDArray[np.float64], sampler: PictureSampler
) -> Quality:
    from scipy.stats import ttest_rel
    from skimage.metrics import structural_similarity

    generated = sampler.generate(layout)
    pairs = [pair for size in zip(exact, generated, strict=True) for pair in zip(*size, strict=True)]
    layout_hits = _hits(sampler, generated)
    identical = bool((layout_hits == hits).all())
    low, high = (0.0, 0.0) if identical else ttest_rel(hits, layout_hits).confidence_interval(0.95)
    return Quality(
        layout=str(replace(layout, warmup=1)),
        approximation=layout.approximation,
        warmup=layout.warmup,
        pairs=len(pairs),
        psnr=statistics.fmean(psnr(reference, picture) for reference, picture in pairs),
        ssim=statistics.fmean(
            structural_similarity(
                reference, picture, channel_axis=-1, data_range=1.0, gaussian_weights=True, sigma=1.5,
                use_sample_covariance=False,
            )
            for reference, picture in pairs
        ),
        accuracy=100 * float(layout_hits.mean()),
        lost=(100 * float((hits - layout_hits).mean()), 100 * float(low), 100 * float(high)),
    )  # fmt: skip


def psnr(reference: Pictures, picture: Pictures) -> float:
    """Return how close a picture or a clip is to another, in dB."""
    error = float(np.mean((reference.astype(np.float64) - picture) ** 2))
    return _IDENTICAL if error == 0 else min(_IDENTICAL, -10 * float(np.log10(error)))


def _hits(sampler: PictureSampler, generated: Sequence[Pictures]) -> npt.NDArray[np.float64]:
    """Return for each picture the share of its prompt's attributes that the reader finds in it."""
    from training.reader import read

    shares = [
        statistics.fmean(read(picture[None]).hits(scene).values())
        for pictures in generated
        for picture, scene in zip(pictures, sampler.scenes, strict=True)
    ]
    return np.array(shares)


def check_installed() -> None:
    """Check that packages are there that the product does not need.

    Raises:
        InvalidRequest: one is not.
    """
    try:
        import scipy  # noqa: F401
        import skimage  # noqa: F401

        import training  # noqa: F401
    except ImportError as error:
        raise InvalidRequest(
            f"--quality needs {error.name}: run pip install -r requirements-bench.txt, and run verify in the "
            "extension's folder"
        ) from error
