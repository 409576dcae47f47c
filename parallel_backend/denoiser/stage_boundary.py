"""The stages of a pipeline: which blocks each holds, and how activations go from one to the next.

The cut into consecutive ranges whose largest cost is least is the linear partition problem (Skiena, The Algorithm
Design Manual), solved by dynamic programming.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..distributed.collectives import PendingSends, Work, receive, wait
from ..distributed.mesh import Axis
from ..interfaces.state import State


class StageBoundary:
    """The way from the stage before and to the stage after.

    What leaves is kept until it has left; ``finish`` waits for that.

    Args:
        ways: the stages in two groups; each stage receives in one of them and sends in the other.
    """

    def __init__(self, axis: Axis, ways: Sequence[Axis]) -> None:
        self.axis, self._ways = axis, ways
        self._leaving = PendingSends()

    @property
    def first(self) -> bool:
        """Whether nothing comes before this stage."""
        return self.axis.index == 0

    @property
    def last(self) -> bool:
        """Whether nothing comes after this stage."""
        return self.axis.index == self.axis.size - 1

    def expect(self, shapes: Mapping[str, torch.Size], like: Tensor) -> "IncomingStreams":
        """Start to receive the streams that the stage before makes, in the dtype and on the device of a tensor."""
        flat = like.new_empty(sum(shape.numel() for shape in shapes.values()))
        before = self.axis.index - 1
        return IncomingStreams(shapes, flat, receive(flat, self._ways[before % 2], before))

    def send(self, streams: Mapping[str, Tensor]) -> None:
        """Start to send streams to the stage after."""
        assert len({stream.dtype for stream in streams.values()}) == 1, "the stage after expects one dtype"
        flat = torch.cat([stream.reshape(-1) for stream in streams.values()])
        self._leaving.send(flat, self._ways[self.axis.index % 2], self.axis.index + 1)

    def finish(self) -> None:
        """Wait until all has left."""
        self._leaving.finish()


class IncomingStreams:
    """Streams on their way here."""

    def __init__(self, shapes: Mapping[str, torch.Size], flat: Tensor, works: Sequence[Work]) -> None:
        self._shapes, self._flat, self._works = shapes, flat, works

    def wait(self) -> dict[str, Tensor]:
        """The streams."""
        wait(self._works)
        parts = self._flat.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


def shapes(state: State) -> dict[str, torch.Size]:
    """The shapes of the streams."""
    return {name: stream.shape for name, stream in state.streams.items()}
