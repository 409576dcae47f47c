"""``verify --vae``: a VAE whose rows are split over ranks, compared with diffusers' own in one process."""

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel_backend.autoencoder import codec
from parallel_backend.autoencoder.chunks import Chunks
from parallel_backend.autoencoder.own_tiles import OwnTiles
from parallel_backend.autoencoder.spatial import Unsplittable, formula
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.client.client import Client
from parallel_backend.client.devices import choose_devices
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.layout.split import Split
from parallel_backend.loading import load
from parallel_backend.protocol.messages import Decode, Encode
from parallel_backend.protocol.model_spec import DType, ModelSpec
from parallel_backend.protocol.tensors import DTYPES
from parallel_backend.vaes import module_class_of, vae_of
from parallel_backend.verify import real

from . import kinds, stock
from .kinds import KINDS

TOLERANCE = 1e-4
"""Largest difference in float32 that passes: of a pixel, where black to white is 2, or of a value of a latent."""
HALF = 2.0
"""Largest difference in half precision that passes, in differences of diffusers' own VAE in that dtype."""
ROUNDS = 5
"""Timed calls of each."""
PICTURE, VIDEO = (17, 12), (3, 17, 12)
"""Default sizes of latents."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a comparison.

    Attributes:
        cell: what was compared.
        max_abs_error: largest difference of a value from diffusers' result in float32.
        own_error: the same of diffusers' own VAE in the dtype; 0 in float32.
        bytes_sent_per_rank: as counted.
        bytes_formula_per_rank: as the formula predicts.
        memory_growth: by rank, peak bytes beyond those before the call.
        memory_growth_one_rank: the same if one rank does all the work.
        seconds: median of the timed calls.
        seconds_one_rank: the same if one rank does all the work.
        fastest: seconds of the fastest call, which other work on the machine disturbs least.
        fastest_one_rank: the same if one rank does all the work.
    """

    cell: str
    max_abs_error: float
    own_error: float
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
        """Whether it differs from diffusers too much, or the bytes sent differ from the formula."""
        bar = max(TOLERANCE, HALF * self.own_error)
        return not self.max_abs_error <= bar or self.bytes_sent_per_rank != self.bytes_formula_per_rank

    def describe(self) -> str:
        """Format the result as text."""
        outcome = "FAILED" if self.failed else "as near" if self.own_error else "equal"
        text = f"{outcome:8} {self.cell}: largest difference {self.max_abs_error:.1e}"
        if self.own_error:
            text += f", of diffusers' own {self.own_error:.1e}"
        if self.bytes_sent_per_rank != self.bytes_formula_per_rank:
            text += f"; sent {self.bytes_sent_per_rank} bytes, the formula says {self.bytes_formula_per_rank}"
        grown, one_rank = (size / 2**20 for size in (max(self.memory_growth), self.memory_growth_one_rank))
        return text + (
            f"\n  {self.seconds:.2f} s, one rank {self.seconds_one_rank:.2f} s: "
            f"{self.seconds_one_rank / self.seconds:.2f}x, by the fastest calls "
            f"{self.fastest_one_rank / self.fastest:.2f}x\n  memory grew by at most {grown:.0f} MiB per rank, on one "
            f"rank by {one_rank:.0f} MiB{f': {grown / one_rank:.2f}' if one_rank else ''}"
        )


@dataclass(frozen=True, kw_only=True)
class VaeCase:
    """What the command line asks for.

    Attributes:
        kind: one of ``KINDS``, or a checkpoint's folder.
        ranks: number of ranks.
        devices: the option ``--devices``. diffusers' own VAE runs on the first one.
        encode: whether to encode instead of decode.
        width: channels of the first level of one of ``KINDS``.
        size: of the latent; None for ``PICTURE`` or ``VIDEO``.
        dtype: that the ranks compute in.
        balance: the ranks' speeds, by which they share rows; empty for even shares.
    """

    kind: str
    ranks: int
    devices: str | None = None
    encode: bool = False
    width: int = kinds.WIDTH
    size: tuple[int, ...] | None = None
    dtype: DType = "float32"
    balance: tuple[float, ...] = ()

    @property
    def layout(self) -> ParallelLayout:
        """The layout whose ranks share the rows."""
        return ParallelLayout(ring=self.ranks, balance=self.balance)


