"""``verify --vae``: a VAE split by rows over ranks, held to diffusers' own decode or encode on one process."""

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...autoencoder import codec
from ...autoencoder.spatial import Unsplittable, formula
from ...checkpoint.checkpoint import Checkpoint
from ...client.client import Client
from ...client.temporary_backend import temporary_backend
from ...errors import InvalidRequest
from ...layout.partition import Partition
from ...loading import load
from ...protocol.messages import Decode, Devices, Encode, ModelSpec
from ...vaes import vae_of
from ..forward import real
from . import kinds, stock
from .kinds import KINDS

TOLERANCE = 1e-4
"""Largest difference of a pixel, of 2 from black to white, or of a value of a latent."""
ROUNDS = 5
PICTURE, VIDEO = (17, 12), (3, 17, 12)
"""Sizes of latents."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of it.

    Attributes:
        memory_growth: by rank, bytes held at most beyond what was held before; ``memory_growth_one_rank``: the same
            where one rank does it all.
        seconds, seconds_one_rank: medians of ``ROUNDS`` turns; ``fastest``, ``fastest_one_rank``: what other work on
            the machine disturbs least.
    """

    cell: str
    max_abs_error: float
    bytes_sent_per_rank: tuple[int, ...]
    bytes_formula_per_rank: tuple[int, ...]
    memory_growth: tuple[int, ...]
    memory_growth_one_rank: int
    seconds: float
    seconds_one_rank: float
    fastest: float
    fastest_one_rank: float

    @property
    def failed(self) -> bool:
        """Whether it differs from diffusers, or sends other than the formula says."""
        return not self.max_abs_error <= TOLERANCE or self.bytes_sent_per_rank != self.bytes_formula_per_rank

    def describe(self) -> str:
        """The same for people."""
        said = f"{'FAILED' if self.failed else 'equal '}   {self.cell}: largest difference {self.max_abs_error:.1e}"
        if self.bytes_sent_per_rank != self.bytes_formula_per_rank:
            said += f"; sent {self.bytes_sent_per_rank}, the formula says {self.bytes_formula_per_rank}"
        grown, alone = (size / 2**20 for size in (max(self.memory_growth), self.memory_growth_one_rank))
        return said + (
            f"\n  {self.seconds:.2f} s, one rank {self.seconds_one_rank:.2f} s: "
            f"{self.seconds_one_rank / self.seconds:.2f}x, of the fastest turns "
            f"{self.fastest_one_rank / self.fastest:.2f}x\n  memory grew by {grown:.0f} MiB on a rank, of one rank by "
            f"{alone:.0f} MiB{f': {grown / alone:.2f}' if alone else ''}"
        )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asks for.

    Attributes:
        kind: one of ``KINDS``, or a checkpoint's folder; ``width``: of a kind, see ``vae_kinds``.
        size: of the latent; None for ``PICTURE`` or ``VIDEO``.
    """

    kind: str
    ranks: int
    encode: bool = False
    width: int = kinds.WIDTH
    size: tuple[int, ...] | None = None


def ask(asked: Asked) -> Report:
    """Compare, count and time on a backend of its own.

    Raises:
        InvalidRequest: there is no such kind, or the size does not fit it.
    """
    with tempfile.TemporaryDirectory(prefix="verify-vae-") as folder:
        subject = Subject(asked, Path(folder))
        wanted, sent = subject.wanted(), subject.formula()
        with temporary_backend(Path(folder)) as client:
            return subject.compare(client, wanted, sent)


class Subject:
    """A VAE in a folder, and what goes into it."""

    def __init__(self, asked: Asked, folder: Path) -> None:
        self.asked, self.devices = asked, _devices(asked)
        path = _folder(asked, folder)
        self.checkpoint = Checkpoint.open(path)
        self.kind = vae_of(self.checkpoint)
        self.device = torch.device(self.devices.kind, self.devices.indices[0])
        self.message, self.given = self._request(path)

    def wanted(self) -> Tensor:
        """What diffusers makes of it, as the request has it."""
        import diffusers

        cls = getattr(diffusers, self.checkpoint.components["vae"])
        module = cls.from_pretrained(str(self.checkpoint.path), subfolder="vae", torch_dtype=torch.float32)
        module = stock.stock(module.to(self.device).eval(), self.kind)
        with torch.no_grad():
            if self.asked.encode:
                return stock.encode(module, self.given["pixels"].to(self.device).movedim(-1, 1) * 2 - 1).cpu()
            return stock.decode(module, self.given["latent"].to(self.device)).movedim(1, -1).cpu()

    def formula(self) -> tuple[int, ...]:
        """The bytes that each rank should send."""
        module = load.load_vae(self.checkpoint, self.device)
        parts: list[int] = []
        try:
            with torch.no_grad(), formula.seen(module) as calls:
                made = self._work(module, lambda done, total: parts.append(done))
        except Unsplittable as reason:
            raise InvalidRequest(f"{self.asked.kind} cannot be split, and works on one rank: {reason}") from reason
        (given,), height = self.given.values(), self._size()[-2]
        cut = Partition.even(height, min(self.asked.ranks, height))
        return tuple(formula.bytes_sent(calls, cut, rank, given, made, len(parts)) for rank in range(len(cut.sizes)))

    def compare(self, client: Client, wanted: Tensor, sent: tuple[int, ...]) -> Report:
        """Have the ranks do it, all of them and one alone."""
        alone = replace(self.message.model, devices=replace(self.devices, indices=self.devices.indices[:1]))
        together, one = self.message, replace(self.message, model=alone)
        client.call(together, self.given)  # with which the weights are read: they are no growth of what follows
        got, least = (client.call(replace(message, measure=True), self.given) for message in (together, one))
        turns = [[self._seconds(client, message) for message in (together, one)] for _ in range(ROUNDS)]
        taken, taken_one = zip(*turns, strict=True)
        return Report(
            cell=str(self),
            max_abs_error=self.error(got, wanted),
            bytes_sent_per_rank=tuple(got["sent_bytes"].tolist()),
            bytes_formula_per_rank=sent,
            memory_growth=tuple(got["grown_bytes"].tolist()),
            memory_growth_one_rank=int(least["grown_bytes"]),
            seconds=statistics.median(taken),
            seconds_one_rank=statistics.median(taken_one),
            fastest=min(taken),
            fastest_one_rank=min(taken_one),
        )

    @property
    def makes(self) -> str:
        """The name of what comes out."""
        return "latent" if self.asked.encode else "pixels"

    def error(self, got: Mapping[str, Tensor], wanted: Tensor) -> float:
        """The largest difference."""
        made = got[self.makes]
        assert made.shape == wanted.shape, (made.shape, wanted.shape)
        return float((made - wanted).abs().max())

    def __str__(self) -> str:
        doing = "encode" if self.asked.encode else "decode"
        size = "x".join(map(str, self._size()))
        return f"{self.asked.kind}, {doing}, latent {size}, {self.asked.ranks} ranks"

    def _request(self, path: Path) -> tuple[Decode | Encode, dict[str, Tensor]]:
        spec = ModelSpec(path=str(path), devices=self.devices, dtype="float32")
        if self.asked.encode:
            return Encode(model=spec), {"pixels": self._pixels()}
        generator = torch.Generator().manual_seed(1)
        latent = torch.randn(1, self.kind.scale.channels, *self._size(), generator=generator)
        return Decode(model=spec, clamp=False), {"latent": latent}

    def _pixels(self) -> Tensor:
        """``[1, T, H, W, 3]`` in 0..1, or a picture's."""
        *frames, height, width = self._size()
        times = [self.kind.pixel_frames(count) for count in frames]
        spatial = self.kind.scale.spatial
        shape = (1, *times, height * spatial, width * spatial, 3)
        return torch.rand(shape, generator=torch.Generator().manual_seed(2))

    def _size(self) -> tuple[int, ...]:
        usual = VIDEO if self.kind.scale.video else PICTURE
        size = self.asked.size or usual
        if len(size) != len(usual):
            form = "TxHxW" if len(usual) > 2 else "HxW"
            raise InvalidRequest(f"--size {'x'.join(map(str, size))}: latents of {self.asked.kind} are {form}")
        return size

    def _work(self, module: Any, tick: codec.Tick) -> Tensor:
        """What one process makes of it as the engine does."""
        (given,) = self.given.values()
        return (codec.encode if self.asked.encode else codec.decode)(self.kind, module, given.to(self.device), tick)

    def _seconds(self, client: Client, message: Decode | Encode) -> float:
        return float(client.call(replace(message, timed=True), self.given)["seconds"])


def _devices(asked: Asked) -> Devices:
    if asked.kind not in KINDS:
        return real.choose_devices(asked.ranks)
    return Devices(kind="cpu", indices=tuple(range(asked.ranks)))


def _folder(asked: Asked, into: Path) -> Path:
    """That of the checkpoint, written if it is one of ours."""
    if asked.kind in KINDS:
        return kinds.write(into / asked.kind, KINDS[asked.kind].module(asked.width))
    try:
        return real.folder(asked.kind)
    except InvalidRequest as error:
        raise InvalidRequest(f"--vae {asked.kind}: {', '.join(KINDS)}, or a checkpoint's folder would work") from error
