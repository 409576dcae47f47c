"""DiT (classes to images) over diffusers' ``DiTTransformer2DModel``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from ...errors import InvalidRequest
from ...interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, TIMESTEP, AllReduce, AttentionKind, Extent, Geometry, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import Cuts
from ..shared.basic_blocks import block_cuts, check_channels, check_norm, without_variance
from ..shared.patchify import pad_to_patch, to_latent
from ..shared.streams import at_least_one


class DiT(Family):
    """DiT in three parts.

    Inputs, batch first: the latent ``[B, 4, H, W]``, which must be square, the timestep ``[B]`` in 0..999, and

    - ``class_labels`` ``[B]``, int64. A label equal to the number of classes means no class.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "in_channels": 4,
        "out_channels": None,
        "num_layers": 28,
        "patch_size": 2,
        "activation_fn": "gelu-approximate",
        "num_embeds_ada_norm": 1000,
        "norm_type": "ada_norm_zero",
    }
    first_layer: ClassVar[str] = "pos_embed"
    values_alive: ClassVar[float] = 13.0
    required: ClassVar[tuple[str, ...]] = ("class_labels",)

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        check_norm("DiT", config, "ada_norm_zero")
        check_channels("DiT", config)
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        return Geometry(
            channels=config["in_channels"],
            out_channels=config["in_channels"],
            patch=(config["patch_size"],) * 2,
            layers=layers,
            sites=(AttentionKind(streams=(IMAGE,), heads=heads, head_dim=head_dim, count=layers),),
            all_reduces=(AllReduce(tokens=IMAGE, width=heads * head_dim, count=2 * layers, min_rows=1),),
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        return block_cuts("transformer_blocks.*", config, cross=False)

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        latent = shapes[LATENT]
        rows, columns = geometry.grid(latent[2:])
        if rows != columns:
            raise InvalidRequest(f"a latent of {latent[2]} x {latent[3]} cannot be used: DiT makes only square images")
        labels = shapes["class_labels"]
        if len(labels) != 1:
            raise InvalidRequest(
                f"class_labels of shape {list(labels)} does not fit: one label per sample, shape {list(latent[:1])}, "
                "would work"
            )
        return Extent(streams={IMAGE: rows * columns}, values=geometry.out_channels * math.prod(geometry.patch))

    @staticmethod
    def _embedding_sizes(config: Mapping[str, Any]) -> Mapping[str, int]:
        """The last row stands for no class."""
        return {"class_labels": config["num_embeds_ada_norm"] + 1}

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        layers = self.module.transformer_blocks
        self.shared = (layers[0].norm1.emb,)
        runs = [_run_first, *[_run] * (len(layers) - 1)]
        blocks = [Block(run=partial(run, layer), modules=(layer,)) for run, layer in zip(runs, layers, strict=True)]
        return blocks, [AttentionSite(module=layer.attn1, streams=(IMAGE,)) for layer in layers]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens: Tensor = self.module.pos_embed(self._latent(inputs))
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """Pad the latent to whole patches, as ComfyUI does."""
        context = {"timestep": inputs[TIMESTEP], "labels": inputs["class_labels"]}
        return State(streams={IMAGE: self.image(inputs)}, context=context)

    def head(self, state: State) -> Tensor:
        module = self.module
        shift, scale = module.proj_out_1(F.silu(self._conditioning(state))).chunk(2, dim=1)
        normed = module.norm_out(state.streams[IMAGE]) * (1 + scale[:, None]) + shift[:, None]
        return without_variance(module.proj_out_2(normed), module.config)

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Crop the padding."""
        return to_latent(tokens, size, self.geometry, "ph pw c")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.module(
            self._latent(inputs), timestep=inputs[TIMESTEP], class_labels=inputs["class_labels"], return_dict=False
        )[0]
        height, width = inputs[LATENT].shape[2:]
        return out[:, : self.geometry.out_channels, :height, :width]

    def _conditioning(self, state: State) -> Tensor:
        """Return block 0's embedding of timestep and label; compute it here if block 0 is on another rank."""
        if "conditioning" in state.context:
            return state.context["conditioning"]
        conditioning: Tensor = self.shared[0](state.context["timestep"], state.context["labels"], self.dtype)
        return conditioning

    def _latent(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return pad_to_patch(inputs[LATENT].to(self.dtype), self.geometry.patch)

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_attention_heads": 16, "attention_head_dim": 8, "num_layers": 2, "sample_size": 8,
            "num_embeds_ada_norm": 10,
        }  # fmt: skip
        inputs: Inputs = {"class_labels": ()}
        return {
            "learned variance": Variant(config={**small, "out_channels": 8}, size=(9, 9), text=1, inputs=inputs),
            "fixed variance": Variant(config={**small, "activation_fn": "geglu"}, size=(9, 9), text=1, inputs=inputs),
        }


def _run(layer: Any, state: State) -> State:
    tokens = state.streams[IMAGE]
    out = layer(at_least_one(tokens), timestep=state.context["timestep"], class_labels=state.context["labels"])
    return state.with_streams(**{IMAGE: out[:, : tokens.shape[1]]})


def _run_first(layer: Any, state: State) -> State:
    """Run block 0 and keep its embedding of timestep and label.

    ``head`` needs the embedding at a time when weight sharding has freed the weights that compute it.
    """
    embedded: list[Tensor] = []
    hook = layer.norm1.emb.register_forward_hook(lambda _module, _inputs, out: embedded.append(out))
    try:
        state = _run(layer, state)
    finally:
        hook.remove()
    return replace(state, context={**state.context, "conditioning": embedded[0]})
