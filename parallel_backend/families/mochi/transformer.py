"""Mochi 1 (text to video) over diffusers' ``MochiTransformer3DModel``."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from einops import rearrange
from torch import Tensor, nn

from ...errors import InvalidRequest
from ...interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, TEXT, TIMESTEP, AllReduce, AttentionKind, Extent, Geometry, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import ColumnParallel, Cuts, ParameterCut, RowParallel, attention_cuts
from ..shared.patchify import check_mask, check_text, crop, pad_to_patch, to_latent


class Mochi(Family):
    """Mochi 1 in three parts.

    Inputs, batch first: the latent ``[B, 12, T, H, W]``, the timestep ``[B]`` (sigma in 0..1), and

    - ``encoder_hidden_states`` ``[B, L, D]``: text from T5;
    - ``encoder_attention_mask`` ``[B, L]``: True for text tokens that are not padding. Without it no token is padding.

    diffusers' module runs from noise at time 0 to the video at 1000 and predicts the velocity in that direction.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 2,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "num_layers": 48,
        "pooled_projection_dim": 1536,
        "in_channels": 12,
        "out_channels": None,
        "text_embed_dim": 4096,
        "activation_fn": "swiglu",
    }
    first_layer: ClassVar[str] = "patch_embed"
    values_alive: ClassVar[float] = 18.6
    teacache: ClassVar[tuple[float, ...]] = (-3512.41319, 811.675948, -60.9400215, 2.42429681, 0.00305291719)
    float16: ClassVar[bool] = False
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states",)
    optional: ClassVar[tuple[str, ...]] = ("encoder_attention_mask",)

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        _check_activation(config["activation_fn"])
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        return Geometry(
            channels=config["in_channels"],
            out_channels=config["out_channels"] or config["in_channels"],
            patch=(1, config["patch_size"], config["patch_size"]),
            layers=layers,
            sites=(AttentionKind(streams=(IMAGE, TEXT), heads=heads, head_dim=head_dim, count=layers),),
            all_reduces=(
                AllReduce(tokens=IMAGE, width=heads * head_dim, count=2 * layers),
                AllReduce(tokens=TEXT, width=config["pooled_projection_dim"], count=2 * (layers - 1)),
            ),
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        """Each head has its own position frequencies. The last layer does not update the text."""
        heads = (config["num_attention_heads"], config["attention_head_dim"])
        cuts = attention_cuts("transformer_blocks.*.attn1", *heads, text=True)
        cuts |= _feed_forward("transformer_blocks.*.ff", math.prod(heads))
        for i in range(config["num_layers"] - 1):
            cuts |= {f"transformer_blocks.{i}.attn1.to_add_out": RowParallel((heads,))}
            cuts |= _feed_forward(f"transformer_blocks.{i}.ff_context", config["pooled_projection_dim"])
        return cuts | {"": ParameterCut("pos_frequencies", 1, ((heads[0], 1),))}

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        text = check_text(shapes["encoder_hidden_states"], config["text_embed_dim"])
        check_mask("encoder_attention_mask", shapes, text)
        image = math.prod(geometry.grid(shapes[LATENT][2:]))
        return Extent(streams={IMAGE: image, TEXT: text}, values=geometry.out_channels * math.prod(geometry.patch))

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        layers = self.module.transformer_blocks
        blocks = [Block(run=partial(_run, layer), modules=(layer,)) for layer in layers]
        return blocks, [AttentionSite(module=layer.attn1, streams=(IMAGE, TEXT), each_sample=True) for layer in layers]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        latent = self._latent(inputs)
        frames: Tensor = self.module.patch_embed(rearrange(latent, "b c t h w -> (b t) c h w"))
        return rearrange(frames, "(b t) s d -> b (t s) d", b=len(latent))

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """Pad the latent to whole patches, circularly."""
        module, latent, conditions = self.module, self._latent(inputs), self._conditions(inputs)
        temb, text = module.time_embed(**conditions, hidden_dtype=self.dtype)
        grid = self.geometry.grid(latent.shape[2:])
        cos, sin = module.rope(module.pos_frequencies, *grid, device=latent.device, dtype=torch.float32)
        masked = "encoder_attention_mask" in inputs
        return State(
            streams={IMAGE: self.image(inputs), TEXT: text},
            tables={IMAGE: {"cos": cos[None], "sin": sin[None]}},
            masks={TEXT: conditions["encoder_attention_mask"]} if masked else {},
            context={"temb": temb},
        )

    def head(self, state: State) -> Tensor:
        prediction: Tensor = self.module.proj_out(self.module.norm_out(state.streams[IMAGE], state.context["temb"]))
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Crop the padding."""
        return -to_latent(tokens, size, self.geometry, "pt ph pw c")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.module(hidden_states=self._latent(inputs), **self._conditions(inputs), return_dict=False)[0]
        return -crop(out, inputs[LATENT].shape[2:])

    def _latent(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return pad_to_patch(inputs[LATENT].to(self.dtype), self.geometry.patch)

    def _conditions(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments that both the module and its embedding of time and text take."""
        text = inputs["encoder_hidden_states"].to(self.dtype)
        mask = inputs.get("encoder_attention_mask")
        return {
            "timestep": (1 - inputs[TIMESTEP].float()) * 1000,
            "encoder_hidden_states": text,
            "encoder_attention_mask": _all_true(text) if mask is None else mask.bool(),
        }

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_layers": 3, "num_attention_heads": 24, "attention_head_dim": 16, "pooled_projection_dim": 40,
            "text_embed_dim": 32, "time_embed_dim": 32,
        }  # fmt: skip
        text: Inputs = {"encoder_hidden_states": ("text", "text_embed_dim")}
        masked: Inputs = {**text, "encoder_attention_mask": ("text",)}
        return {
            "t2v": Variant(config=small, size=(3, 9, 13), text=7, inputs=masked),
            "t2v unmasked": Variant(config=small, size=(3, 9, 13), text=7, inputs=text),
        }


def _feed_forward(name: str, width: int) -> Cuts:
    """Return the cuts of a gated feed-forward."""
    hidden = (8 * width // 3, 1)
    return {f"{name}.net.0.proj": ColumnParallel((hidden, hidden)), f"{name}.net.2": RowParallel((hidden,))}


def _all_true(text: Tensor) -> Tensor:
    return text.new_ones(text.shape[:2], dtype=torch.bool)


class _AllCount:
    """A mask of text tokens all of which count, for diffusers' attention. It asks for the places of those that do,
    sample by sample, and the host would wait for a GPU to count them.
    """

    def __init__(self, text: Tensor) -> None:
        self._places = torch.arange(text.shape[1], device=text.device)[:, None]

    def __getitem__(self, _: object) -> "_AllCount":
        return self

    def flatten(self) -> "_AllCount":
        return self

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: object = None
    ) -> Tensor:
        assert function is torch.nonzero
        places: Tensor = args[0]._places
        return places


def _run(layer: nn.Module, state: State) -> State:
    tables, text = state.tables[IMAGE], state.streams[TEXT]
    image, text = layer(
        hidden_states=state.streams[IMAGE],
        encoder_hidden_states=text,
        temb=state.context["temb"],
        encoder_attention_mask=_AllCount(text),  # the attention seam drops masked tokens
        image_rotary_emb=(tables["cos"][0], tables["sin"][0]),
    )
    return state.with_streams(**{IMAGE: image, TEXT: text})


def _check_activation(name: str) -> None:
    if name != "swiglu":
        raise InvalidRequest(f"Mochi with activation_fn {name!r} is not supported: 'swiglu' would work")
