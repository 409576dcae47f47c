"""What approximate layouts cost in quality: pictures of the shipped checkpoint beside those of the exact engine."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...client.client import Client
from ...errors import InvalidRequest
from ...layout.parallel_layout import ParallelLayout
from ...protocol.messages import Devices, ModelSpec, Sample

Pictures = npt.NDArray[np.float32]
"""``[N, H, W, 3]`` in 0..1."""

SHAPES = Path(__file__).resolve().parents[3] / "checkpoints" / "shapes"
SIZES = ((128, 128), (96, 160), (112, 144), (176, 112))
"""Height and width; each of the 64 unseen prompts is drawn in each of them."""
STEPS, GUIDANCE, SHIFT = 30, 3.0, 8.0
BATCH = 64
WARMUPS = (1, 2, 4)
LAYOUTS = ("pipe=2", "ring=2 stale=previous", "ring=2 stale=none")
MOST_LOST = 2.0
"""Points of accuracy that PipeFusion may lose, with the whole of the confidence interval."""
CLEARLY = 6.0
"""By how many dB the naive patch is worse than any other, if the measure can tell: twice the error."""
_SAME = 100.0
"""PSNR in dB that stands for pictures that are the same."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """How near a layout's pictures come to the exact ones.

    Attributes:
        psnr: in dB; ``ssim``: of Wang et al., 2004; both means over the pairs.
        accuracy: share of the prompts' attributes that are drawn; ``lost``: by how much that of the exact pictures is
            higher, and the ends of its 95 % confidence interval, over pairs; all in points of a hundred.
    """

    layout: str
    approximation: str
    warmup: int
    pairs: int
    psnr: float
    ssim: float
    accuracy: float
    lost: tuple[float, float, float]


class Painter:
    """Draws the unseen prompts on a backend."""

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

    def draw(self, layout: ParallelLayout) -> list[Pictures]:
        """All prompts in all sizes, from the same noise for every layout."""
        return [self._draw(layout, seed, *size) for seed, size in enumerate(SIZES)]

    def _draw(self, layout: ParallelLayout, seed: int, height: int, width: int) -> Pictures:
        shape = (len(self.scenes), 16, 1, height // 8, width // 8)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        parts = [
            self._sample(layout, noise[i : i + BATCH], self.positive[i : i + BATCH], self.negative[i : i + BATCH])
            for i in range(0, len(noise), BATCH)
        ]
        return self._decode(torch.cat(parts))

    def _sample(self, layout: ParallelLayout, noise: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        spec = ModelSpec(path=str(SHAPES), devices=self.devices, dtype="float32", layout=layout)
        message = Sample(model=spec, branches=2, sampler="euler", cfg=GUIDANCE)
        texts = {"0.encoder_hidden_states": positive, "1.encoder_hidden_states": negative}
        return self.client.call(message, {"x": noise, "sigmas": self.pipeline.scheduler.sigmas, **texts})["samples"]

    @torch.no_grad()
    def _decode(self, latent: Tensor) -> Pictures:
        vae = self.pipeline.vae
        mean, deviation = (
            torch.tensor(numbers).view(1, -1, 1, 1, 1) for numbers in (vae.config.latents_mean, vae.config.latents_std)
        )
        pixels = vae.decode(latent * deviation + mean).sample
        drawn: Pictures = self.pipeline.video_processor.postprocess_video(pixels, output_type="np")[:, 0]
        return drawn.astype(np.float32)


def measure(
    client: Client, devices: Devices, layouts: Sequence[ParallelLayout], say: Callable[[str], None]
) -> tuple[float, list[Quality]]:
    """The accuracy of one rank's pictures, and each layout against them.

    Raises:
        InvalidRequest: what it needs is not installed.
    """
    _check_installed()
    painter = Painter(client, devices)
    say(str(ParallelLayout()))
    exact = painter.draw(ParallelLayout())
    hits, rows = _hits(painter, exact), []
    for layout in layouts:
        say(str(layout))
        rows.append(_compare(layout, exact, hits, painter))
        say(_line(rows[-1]))
    return 100 * float(hits.mean()), rows


def table(layouts: Sequence[str] = LAYOUTS, warmups: Sequence[int] = WARMUPS) -> list[ParallelLayout]:
    """The layouts of the table."""
    return [replace(ParallelLayout.parse(text), warmup=warmup) for text in layouts for warmup in warmups]


def failures(rows: Sequence[Quality]) -> list[str]:
    """What is not as it should be: PipeFusion loses too much, or the naive patch is not clearly worse than others."""
    said = [
        f"{row.layout} after {row.warmup} steps of warm-up may lose {row.lost[2]:.1f} points, more than {MOST_LOST:g}"
        for row in rows
        if row.approximation == "PipeFusion" and not row.lost[2] <= MOST_LOST
    ]
    naive = {row.warmup: row for row in rows if row.approximation == "naive patch"}
    return said + [
        f"{row.layout} after {row.warmup} steps of warm-up is not clearly nearer to the exact pictures than naive patch"
        for row in rows
        if row.warmup in naive and row is not naive[row.warmup] and row.psnr < naive[row.warmup].psnr + CLEARLY
    ]


def markdown(rows: Sequence[Quality], exact: float) -> str:
    """The table."""
    head = "| layout | algorithm | warm-up steps | PSNR | SSIM | attributes drawn | lost to the exact picture |"
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
    layout: ParallelLayout, exact: Sequence[Pictures], hits: npt.NDArray[np.float64], painter: Painter
) -> Quality:
    from scipy.stats import ttest_rel
    from skimage.metrics import structural_similarity

    drawn = painter.draw(layout)
    pairs = [pair for wanted, got in zip(exact, drawn, strict=True) for pair in zip(wanted, got, strict=True)]
    own = _hits(painter, drawn)
    same = bool((own == hits).all())
    low, high = (0.0, 0.0) if same else ttest_rel(hits, own).confidence_interval(0.95)
    return Quality(
        layout=str(replace(layout, warmup=1)),
        approximation=layout.approximation,
        warmup=layout.warmup,
        pairs=len(pairs),
        psnr=statistics.fmean(_psnr(wanted, got) for wanted, got in pairs),
        ssim=statistics.fmean(
            structural_similarity(
                wanted, got, channel_axis=-1, data_range=1.0, gaussian_weights=True, sigma=1.5,
                use_sample_covariance=False,
            )
            for wanted, got in pairs
        ),
        accuracy=100 * float(own.mean()),
        lost=(100 * float((hits - own).mean()), 100 * float(low), 100 * float(high)),
    )  # fmt: skip


def _psnr(wanted: Pictures, got: Pictures) -> float:
    error = float(np.mean((wanted.astype(np.float64) - got) ** 2))
    return _SAME if error == 0 else min(_SAME, -10 * float(np.log10(error)))


def _hits(painter: Painter, drawn: Sequence[Pictures]) -> npt.NDArray[np.float64]:
    """By picture, the share of its prompt's attributes that are read off it."""
    from training.reader import read

    shares = [
        statistics.fmean(read(picture[None]).hits(scene).values())
        for pictures in drawn
        for picture, scene in zip(pictures, painter.scenes, strict=True)
    ]
    return np.array(shares)


def _check_installed() -> None:
    try:
        import scipy  # noqa: F401
        import skimage  # noqa: F401

        import training  # noqa: F401
    except ImportError as error:
        raise InvalidRequest(
            f"--quality needs {error.name}: pip install -r requirements-bench.txt, and run it in the extension's folder"
        ) from error
