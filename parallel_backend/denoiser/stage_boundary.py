"""How activations travel from one stage of a pipeline to the next."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..distributed.collectives import PendingSends, Work, receive, wait_all
from ..distributed.mesh import Axis
from ..interfaces.state import State


class StageBoundary:
    """This stage's links to the stage before it and the stage after it.

    Sends do not block. Each sent tensor stays referenced until it has left; ``finish`` waits for that.

    Args:
        groups: two process groups over the stages. A stage receives in one and sends in the other, so that the two
            directions never wait for each other.
    """

    def __init__(self, axis: Axis, groups: Sequence[Axis]) -> None:
        self.axis, self._groups = axis, groups
        self._pending = PendingSends()

    @property
    def first(self) -> bool:
        """Whether this is the first stage."""
        return self.axis.index == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage."""
        return self.axis.index == self.axis.size - 1

    def expect(self, shapes: Mapping[str, torch.Size], like: Tensor) -> "IncomingStreams":
        """Start to receive the previous stage's streams, with the dtype and device of ``like``."""
        flat = like.new_empty(sum(shape.numel() for shape in shapes.values()))
        before = self.axis.index - 1
        return IncomingStreams(shapes, flat, receive(flat, self._groups[before % 2], before))

    def send(self, streams: Mapping[str, Tensor]) -> None:
        """Start to send streams to the next stage."""
        assert len({stream.dtype for stream in streams.values()}) == 1, "the next stage expects one dtype"
        flat = torch.cat([stream.reshape(-1) for stream in streams.values()])
        self._pending.send(flat, self._groups[self.axis.index % 2], self.axis.index + 1)

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._pending.finish()


class IncomingStreams:
    """Streams that are being received."""

    def __init__(self, shapes: Mapping[str, torch.Size], flat: Tensor, works: Sequence[Work]) -> None:
        self._shapes, self._flat, self._works = shapes, flat, works

    def wait(self) -> dict[str, Tensor]:
        """Wait for the streams and return them by name."""
        wait_all(self._works)
        parts = self._flat.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


def shapes(state: State) -> dict[str, torch.Size]:
    """The shape of each stream."""
    return {name: stream.shape for name, stream in state.streams.items()}
