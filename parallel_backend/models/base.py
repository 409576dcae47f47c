"""What a family of diffusion transformers is to the engine: embed, blocks, head.

An adapter owns only the glue of diffusers' ``forward``; layers and weights stay diffusers' own. A test holds
each adapter to the stock ``forward``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..state import State


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The static numbers of a model, read from its config alone.

    ``positions`` is the number of patches along one axis that the model has positions for.
    """

    in_channels: int
    out_channels: int
    patch: tuple[int, int, int]
    heads: int
    head_dim: int
    layers: int
    positions: int

    def grid(self, size: Sequence[int]) -> tuple[int, int, int]:
        """Patches along T, H and W of a latent of that size, which is padded up to whole patches."""
        t, h, w = (-(-length // patch) for length, patch in zip(size, self.patch, strict=True))
        return t, h, w

    @property
    def values(self) -> int:
        """Predicted values of one token."""
        return self.out_channels * self.patch[0] * self.patch[1] * self.patch[2]


class Family(ABC):
    """A loaded transformer in three parts.

    Attributes:
        inputs: names of the arguments of the diffusers class that a branch must have.
        latent: the name of the latent among them; ``timestep``: the name of the timestep.
        blocks: run one after the other, each from state to state.
        attentions: the modules whose attention is over all tokens and passes the seam.
    """

    inputs: ClassVar[tuple[str, ...]]
    latent: ClassVar[str]
    timestep: ClassVar[str]

    geometry: Geometry
    module: Any
    blocks: Sequence[Callable[[State], State]]
    attentions: Sequence[nn.Module]

    @abstractmethod
    def __init__(self, module: nn.Module) -> None:
        """Take a loaded module of the family's diffusers class."""

    @staticmethod
    @abstractmethod
    def describe(config: Mapping[str, Any]) -> Geometry:
        """The numbers of a config.

        Raises:
            InvalidRequest: a variant that is not supported, named.
        """

    @staticmethod
    @abstractmethod
    def check(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse inputs (without the latent and the timestep) whose shapes do not fit.

        Raises:
            InvalidRequest: names the input, its shape and what would work.
        """

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of activations and predictions."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.module.parameters()).device
        return device

    @abstractmethod
    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """From a branch's arguments to the state before block 0."""

    @abstractmethod
    def head(self, state: State) -> Tensor:
        """The prediction of the state's tokens, ``[B, S, values]``; token by token, so a shard is enough."""

    @abstractmethod
    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Predicted tokens ``[B, S, values]`` to ``[B, C, T, H, W]`` of ``size``."""
