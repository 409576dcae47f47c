"""The module of Open-Sora 2.0: diffusers' Flux.1 with a condition beside the latent, and another rotation."""

from functools import partial
from types import FunctionType
from typing import Any

from diffusers import FluxTransformer2DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxPosEmbed
from torch import Tensor, nn

CONDITION_VALUES = 4
"""Values of a token's mask: one for each latent position of a patch of 2 x 2."""


class ConditionedEmbedder(nn.Module):
    """Embeds tokens ``[B, S, latent values + condition values]``: one layer for the latent, one for the condition.

    The condition is the mask of given frames and their latent, as ``cond_in`` of the authors' code takes them.
    """

    def __init__(self, latent_values: int, condition_values: int, width: int) -> None:
        super().__init__()
        self.latent_values = latent_values
        self.latent = nn.Linear(latent_values, width)
        self.condition = nn.Linear(condition_values, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the embedded tokens ``[B, S, width]``."""
        latent, condition = tokens[..., : self.latent_values], tokens[..., self.latent_values :]
        embedded: Tensor = self.latent(latent) + self.condition(condition)
        return embedded


class HalfSplitPosEmbed(FluxPosEmbed):  # type: ignore[misc]
    """Rotary tables whose first half of features repeats in the second, over all axes together."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``[S, head_dim]`` of positions ``[S, axes]``."""
        cos, sin = (table[:, ::2].repeat(1, 2) for table in super().forward(ids))
        return cos, sin


def _with_half_split_rotation(processor: Any) -> Any:
    """Return ``__call__`` of diffusers' processor with the rotation that pairs feature i with i + head_dim / 2."""
    call = processor.__call__
    rotate = partial(apply_rotary_emb, use_real_unbind_dim=-2)
    return FunctionType(
        call.__code__, call.__globals__ | {apply_rotary_emb.__name__: rotate}, call.__name__, call.__defaults__,
        call.__closure__,
    )  # fmt: skip


class HalfSplitAttnProcessor(FluxAttnProcessor):  # type: ignore[misc]
    """Flux.1's attention with a half-split rotation."""

    __call__ = _with_half_split_rotation(FluxAttnProcessor)


class OpenSora2Transformer3DModel(FluxTransformer2DModel):  # type: ignore[misc]
    """Open-Sora 2.0's transformer, the authors' ``MMDiTModel``.

    ``forward`` is Flux.1's. Each token of ``hidden_states`` has the condition's values after the latent's.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        patch_size: int = 1,
        in_channels: int = 64,
        out_channels: int | None = None,
        num_layers: int = 19,
        num_single_layers: int = 38,
        attention_head_dim: int = 128,
        num_attention_heads: int = 24,
        joint_attention_dim: int = 4096,
        pooled_projection_dim: int = 768,
        guidance_embeds: bool = False,
        axes_dims_rope: tuple[int, int, int] = (16, 56, 56),
        rope_theta: int = 10000,
    ) -> None:
        super().__init__(
            patch_size=patch_size, in_channels=in_channels, out_channels=out_channels, num_layers=num_layers,
            num_single_layers=num_single_layers, attention_head_dim=attention_head_dim,
            num_attention_heads=num_attention_heads, joint_attention_dim=joint_attention_dim,
            pooled_projection_dim=pooled_projection_dim, guidance_embeds=guidance_embeds,
            axes_dims_rope=axes_dims_rope,
        )  # fmt: skip
        self.x_embedder = ConditionedEmbedder(in_channels, in_channels + CONDITION_VALUES, self.inner_dim)
        self.pos_embed = HalfSplitPosEmbed(theta=rope_theta, axes_dim=axes_dims_rope)
        for layer in (*self.transformer_blocks, *self.single_transformer_blocks):
            layer.attn.set_processor(HalfSplitAttnProcessor())
