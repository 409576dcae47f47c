"""``State``: the tensors that flow through a family's blocks and that strategies shard."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

NamedTensors = Mapping[str, Tensor]

BIASES = ("query_biases", "key_biases")
"""Names of the tables ``[B, S, BIAS_CHANNELS]`` with the numbers of queries and keys whose products bias attention
(``attention/pair_biases.py``). A site that uses them (``AttentionSite.biased``) needs them for all of its streams."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The activations between two blocks, and what the blocks need besides.

    Attributes:
        streams: tokens ``[B, S, D]`` by stream name. Each stream has its own length and width.
        tables: by stream, tensors whose dim 1 is indexed by the stream's tokens, such as rotary tables or modulation
            per token. They are sharded with the stream.
        masks: by stream, which of its tokens may be attended to, bool ``[B, S]``. All tokens of a stream without a mask
            may be. Masks are never sharded: the attention seam needs all ranks' masks.
        context: small global tensors, whole on every rank: the timestep, or text in cross-attention.
        skipped: numbers of the blocks that are left out, counted over the model's blocks that have weights.
        part: which of the other blocks run: those up to the first that has weights, those after it, or all.
    """

    streams: NamedTensors
    tables: Mapping[str, NamedTensors] = field(default_factory=dict)
    masks: NamedTensors = field(default_factory=dict)
    context: NamedTensors = field(default_factory=dict)
    skipped: frozenset[int] = frozenset()
    part: Literal["all", "first", "rest"] = "all"

    def with_streams(self, **streams: Tensor) -> "State":
        """Return this state with the tokens of the named streams replaced."""
        return replace(self, streams={**self.streams, **streams})
