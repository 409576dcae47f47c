"""``Family``: a diffusion transformer as the engine runs it, in three parts: embed, blocks, head.

An adapter owns only the glue of diffusers' ``forward``; layers and weights stay diffusers' own. A test compares each
adapter with the stock ``forward``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from ..progress import PROGRESS
from .geometry import LATENT, Extent, Geometry, Shape, Shapes
from .run_cache import RunCache
from .state import State
from .tensor_cuts import Cuts

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AttentionSite:
    """A module whose attention goes through the attention seam (``attention/routing.py``).

    Attributes:
        module: the attention module.
        streams: names of the streams that attend to one another, in the order in which the module concatenates them.
        queries: the streams of the queries if these are not the keys' own; ``streams`` are the keys' then, which are
            split. Every rank holds the queries' streams whole (``Extent.whole``). Attention to keys that every rank
            holds whole is local, and no site.
        each_sample: whether the module computes attention once per sample instead of once for the whole batch.
        repeats: how often the module repeats each head of its keys and values, one after another, before it calls
            attention; 1 if it leaves that to attention (``enable_gqa``), or if each query head has its own key head.
        biased: whether attention adds the biases of pairs that the tables may have (``state.BIASES``).
        keeps_values: whether the module reads its values again after it has called attention, which may change them.
    """

    module: nn.Module
    streams: tuple[str, ...]
    each_sample: bool = False
    repeats: int = 1
    queries: tuple[str, ...] | None = None
    biased: bool = False
    keeps_values: bool = False


@dataclass(frozen=True, kw_only=True)
class Block:
    """One step of the transformer, from state to state.

    Attributes:
        run: computes the next state.
        modules: modules that hold the block's weights. Empty for a block without weights.
        parts: each token uses only 1/``parts`` of the block's weights: 2 where image and text have separate weights.
            Balancing the stages of a pipeline needs it.
    """

    run: Callable[[State], State]
    modules: tuple[nn.Module, ...] = ()
    parts: int = 1


Inputs = Mapping[str, tuple[int | str, ...]]
"""Shape of each input after the batch dim, by the input's name.

A string stands for a number: ``"size"`` for all latent dims after the channels, ``"frames"`` for the first of these,
``"tokens"`` for the number of patches of the latent, ``"text"`` for the number of text tokens. Any other string is the
name of a number in the config.
"""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A small random model of a family with its true number of heads, and inputs for it. ``verify`` runs it.

    Attributes:
        config: config of the diffusers class.
        size: latent dims after the channels.
        text: number of text tokens.
        inputs: inputs besides the latent and the timestep.
        fixed_text: whether diffusers' own forward accepts only this number of text tokens.
    """

    config: Mapping[str, Any]
    size: tuple[int, ...]
    text: int
    inputs: Inputs
    fixed_text: bool = False


