"""Requests to ranks with stand-in GPUs: every family in every layout, and every VAE."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Decode, Encode, Forward, RankRequest, Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.vaes import vae_of
from parallel_backend.verify import examples

RANKS = 4
HYBRID = "ring=2 ulysses=2"
LAYOUTS = (
    "ulysses=3", "ring=3", HYBRID, "cfg=2 data=2", "tensor=3", "ring=3 shard_weights", "pipe=2 ring=2",
    "ring=3 stale=previous", "ring=3 stale=none",
)  # fmt: skip
"""Every strategy, on as many ranks as leave over tokens, heads and features of every family."""
WITHIN_FRAMES = ("dsp=3", "cfg=2 dsp=2", "dsp=3 shard_weights")
"""Layouts of families whose frames attend only to themselves."""
FEW = (("ulysses=3", 1), ("tensor=2 ring=2", 2))
"""Layouts for one image token and so many text tokens: some ranks have none."""

Request = tuple[RankRequest, Mapping[str, Tensor]]


def devices(ranks: int) -> Devices:
    """Return the GPUs of so many ranks."""
    return Devices(kind="cuda", indices=tuple(range(ranks)))


def layout_of(text: str) -> ParallelLayout:
    """Return a layout whose shares do not depend on measured speeds."""
    layout = ParallelLayout.parse(text)
    return replace(layout, balance=(1.0,) * max(layout.pipe, layout.ring)) if layout.adapts else layout


@dataclass(frozen=True, kw_only=True)
class Small:
    """A small model of a family, in a folder.

    Attributes:
        class_name: class of diffusers.
        variant: one of the family's variants.
        path: the checkpoint.
        ranks: number of ranks.
    """

    class_name: str
    variant: str
    path: Path
    ranks: int = RANKS

    def loop(self, layout: str, *, steps: int = 0, texts_differ: bool = False) -> Request:
        """Return a step loop with guidance and two samples.

        Args:
            layout: the layout.
            steps: number of steps; 0 for one of each kind that the layout knows: an exact one, one whose keys and
                values are used later, and the last one.
            texts_differ: whether the branches' texts differ in length, if the variant allows it. Then they are no
                batch.
        """
        steps = steps or (3 if layout_of(layout).stale == "previous" or layout_of(layout).pipe > 1 else 2)
        variant = examples.variant(self.class_name, self.variant)
        shorter = variant.text - (2 if texts_differ and not variant.fixed_text else 0)
        tensors = {"sigmas": torch.linspace(1, 0, steps + 1)}
        for i, text in enumerate((variant.text, shorter)):
            inputs = examples.inputs(self.class_name, self.variant, batch=2, text=text, seed=i)
            x, kept = examples.loop_inputs(self.class_name, inputs)
            tensors |= {"x": x} | {f"{i}.{name}": value for name, value in kept.items()}
        message = Sample(
            model=self._spec(layout), sampler="euler", cfg=3.0, branches=2, timestep_scale=1.0,
            latent_shapes=examples.latent_shapes(self.class_name, inputs),
        )  # fmt: skip
        return message, tensors

    def forward(self, layout: str, *, text: int | None = None, branches: int = 0) -> Request:
        """Return a forward of two samples, by default of a branch for each group of cfg.

        With ``text``, it has so many text tokens and a single image token, if the variant has such.
        """
        size = None
        if text is not None:
            size, text = examples.smallest_size(self.class_name, self.variant, text)
        inputs = [
            examples.inputs(self.class_name, self.variant, batch=2, size=size, text=text, seed=i)
            for i in range(branches or layout_of(layout).cfg)
        ]
        return Forward(model=self._spec(layout), branches=len(inputs)), examples.branches(inputs)

    def _spec(self, layout: str) -> ModelSpec:
        return ModelSpec(path=str(self.path), devices=devices(self.ranks), layout=layout_of(layout))


def decode(path: Path, *, ranks: int, frames: int, rows: int, columns: int, tile: int = 0) -> Request:
    """Return a decode of one sample with a VAE in a folder. An image VAE gets no frames."""
    scale = vae_of(open_checkpoint(str(path))).scale
    shape = (1, scale.channels, *([frames] if scale.video else []), rows, columns)
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return Decode(model=_vae(path, ranks), tile=tile * scale.spatial), {"latent": latent}


def encode(path: Path, *, ranks: int, frames: int, rows: int, columns: int, tile: int = 0) -> Request:
    """Return an encode of one sample whose latent has these sizes. An image VAE gets no frames."""
    vae = vae_of(open_checkpoint(str(path)))
    size = (rows * vae.scale.spatial, columns * vae.scale.spatial)
    shape = (1, *([vae.pixel_frames(frames)] if vae.scale.video else []), *size, 3)
    pixels = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return Encode(model=_vae(path, ranks), tile=tile * vae.scale.spatial), {"pixels": pixels}


CODING: Mapping[str, Callable[..., Request]] = {"decode": decode, "encode": encode}


def _vae(path: Path, ranks: int) -> ModelSpec:
    return ModelSpec(path=str(path), devices=devices(ranks), dtype="float32")
