"""``State``: where families and strategies meet."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

Named = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class State:
    """What flows through the blocks.

    Attributes:
        streams: tokens ``[B, S, D]`` by the stream's name; each stream has its own length and width.
        tables: by stream, tensors whose dim 1 is indexed by its tokens (position tables, modulation);
            they are sharded along with it.
        masks: by stream, which of its tokens ``[B, S]`` (bool) may be attended; a stream without one has no
            token that may not. Never sharded: the attention seam needs those of all ranks.
        context: what is small and global (text in cross-attention, timestep); whole on every rank.
    """

    streams: Named
    tables: Mapping[str, Named] = field(default_factory=dict)
    masks: Named = field(default_factory=dict)
    context: Named = field(default_factory=dict)

    def with_streams(self, **streams: Tensor) -> "State":
        """The same with other tokens in the streams named."""
        return replace(self, streams={**self.streams, **streams})
