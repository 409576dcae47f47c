"""What was predicted beside what was measured, and the regret of a choice among it."""

import statistics
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A layout that was timed.

    Attributes:
        layout: the layout.
        predicted: seconds of a forward or a sampling, the median of all probes.
        measured: the same, the median of all rounds.
    """

    layout: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class Cells:
    """All layouts of a family and a size.

    Attributes:
        what: family, tokens and guidance.
        cells: by layout.
        chosen: what the planner takes.
        settled: what it takes after it has tried that beside its rivals, by the times here; "" for samplings
            on the ranks, which try nothing.
        rule: what the backend takes without a plan.
        probing: seconds of a probe, the median.
    """

    what: str
    cells: tuple[Cell, ...]
    chosen: str
    settled: str
    rule: str
    probing: float

    @property
    def failed(self) -> bool:
        """Nothing is a failure: errors are reported."""
        return False

    def regret(self, layout: str) -> float:
        """By how much a layout's time exceeds the best one's."""
        by_layout = {cell.layout: cell.measured for cell in self.cells}
        return by_layout[layout] / min(by_layout.values()) - 1

    def _over(self, layout: str) -> str:
        timed = layout in {cell.layout for cell in self.cells}
        return f"{100 * self.regret(layout):.0f} % over" if timed else "which was not timed beside"

    def describe(self) -> str:
        """Format the cells as a table."""
        lines = [f"{self.what}: {'predicted':>10} {'measured':>10} {'error':>7}"]
        lines += [
            f"{cell.layout:34} {1e3 * cell.predicted:8.1f} ms {1e3 * cell.measured:8.1f} ms {100 * cell.error:6.0f}%"
            for cell in self.cells
        ]
        settled = f', and "{self.settled}" when it has tried, {self._over(self.settled)} it' if self.settled else ""
        error = statistics.median(abs(cell.error) for cell in self.cells)
        lines.append(
            f'median error {100 * error:.0f} %; a probe takes {self.probing:.1f} s; the planner takes "{self.chosen}", '
            f'{self._over(self.chosen)} the best{settled}; without a plan "{self.rule}" is taken, '
            f"{self._over(self.rule)} it"
        )
        return "\n".join(lines)
