"""Exchanges under computation, as the strategies run them: both together, and each without the other."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn

from parallel_backend.attention.kernels import AUTO, choose
from parallel_backend.denoiser.stage_boundary import StageBoundary
from parallel_backend.distributed.mesh import RankMesh
from parallel_backend.strategies import ring, sharded_weights


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the tensors are.

    Attributes:
        dtype: of all tensors.
        heads: of attention, with ``head_size`` features each.
        tokens: of each rank.
        width: features of a token in the blocks.
        rows: tokens that a block computes at once.
        count: blocks, and patches of a pipeline.
    """

    dtype: torch.dtype
    heads: int
    head_size: int
    tokens: int
    width: int
    rows: int
    count: int


ON_GPU = Sizes(dtype=torch.bfloat16, heads=24, head_size=128, tokens=8192, width=4096, rows=4096, count=8)
ON_CPU = Sizes(dtype=torch.float32, heads=4, head_size=64, tokens=512, width=256, rows=512, count=4)


class Work(ABC):
    """Work in which ranks exchange tensors while they compute.

    Attributes:
        share: the part of the exchange that can overlap with computation.
        busy: the part of the computation that can overlap with the exchange.
    """

    share: float
    busy: float

    @abstractmethod
    def both(self) -> None:
        """Exchange and compute."""

    @abstractmethod
    def compute(self) -> None:
        """Compute the same without an exchange."""

    @abstractmethod
    def exchange(self) -> None:
        """Exchange the same without a computation."""


class RingWork(Work):
    """``ring``: attention to one block of keys and values while the next one arrives."""

    def __init__(self, mesh: RankMesh, device: torch.device, sizes: Sizes) -> None:
        axis = mesh.axes["ring"]
        shape = (1, sizes.tokens, sizes.heads, sizes.head_size)
        self._qkv = [torch.randn(shape, device=device, dtype=sizes.dtype).transpose(1, 2) for _ in range(3)]
        kernel = choose(AUTO, device, sizes.dtype, {sizes.head_size})
        self._attention = ring.RingAttention(axis, [sizes.tokens] * axis.size, [None] * axis.size, kernel)
        self.share, self.busy = 1.0, (axis.size - 1) / axis.size

    def both(self) -> None:
        """See ``Work``."""
        self._attention(*self._qkv, scale=None, sample=None)

    def compute(self) -> None:
        """See ``Work``. It attends to whatever the memory of the other blocks holds."""
        with mock.patch.object(ring, "start_messages", return_value=()):
            self.both()

    def exchange(self) -> None:
        """See ``Work``. Without queries there is nothing to attend."""
        query, key, value = self._qkv
        self._attention(query[:, :, :0], key, value, scale=None, sample=None)


class _Block(nn.Module):
    """A block of a transformer: some products. An idle one has the same weights and computes nothing."""

    def __init__(self, sizes: Sizes, device: torch.device, *, idle: bool) -> None:
        super().__init__()
        shape, scale = (sizes.width, sizes.width), sizes.width**-0.5
        weights = [torch.randn(shape, device=device, dtype=sizes.dtype) * scale for _ in range(3)]
        self.weights = nn.ParameterList([nn.Parameter(each, requires_grad=False) for each in weights])
        self.idle = idle

    def forward(self, x: Tensor) -> Tensor:
        for weight in [] if self.idle else self.weights:
            x = x @ weight
        return x


class ShardedWork(Work):
    """``shard_weights``: the weights of a block arrive while the block before it computes."""

    def __init__(self, mesh: RankMesh, device: torch.device, sizes: Sizes) -> None:
        self._x = torch.randn(sizes.rows, sizes.width, device=device, dtype=sizes.dtype)
        self._whole = self._model(sizes, device, idle=False)[1]
        self._both, self._idle = (self._sharded(mesh, sizes, device, idle=idle) for idle in (False, True))
        self.share = self.busy = (sizes.count - 1) / sizes.count

    @staticmethod
    def _model(sizes: Sizes, device: torch.device, *, idle: bool) -> tuple[list[nn.Module], Callable[[Tensor], Tensor]]:
        blocks: list[nn.Module] = [_Block(sizes, device, idle=idle) for _ in range(sizes.count)]

        def run(x: Tensor) -> Tensor:
            for block in blocks:
                x = block(x)
            return x

        return blocks, run

    def _sharded(self, mesh: RankMesh, sizes: Sizes, device: torch.device, *, idle: bool) -> Callable[[Tensor], Tensor]:
        blocks, run = self._model(sizes, device, idle=idle)
        assert mesh.weights_axis is not None
        # The backend passes a ``State`` through; these blocks need a tensor alone.
        sharded = sharded_weights.shard(blocks, run, mesh.weights_axis, device.type, lambda _: blocks)  # type: ignore[arg-type]
        return sharded  # type: ignore[return-value]

    def both(self) -> None:
        """See ``Work``."""
        self._both(self._x)

    def compute(self) -> None:
        """See ``Work``."""
        self._whole(self._x)

    def exchange(self) -> None:
        """See ``Work``."""
        self._idle(self._x)


class PipeWork(Work):
    """``pipe``: a patch arrives while the stage computes the one before it."""

    def __init__(self, mesh: RankMesh, device: torch.device, sizes: Sizes) -> None:
        assert mesh.pipe_links is not None
        self._axis, self._groups = mesh.axes["pipe"], mesh.pipe_links[:2]
        self._patch = torch.randn(sizes.rows, sizes.width, device=device, dtype=sizes.dtype)
        self._block, self._count, stages = _Block(sizes, device, idle=False), sizes.count, self._axis.size
        self.share = (sizes.count - 1) / (sizes.count + stages - 2)  # nobody computes while the first patch arrives
        self.busy = (sizes.count - 1) / (sizes.count + stages - 1)

    def both(self) -> None:
        """See ``Work``."""
        self._stream(self._block)

    def compute(self) -> None:
        """See ``Work``. The last stage begins when the stages before it have computed one patch each."""
        for _ in range(self._count + self._axis.size - 1):
            self._block(self._patch)

    def exchange(self) -> None:
        """See ``Work``."""
        self._stream(lambda patch: patch)

    def _stream(self, block: Callable[[Tensor], Tensor]) -> None:
        """Do what ``PipeFusion`` does in one call."""
        boundary = StageBoundary(self._axis, self._groups)
        patch, shapes = self._patch, {"x": self._patch.shape}
        incoming = None if boundary.first else boundary.expect(shapes, patch)
        for number in range(self._count):
            if incoming:
                patch = incoming.wait()["x"]
                incoming = boundary.expect(shapes, patch) if number + 1 < self._count else None
            result = block(patch)
            if not boundary.last:
                boundary.send({"x": result})
        boundary.finish()


WORKS: dict[str, tuple[str, Callable[[RankMesh, torch.device, Sizes], Work]]] = {
    "ring": ("ring={ranks}", RingWork),
    "shard_weights": ("ulysses={ranks} shard_weights", ShardedWork),
    "pipe": ("pipe={ranks}", PipeWork),
}
"""By name: the layout for a number of ranks, and a function that makes its work on the layout's mesh."""
