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

from .geometry import Extent, Geometry, Shapes
from .state import State
from .tensor_cuts import Cuts


@dataclass(frozen=True, kw_only=True)
class AttentionSite:
    """A module whose attention passes the seam, and the streams that it is over.

    ``calls`` is how often it asks for attention in one forward: once for all samples, or once for each.
    """

    module: nn.Module
    streams: tuple[str, ...]
    each_sample: bool = False


@dataclass(frozen=True, kw_only=True)
class Block:
    """A step of the transformer, from state to state.

    Attributes:
        modules: those that hold its weights.
        parts: into how many alike its weights fall, of which a token meets one: two where image and text each have
            their own.
    """

    run: Callable[[State], State]
    modules: tuple[nn.Module, ...] = ()
    parts: int = 1


Inputs = Mapping[str, tuple[int | str, ...]]
"""Shapes behind the batch by the name of an input.

Of the words ``"size"`` stands for the latent's, ``"frames"`` for the first of them, ``"tokens"`` for how many patches
it comes to, ``"text"`` for the text's tokens; any other is a number of the config by its name.
"""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A small random model of a family with its true number of heads, and inputs for it: what ``verify`` runs.

    Attributes:
        config: of the diffusers class.
        size: of the latent; ``text``: number of text tokens.
        inputs: beside the latent and the timestep.
        fixed_text: whether diffusers' own forward takes no other number of text tokens.
    """

    config: Mapping[str, Any]
    size: tuple[int, ...]
    text: int
    inputs: Inputs
    fixed_text: bool = False


class Family(ABC):
    """A loaded transformer in three parts.

    Attributes:
        frame_timesteps: whether each latent frame may have a timestep of its own, ``[B, T]``.
        required: names of the inputs that a branch must have besides the latent and the timestep; ``optional``:
            those that it may have. All are batch first.
        blocks: run one after the other, each from state to state. None holds more than one transformer layer.
        attentions: all attention that is over tokens of a stream.
        run: runs all blocks; sharding weights wraps it.
        shared: modules of blocks whose weights ``embed`` or ``head`` need as well.
    """

    frame_timesteps: ClassVar[bool] = False
    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()

    geometry: Geometry
    module: Any
    blocks: Sequence[Block]
    attentions: Sequence[AttentionSite]
    run: Callable[[State], State]
    shared: Sequence[nn.Module] = ()

    def __init__(self, module: Any) -> None:
        """Take a module of the family's diffusers class."""
        self.module = module
        self.geometry = self.describe(module.config)
        self.blocks, self.attentions = self.parts()
        self.run = self._run_blocks

    def keep(self, own: slice) -> None:
        """Let go of all blocks that have weights but those, counted among them, and of their weights."""
        weighty = [block for block in self.blocks if block.modules]
        gone = [block for i, block in enumerate(weighty) if i not in range(len(weighty))[own]]
        self.blocks = [block for block in self.blocks if block not in gone]
        kept = {part for module in self.shared for part in module.modules()}
        lost = {part for block in gone for module in block.modules for part in module.modules()} - kept
        self.attentions = [site for site in self.attentions if site.module not in lost]
        for part in lost:
            for name in part._parameters:
                part.register_parameter(name, None)

    @abstractmethod
    def parts(self) -> tuple[list[Block], list[AttentionSite]]:
        """The blocks and the attention of ``module``."""

    @staticmethod
    @abstractmethod
    def describe(config: Mapping[str, Any]) -> Geometry:
        """The numbers of a config.

        Raises:
            InvalidRequest: a variant that is not supported, named.
        """

    @staticmethod
    @abstractmethod
    def extent(config: Mapping[str, Any], shapes: Shapes) -> Extent:
        """What a branch's inputs come to; ``shapes`` has the latent's, whose channels were checked.

        Raises:
            InvalidRequest: an input does not fit; names it, its shape and what would work.
        """

    @staticmethod
    @abstractmethod
    def cuts(config: Mapping[str, Any]) -> Cuts:
        """How tensor parallelism cuts the layers of the blocks."""

    @staticmethod
    def tables(config: Mapping[str, Any]) -> Mapping[str, int]:
        """Rows of the tables that inputs look a row up in, by the input's name."""
        return {}

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
    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The image stream before block 0, ``[B, S, D]``: a token of the latent's own patch alone."""

    @abstractmethod
    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """From a branch's inputs to the state before block 0, whole on every rank."""

    @abstractmethod
    def head(self, state: State) -> Tensor:
        """The prediction of the image stream's tokens, ``[B, S, values]``; token by token, so a shard is enough."""

    @abstractmethod
    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Predicted tokens ``[B, S, values]`` to ``[B, C, ...]``, the dims after the channels being ``size``."""

    @abstractmethod
    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """diffusers' own forward with the same inputs, as the prediction that ``unpatchify`` would give."""

    @staticmethod
    @abstractmethod
    def variants() -> dict[str, Variant]:
        """Small models of every kind that the family has, by name."""

    def _run_blocks(self, state: State) -> State:
        for block in self.blocks:
            state = block.run(state)
        return state