class Family(ABC):
    """A loaded transformer in three parts: ``embed``, ``blocks`` and ``head``.

    Attributes:
        defaults: diffusers' default of each number that a config may leave out and the methods read.
        first_layer: name of the layer that the patches pass first. Its dtype is the activations'.
        values_alive: values that are alive at once in a forward, for each value of the streams between blocks, as
            ``python -m lab working-memory`` measures it.
        latents: names of the inputs that are predicted, in the order in which ComfyUI packs them into one flat latent.
        frame_timesteps: whether each latent frame may have its own timestep, ``[B, T]``.
        teacache: the polynomial from a step's relative change of the first block's modulated input to that of the
            prediction, highest power first, as TeaCache publishes it; empty if it does not.
        float16: whether its activations fit into float16. As in ComfyUI, by its ``supported_inference_dtypes``.
        required: names of the inputs that a branch must have besides the latents and the timestep. All are batch first.
        optional: names of the inputs that a branch may have. All are batch first.
        levels: inputs of indices into the second dim of another input, by their names.
        geometry: the static numbers of the model.
        module: the diffusers transformer.
        config: its config, complete.
        blocks: run one after another, each from state to state. A block holds at most one transformer layer, or Latte's
            pair of a spatial and a temporal layer.
        attentions: all attention over tokens of a stream.
        run: runs all blocks but those that the state skips. Weight sharding wraps it.
        shared: modules inside blocks whose weights ``embed`` or ``head`` need too.
        changes: what changes the module's weights now, such as LoRAs. Equal values stand for equal weights.
        cache: what the current run has computed in ``once``.
    """

    defaults: ClassVar[Mapping[str, Any]]
    first_layer: ClassVar[str]
    values_alive: ClassVar[float]
    latents: ClassVar[tuple[str, ...]] = (LATENT,)
    frame_timesteps: ClassVar[bool] = False
    teacache: ClassVar[tuple[float, ...]] = ()
    float16: ClassVar[bool] = True
    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    levels: ClassVar[Mapping[str, str]] = MappingProxyType({})

    geometry: Geometry
    module: Any
    config: Mapping[str, Any]
    blocks: Sequence[Block]
    attentions: Sequence[AttentionSite]
    run: Callable[[State], State]
    shared: Sequence[nn.Module] = ()
    changes: Hashable = ()
    cache: RunCache

    def __init__(self, module: Any) -> None:
        """Wrap ``module``, an instance of the family's diffusers class."""
        self.module = module
        self.config = self.complete(module.config)
        self.geometry = self._describe(self.config)
        self.blocks, self.attentions = self.blocks_and_sites()
        self.run, self.cache = self._run_blocks, RunCache()
        self._first_block = 0

    def keep_blocks(self, local_blocks: slice) -> None:
        """Drop the blocks of other pipeline stages and free their weights.

        Args:
            local_blocks: range of this stage's blocks, counted over the blocks that have weights. Blocks without
                weights stay, and so do the weights of ``shared``.
        """
        with_weights = [block for block in self.blocks if block.modules]
        dropped = [block for i, block in enumerate(with_weights) if i not in range(len(with_weights))[local_blocks]]
        self.blocks = [block for block in self.blocks if block not in dropped]
        self._first_block = range(len(with_weights))[local_blocks].start
        shared = {part for module in self.shared for part in module.modules()}
        dropped_modules = {part for block in dropped for module in block.modules for part in module.modules()} - shared
        self.attentions = [site for site in self.attentions if site.module not in dropped_modules]
        for module in dropped_modules:
            for name, _ in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                module.register_parameter(name, None)

    @abstractmethod
    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        """Return the blocks of ``module`` in order, and its attention sites."""

    @classmethod
    def complete(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with the defaults of the numbers that it leaves out."""
        return {**cls.defaults, **config}

    @classmethod
    def describe(cls, config: Mapping[str, Any]) -> Geometry:
        """Return the static numbers of a model with this config.

        Raises:
            InvalidRequest: the adapter does not support the model. The sentence names the config value.
        """
        return cls._describe(cls.complete(config))

    @classmethod
    def extent(cls, config: Mapping[str, Any], shapes: Shapes) -> Extent:
        """Check the shapes of a branch's inputs and return its token counts.

        ``shapes`` includes the latent's, whose number of dims and channels is already checked.

        Raises:
            InvalidRequest: an input does not fit. The sentence names it, its shape and what would work.
        """
        config = cls.complete(config)
        return cls._extent(config, cls._describe(config), shapes)

    @classmethod
    def cuts(cls, config: Mapping[str, Any]) -> Cuts:
        """Return how tensor parallelism cuts the layers of the blocks."""
        return cls._cuts(cls.complete(config))

    @classmethod
    def embedding_sizes(cls, config: Mapping[str, Any]) -> Mapping[str, int]:
        """Return, for each input that is an index into an embedding table, the table's number of rows."""
        return cls._embedding_sizes(cls.complete(config))

    @staticmethod
    @abstractmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        """``describe`` of a complete config."""

    @staticmethod
    @abstractmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        """``extent`` of a complete config, which ``geometry`` describes."""

    @staticmethod
    @abstractmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        """``cuts`` of a complete config."""

    @staticmethod
    def _embedding_sizes(config: Mapping[str, Any]) -> Mapping[str, int]:
        """``embedding_sizes`` of a complete config."""
        return {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and predictions."""
        dtype: torch.dtype = next(self.module.get_submodule(self.first_layer).parameters()).dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """The device that holds the weights."""
        device: torch.device = next(self.module.parameters()).device
        return device

    @abstractmethod
    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the image stream before block 0, ``[B, S, D]``. Each token depends only on its own latent patch."""

    @abstractmethod
    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """Turn a branch's inputs into the state before block 0. Every rank computes all of it."""

    def embed_in(self, cache: RunCache, inputs: Mapping[str, Tensor]) -> State:
        """Return what ``embed`` returns, with what a run has computed already."""
        own, self.cache = self.cache, cache
        try:
            return self.embed(inputs)
        finally:
            self.cache = own

    def once(self, name: str, given: Sequence[Tensor | None], compute: Callable[[], T]) -> T:
        """Return what depends on no latent and no timestep, which a run computes once for each prompt.

        For ``embed``: what layers make of text, or the keys and values of tokens that attend to nothing that a step
        changes, such as a prefix or a pose, as any structure of tensors. Each rank may keep its share alone.

        Args:
            name: what it is.
            given: all inputs that it depends on, as they came. None stands for one that is not there.
            compute: all ranks run it in the same step, so it may run layers whose weights are cut.
        """
        return self.cache.get((name, self.changes), (self.module, *given), compute)

    @abstractmethod
    def head(self, state: State) -> Tensor:
        """Return the prediction of the image tokens, ``[B, S, values]``, token by token: a shard is enough.

        Several predicted streams (``Extent.predicted``) are concatenated in their order.
        """

    @abstractmethod
    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Turn predicted tokens ``[B, S, values]`` into ``[B, C, *size]``."""

    def prediction(self, tokens: Tensor, sizes: Sequence[Shape]) -> Tensor:
        """Turn predicted tokens ``[B, S, values]`` into the prediction of all ``latents``, packed if there are several.

        Args:
            tokens: one predicted stream after the other. Tokens of references may follow the latents'.
            sizes: the picture's size, and the shapes of the other latents without the batch.
        """
        (size,) = sizes
        return self.unpatchify(tokens, size)

    def followed(self, inputs: Mapping[str, Tensor], shapes: Sequence[Shape]) -> tuple[Tensor, Tensor] | None:
        """Return what a sampler follows where that is not the prediction: factors of prediction and input.

        Families of one latent are not asked.

        Two tensors ``[B, values]`` for packed latents: the sampler follows the first times the prediction plus the
        second times the model's input. None for the prediction as it is.

        Args:
            inputs: those of any branch: branches differ in nothing that this reads.
            shapes: shapes of the latents without the batch.
        """
        return None

    @abstractmethod
    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run diffusers' own forward on the same inputs. The result has the form of ``prediction``."""

    @staticmethod
    @abstractmethod
    def variants() -> dict[str, Variant]:
        """Return small models of every kind that the family has, by name."""

    def used_blocks(self, state: State) -> list[Block]:
        """Return the blocks that ``run`` runs for a state, in order: those of its part that it does not skip."""
        with_weights = [block for block in self.blocks if block.modules]
        skipped = [block for i, block in enumerate(with_weights, start=self._first_block) if i in state.skipped]
        used = [block for block in self.blocks if block not in skipped]
        if state.part == "all":
            return used
        end = next((i for i, block in enumerate(used, 1) if block.modules), len(used))
        return used[:end] if state.part == "first" else used[end:]

    def _run_blocks(self, state: State) -> State:
        for block in self.used_blocks(state):
            state = block.run(state)
            PROGRESS.tick()
        return state