def compare(asked: VaeCase) -> Report:
    """Compare results, count bytes and measure time on a temporary backend.

    Raises:
        InvalidRequest: there is no such kind, or the size does not fit it.
    """
    with tempfile.TemporaryDirectory(prefix="verify-vae-") as folder:
        subject = VaeComparison(asked, Path(folder))
        expected, formula_bytes = subject.wanted(), subject.formula()
        own_error = subject.own_error(expected)
        torch.cuda.empty_cache()  # the ranks need the memory
        with temporary_backend(Path(folder)) as client:
            return subject.compare(client, expected, formula_bytes, own_error=own_error)


class VaeComparison:
    """A VAE in a folder, and its inputs.

    Attributes:
        asked: the case.
        devices: to split over.
        checkpoint: the VAE's checkpoint.
        vae: the checkpoint's VAE (shapes, scale and calls).
        device: where diffusers' own VAE runs.
        message: the request, which counts bytes.
        given: the request's tensors, by name.
    """

    def __init__(self, asked: VaeCase, folder: Path) -> None:
        self.asked = asked
        self.devices = choose_devices(asked.devices, {f"--ranks {asked.ranks}": asked.ranks})
        path = _folder(asked, folder)
        self.checkpoint = open_checkpoint(path)
        self.vae = vae_of(self.checkpoint)
        self.device = torch.device(self.devices.of_rank(0))
        self.message, self.given = self._request(path)

    def wanted(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return diffusers' result in the form of a reply, but pixels in the VAE's own range, about -1..1."""
        cls = module_class_of(self.checkpoint.components["vae"])
        module = cls.from_pretrained(str(self.checkpoint.path), subfolder="vae", torch_dtype=dtype)
        module = stock.stock(module.to(self.device).eval(), self.vae)
        with torch.no_grad():
            if self.asked.encode:
                pixels = self.given["pixels"].to(self.device).movedim(-1, 1) * 2 - 1
                return stock.encode(module, pixels.to(dtype)).float().cpu()
            return stock.decode(module, self.given["latent"].to(self.device, dtype)).movedim(1, -1).float().cpu()

    def own_error(self, expected: Tensor) -> float:
        """Return the largest difference of diffusers' own result in the case's dtype from that in float32."""
        if self.asked.dtype == "float32":
            return 0.0
        return float((self.wanted(DTYPES[self.asked.dtype]) - expected).abs().max())

    def formula(self) -> tuple[int, ...]:
        """The bytes that each rank should send."""
        (source,) = self.given.values()
        own = OwnTiles.of(self.vae, source.shape, encode=self.asked.encode, speeds=self.asked.balance)
        if own:
            ranks, itemsize = min(self.asked.ranks, len(own.parts)), DTYPES[self.asked.dtype].itemsize
            return tuple(own.bytes_sent(rank, ranks, itemsize) for rank in range(ranks))
        module = load.load_vae(self.checkpoint, self.device, DTYPES[self.asked.dtype])
        ticks: list[int] = []
        try:
            with torch.no_grad(), formula.record_calls(module) as calls:
                result = self._run(module, lambda done, total: ticks.append(done))
        except Unsplittable as reason:
            raise InvalidRequest(f"{self.asked.kind} cannot be split; it runs on one rank: {reason}") from reason
        height = self._size()[-2]
        cut = Split.of(self.asked.layout).rows(height, min(self.asked.ranks, height))
        chunks = Chunks.of(self.vae, source.shape, encode=self.asked.encode)
        alike = len(set(self.asked.balance)) < 2
        if len(cut.sizes) == self.asked.ranks and alike and chunks.keep_busy(self.asked.ranks):
            return tuple(chunks.bytes_sent(rank, self.asked.ranks, source, result) for rank in range(self.asked.ranks))
        shared = (source, result, module.dtype.itemsize, len(ticks))
        return tuple(formula.bytes_sent(calls, cut, rank, *shared) for rank in range(len(cut.sizes)))

    def compare(
        self,
        client: Client,
        expected: Tensor,
        formula_bytes: tuple[int, ...],
        rounds: int = ROUNDS,
        own_error: float = 0.0,
    ) -> Report:
        """Run the request on all ranks and on one, and compare with diffusers' result and the formula.

        Args:
            client: of a backend.
            expected: diffusers' result, see ``wanted``.
            formula_bytes: see ``formula``.
            rounds: timed calls of each.
            own_error: see ``own_error``.
        """
        one_device = replace(self.message.model, devices=self.devices.first(1))
        split, whole = self.message, replace(self.message, model=one_device)
        client.call(split, self.given)  # loads the weights, so that they do not count as growth
        reply, reply_one = (client.call(message, self.given) for message in (split, whole))
        timed = [[self._seconds(client, message) for message in (split, whole)] for _ in range(rounds)]
        seconds, seconds_one = zip(*timed, strict=True)
        return Report(
            cell=str(self),
            max_abs_error=self.error(reply, expected),
            own_error=own_error,
            bytes_sent_per_rank=tuple(reply["sent_bytes"].tolist()),
            bytes_formula_per_rank=formula_bytes,
            memory_growth=tuple(reply["grown_bytes"].tolist()),
            memory_growth_one_rank=int(reply_one["grown_bytes"][0]),
            seconds=statistics.median(seconds),
            seconds_one_rank=statistics.median(seconds_one),
            fastest=min(seconds),
            fastest_one_rank=min(seconds_one),
        )

    @property
    def makes(self) -> str:
        """Name of the result in a reply."""
        return "latent" if self.asked.encode else "pixels"

    def error(self, reply: Mapping[str, Tensor], expected: Tensor) -> float:
        """Return the largest difference between a reply's result and the expected one.

        Pixels are expected in -1..1, and 0..1 in a reply of the lab's ranks, which do not clamp them.
        """
        result = reply[self.makes] if self.asked.encode else reply[self.makes] * 2 - 1
        assert result.shape == expected.shape, (result.shape, expected.shape)
        return float((result - expected).abs().max())

    def __str__(self) -> str:
        operation = "encode" if self.asked.encode else "decode"
        size = "x".join(map(str, self._size()))
        dtype = "" if self.asked.dtype == "float32" else f", {self.asked.dtype}"
        ranks = f"{self.asked.ranks} ranks" + (f" of speeds {self.asked.balance}" if self.asked.balance else "")
        return f"{self.asked.kind}, {operation}, latent {size}, {ranks}{dtype}"

    def _request(self, path: Path) -> tuple[Decode | Encode, dict[str, Tensor]]:
        layout = self.asked.layout if self.asked.balance else None
        spec = ModelSpec(path=str(path), devices=self.devices, dtype="float32", layout=layout)
        if self.asked.encode:
            return Encode(model=spec, dtype=self.asked.dtype, measure="bytes"), {"pixels": self._pixels()}
        generator = torch.Generator().manual_seed(1)
        latent = torch.randn(1, self.vae.scale.channels, *self._size(), generator=generator)
        return Decode(model=spec, dtype=self.asked.dtype, measure="bytes"), {"latent": latent}

    def _pixels(self) -> Tensor:
        """Return random pixels in 0..1, ``[1, T, H, W, 3]`` for videos and ``[1, H, W, 3]`` for pictures.

        All of their frames are encoded, though some latents decode to more.
        """
        *frames, height, width = self._size()
        pixel_frames = [self.vae.encoded_frames(self.vae.pixel_frames(count)) for count in frames]
        spatial = self.vae.scale.spatial
        shape = (1, *pixel_frames, height * spatial, width * spatial, 3)
        return torch.rand(shape, generator=torch.Generator().manual_seed(2))

    def _size(self) -> tuple[int, ...]:
        default = VIDEO if self.vae.scale.video else PICTURE
        size = self.asked.size or default
        if len(size) != len(default):
            form = "TxHxW" if len(default) > 2 else "HxW"
            raise InvalidRequest(f"--size {'x'.join(map(str, size))}: latents of {self.asked.kind} are {form}")
        return size

    def _run(self, module: Any, tick: codec.ProgressCallback) -> Tensor:
        """Encode or decode in this process, as the engine does on one rank."""
        (source,) = self.given.values()
        return (codec.encode if self.asked.encode else codec.decode)(self.vae, module, source.to(self.device), tick)

    def _seconds(self, client: Client, message: Decode | Encode) -> float:
        return float(client.call(replace(message, measure="seconds"), self.given)["seconds"])


def _folder(asked: VaeCase, parent: Path) -> Path:
    """Return the checkpoint's folder; one of ``KINDS`` is first written below ``parent``."""
    if asked.kind in KINDS:
        return kinds.write(parent / asked.kind, KINDS[asked.kind].module(asked.width))
    try:
        return real.find_folder(asked.kind)
    except InvalidRequest as error:
        raise InvalidRequest(f"--vae {asked.kind}: {', '.join(KINDS)}, or a checkpoint's folder would work") from error
