"""What comes of one comparison with a reference."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import msgspec
from torch import Tensor

FORWARD, VAE, SAMPLING = 1e-5, 1e-4, 1e-4
"""Largest relative error in float32 that counts as equal."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a result is from the reference.

    Attributes:
        cell: what was compared.
        error: largest difference of a value, relative to the reference's largest value.
        bound: the largest error that counts as equal.
        note: what differs, if that is no number.
        skipped: why nothing was compared.
    """

    cell: str
    error: float = 0.0
    bound: float = 0.0
    note: str = ""
    skipped: str = ""

    @property
    def failed(self) -> bool:
        """Whether the result differs too much. No number at all does."""
        return not self.skipped and not self.error <= self.bound

    def describe(self) -> str:
        """Format the result as a line."""
        if self.skipped:
            return f"skipped  {self.cell}: {self.skipped}"
        line = f"{'FAILED' if self.failed else 'equal '}   {self.cell}: {self.error:.1e}, at most {self.bound:.0e}"
        return f"{line}; {self.note}" if self.note else line


def of_tensors(cell: str, got: Tensor, wanted: Tensor, bound: float) -> Difference:
    """Compare a tensor with the reference's."""
    if got.shape != wanted.shape:
        note = f"the shape is {list(got.shape)} instead of {list(wanted.shape)}"
        return Difference(cell=cell, error=float("inf"), bound=bound, note=note)
    largest = wanted.abs().max().clamp_min(1e-30)
    return Difference(cell=cell, error=float((got - wanted).abs().max() / largest), bound=bound)


def of_texts(cell: str, got: str, wanted: str) -> Difference:
    """Compare a text with the reference's."""
    return Difference(cell=cell, error=float(got != wanted), note="" if got == wanted else f"{got!r} != {wanted!r}")


def show(differences: Iterable[Difference], *, as_json: bool) -> int:
    """Print each difference when it is there, or all as JSON at the end, and return the exit status."""
    seen: list[Difference] = []
    for difference in differences:
        seen.append(difference)
        if not as_json:
            print(difference.describe(), flush=True)
    failed, skipped = sum(each.failed for each in seen), sum(bool(each.skipped) for each in seen)
    if as_json:
        print(msgspec.json.encode([asdict(each) | {"failed": each.failed} for each in seen]).decode())
    else:
        print(f"{len(seen) - skipped} compared, {failed} failed, {skipped} skipped")
    return int(failed > 0)
