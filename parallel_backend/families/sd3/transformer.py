"""Stable Diffusion 3 and 3.5 (medium, large, turbo) over diffusers' ``SD3Transformer2DModel``."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from ...errors import InvalidRequest
from ...interfaces.family import AttentionSite, Block, Family, Inputs, Variant
from ...interfaces.geometry import IMAGE, LATENT, TEXT, TIMESTEP, AllReduce, AttentionKind, Extent, Geometry, Shapes
from ...interfaces.state import State
from ...interfaces.tensor_cuts import ColumnParallel, Cut, Cuts, RowParallel, attention_cuts
from ..shared.patchify import check_text, check_vector, pad_to_patch, to_latent


class SD3(Family):
    """Stable Diffusion 3 in three parts.

    Inputs, batch first: the latent ``[B, 16, H, W]``, the timestep ``[B]`` in 0..1000, and

    - ``encoder_hidden_states`` ``[B, L, D]``: text from CLIP followed by text from T5;
    - ``pooled_projections`` ``[B, D]``: pooled text from both CLIPs.
    """

    defaults: ClassVar[Mapping[str, Any]] = {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 18,
        "attention_head_dim": 64,
        "num_attention_heads": 18,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 96,
        "dual_attention_layers": (),
        "qk_norm": None,
    }
    first_layer: ClassVar[str] = "pos_embed"
    values_alive: ClassVar[float] = 13.8
    required: ClassVar[tuple[str, ...]] = ("encoder_hidden_states", "pooled_projections")

    @staticmethod
    def _describe(config: Mapping[str, Any]) -> Geometry:
        _check_supported(config)
        heads, head_dim, layers = config["num_attention_heads"], config["attention_head_dim"], config["num_layers"]
        dual, width = len(_dual_layers(config)), heads * head_dim
        image_only = (AttentionKind(streams=(IMAGE,), heads=heads, head_dim=head_dim, count=dual),) if dual else ()
        return Geometry(
            channels=config["in_channels"],
            out_channels=config["in_channels"],
            patch=(config["patch_size"],) * 2,
            layers=layers,
            sites=(AttentionKind(streams=(IMAGE, TEXT), heads=heads, head_dim=head_dim, count=layers), *image_only),
            all_reduces=(
                AllReduce(tokens=IMAGE, width=width, count=2 * layers + dual),
                AllReduce(tokens=TEXT, width=width, count=2 * (layers - 1)),  # the last layer does not update the text
            ),
            positions=config["pos_embed_max_size"],
        )

    @staticmethod
    def _cuts(config: Mapping[str, Any]) -> Cuts:
        heads = (config["num_attention_heads"], config["attention_head_dim"])
        cuts = attention_cuts("transformer_blocks.*.attn", *heads, text=True)
        cuts |= _feed_forward("transformer_blocks.*.ff", heads)
        for i in _dual_layers(config):
            cuts |= attention_cuts(f"transformer_blocks.{i}.attn2", *heads)
        for i in range(config["num_layers"] - 1):
            cuts |= {f"transformer_blocks.{i}.attn.to_add_out": RowParallel((heads,))}
            cuts |= _feed_forward(f"transformer_blocks.{i}.ff_context", heads)
        return cuts

    @staticmethod
    def _extent(config: Mapping[str, Any], geometry: Geometry, shapes: Shapes) -> Extent:
        text = check_text(shapes["encoder_hidden_states"], config["joint_attention_dim"])
        check_vector("pooled_projections", shapes["pooled_projections"], config["pooled_projection_dim"])
        return Extent(
            streams={TEXT: text, IMAGE: math.prod(geometry.grid(shapes[LATENT][2:]))},
            values=geometry.out_channels * math.prod(geometry.patch),
        )

    def blocks_and_sites(self) -> tuple[list[Block], list[AttentionSite]]:
        layers = self.module.transformer_blocks
        joint = [AttentionSite(module=layer.attn, streams=(IMAGE, TEXT)) for layer in layers]
        dual = [AttentionSite(module=layer.attn2, streams=(IMAGE,)) for layer in layers if layer.attn2 is not None]
        return [Block(run=partial(_run, layer), modules=(layer,)) for layer in layers], [*joint, *dual]

    def image(self, inputs: Mapping[str, Tensor]) -> Tensor:
        tokens: Tensor = self.module.pos_embed(self._arguments(inputs)["hidden_states"]).contiguous()
        return tokens

    def embed(self, inputs: Mapping[str, Tensor]) -> State:
        """Pad the latent to whole patches, as ComfyUI does."""
        module = self.module
        arguments = self._arguments(inputs)
        text = module.context_embedder(arguments["encoder_hidden_states"])
        temb = module.time_text_embed(arguments["timestep"], arguments["pooled_projections"])
        return State(streams={TEXT: text, IMAGE: self.image(inputs)}, context={"temb": temb})

    def head(self, state: State) -> Tensor:
        prediction: Tensor = self.module.proj_out(self.module.norm_out(state.streams[IMAGE], state.context["temb"]))
        return prediction

    def unpatchify(self, tokens: Tensor, size: Sequence[int]) -> Tensor:
        """Crop the padding."""
        return to_latent(tokens, size, self.geometry, "ph pw c")

    def stock(self, inputs: Mapping[str, Tensor]) -> Tensor:
        height, width = inputs[LATENT].shape[2:]
        out: Tensor = self.module(**self._arguments(inputs), return_dict=False)[0]
        return out[..., :height, :width]

    def _arguments(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the arguments of diffusers' forward. The timestep keeps its dtype."""
        return {
            "hidden_states": pad_to_patch(inputs[LATENT].to(self.dtype), self.geometry.patch),
            "encoder_hidden_states": inputs["encoder_hidden_states"].to(self.dtype),
            "pooled_projections": inputs["pooled_projections"].to(self.dtype),
            "timestep": inputs[TIMESTEP],
        }

    @staticmethod
    def variants() -> dict[str, Variant]:
        small = {
            "num_layers": 3, "num_attention_heads": 24, "attention_head_dim": 8, "caption_projection_dim": 192,
            "joint_attention_dim": 32, "pooled_projection_dim": 24, "sample_size": 16, "pos_embed_max_size": 12,
        }  # fmt: skip
        text: Inputs = {
            "encoder_hidden_states": ("text", "joint_attention_dim"), "pooled_projections": ("pooled_projection_dim",),
        }  # fmt: skip
        kinds: dict[str, dict[str, Any]] = {
            "sd3 medium": small,
            "sd3.5 medium": {**small, "dual_attention_layers": (0,), "qk_norm": "rms_norm"},
            "sd3.5 large": {**small, "num_attention_heads": 38, "caption_projection_dim": 304, "qk_norm": "rms_norm"},
        }
        return {kind: Variant(config=config, size=(9, 14), text=7, inputs=text) for kind, config in kinds.items()}


