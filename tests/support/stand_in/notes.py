"""What a recording notes on one rank."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

_ROOT = Path(__file__).parents[3]
_OWN = f"{_ROOT / 'parallel_backend'}/"
_PASSING_ON = ("attention/routing.py", "autoencoder/spatial/watch.py")
"""Files whose lines stand between a library's function and torch's."""
_LIBRARIES = ("diffusers", "transformers")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of an exchange.

    Attributes:
        kind: ``send``, ``receive``, or a collective.
        peer: the rank that it goes to or comes from, or a broadcast's root; -1 if there is none.
        numel: number of values.
        dtype: of the values.
        contiguous: whether the values lie in memory in the order of the dims.
    """

    kind: str
    peer: int
    numel: int
    dtype: torch.dtype
    contiguous: bool

    @property
    def is_message(self) -> bool:
        """Whether it goes from one rank to one other."""
        return self.kind in ("send", "receive")


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What a rank starts at once in a group: a collective, or a batch of sends and receives.

    Attributes:
        group: name of the group, the same on all of its ranks.
        ranks: the group's ranks.
        devices: the devices of the tensors.
        parts: the tensors.
        after: earlier exchanges of this rank, by number, that are complete before this one starts: the host, or the
            GPU's stream, has waited for them.
        where: the line that starts it.
    """

    group: str
    ranks: tuple[int, ...]
    devices: frozenset[str]
    parts: tuple[Part, ...]
    after: frozenset[int]
    where: str

    @property
    def on_gpu(self) -> bool:
        """Whether NCCL carries it; otherwise gloo does."""
        return "cpu" not in self.devices


@dataclass(frozen=True, kw_only=True)
class Wait:
    """The host waits for the GPU.

    Attributes:
        why: what it waits for.
        op: the operator, or the function of ``torch.cuda``.
        where: the line.
    """

    why: str
    op: str
    where: str

    def __str__(self) -> str:
        return f"{self.why} ({self.op}) in {self.where}"


@dataclass(kw_only=True)
class Notes:
    """What was noted on one rank.

    Attributes:
        mixed: operators with tensors of several devices that torch refuses.
        waits: where the host waits for the GPU, in order.
        marks: how many waits there were at each progress report, but for loading. Rank 0 alone reports.
        exchanges: what the rank starts to exchange, in order.
        operators: number of operators that ran on stand-in tensors.
    """

    mixed: list[str] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    operators: int = 0

    @property
    def part(self) -> list[Wait]:
        """The waits between two progress reports, where there are most of them."""
        parts = [self.waits[start:end] for start, end in zip(self.marks, self.marks[1:], strict=False)]
        return max(parts, key=len)


def here() -> str:
    """Return the line of this repository that runs now, and that of a library that it calls."""
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame:
        file = frame.f_code.co_filename
        if file.startswith(_OWN) and not file.endswith(_PASSING_ON):
            own = f"{Path(file).relative_to(_ROOT)}:{frame.f_lineno}"
            return f"{own}, {library}" if library else own
        package = next((name for name in _LIBRARIES if f"/{name}/" in file), None)
        if package and not library:
            library = f"{package}/{file.rpartition(f'/{package}/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return library or "a test"