def _run(layer: nn.Module, state: State) -> State:
    text, image = layer(
        hidden_states=state.streams[IMAGE], encoder_hidden_states=state.streams[TEXT], temb=state.context["temb"]
    )
    # The last layer returns no text, because nothing reads it.
    return state.with_streams(**{IMAGE: image} if text is None else {TEXT: text, IMAGE: image})


def _feed_forward(prefix: str, heads: tuple[int, int]) -> dict[str, Cut]:
    hidden = ((4 * math.prod(heads), 1),)
    return {f"{prefix}.net.0.proj": ColumnParallel(hidden), f"{prefix}.net.2": RowParallel(hidden)}


def _dual_layers(config: Mapping[str, Any]) -> list[int]:
    """Return the layers with a second attention, over only the image."""
    return sorted(set(config["dual_attention_layers"]) & set(range(config["num_layers"])))


def _check_supported(config: Mapping[str, Any]) -> None:
    if config["qk_norm"] not in (None, "rms_norm"):
        raise InvalidRequest(
            f"Stable Diffusion 3 with qk_norm {config['qk_norm']!r} is not supported: null or 'rms_norm' would work"
        )
    channels, predicted = config["in_channels"], config["out_channels"]
    if predicted not in (None, channels):
        raise InvalidRequest(
            f"Stable Diffusion 3 with in_channels {channels} and out_channels {predicted} is not supported: "
            f"out_channels {channels} would work"
        )
