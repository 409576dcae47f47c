"""The module of MiniMax-H3: diffusers' own, also for pruned files, which tabulate what depends on time."""

from typing import Any, ClassVar

import torch
from diffusers import MiniMaxH3Transformer3DModel as Whole
from diffusers.configuration_utils import register_to_config
from diffusers.models.transformers.transformer_minimax_h3 import MINIMAX_H3_MODALITY_NUM, MiniMaxH3Attention
from torch import Tensor, nn

_MODULATIONS = 6
"""Shift, scale and gate, of attention and of the feed-forward."""


class AttentionOfSamples(MiniMaxH3Attention):  # type: ignore[misc]
    """A block's attention, for samples that the block gets one after another in one sequence.

    diffusers' block has one list of times for a whole batch. In one sequence, each sample may have its own.
    """

    def forward(
        self, hidden_states: Tensor, rotary_emb: tuple[Tensor, Tensor], attention_mask: Tensor | None = None
    ) -> Tensor:
        """Return ``[1, B * S, D]``: each sample, as long as the tables ``[S, R]``, attends to itself."""
        samples = hidden_states.view(-1, len(rotary_emb[0]), hidden_states.shape[2])
        out: Tensor = super().forward(samples, rotary_emb, attention_mask)
        return out.reshape(hidden_states.shape)


class TimeCurve(nn.Module):
    """Coordinates of the time embedding's curve, tabulated at times from 0 to 1."""

    def __init__(self, grid: int, coordinates: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(grid, coordinates))

    def forward(self, times: Tensor) -> Tensor:
        """Return the coordinates ``[N, K]`` of times ``[N]``: between rows linear, beyond the ends the nearest row."""
        place = times.clamp(0.0, 1.0) * (len(self.table) - 1)
        below = place.floor().long().clamp(max=len(self.table) - 2)
        return torch.lerp(self.table[below], self.table[below + 1], (place - below).unsqueeze(1))


class CurveModulation(nn.Module):
    """A block's modulation, from the curve's coordinates. It computes in float32.

    Args:
        coordinates: of the curve.
        width: features of a token.
        norm: a layer whose weight has the dtype of activations, which the modulation gets.
    """

    def __init__(self, coordinates: int, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.width = width
        self.curve = nn.Linear(coordinates, _MODULATIONS * width * MINIMAX_H3_MODALITY_NUM)
        self._beside = (norm,)  # in a tuple, since it is no part of this module

    def forward(self, temb: Tensor) -> tuple[Tensor, ...]:
        """Return six tensors ``[times * modalities, width]`` for coordinates ``[times, K]``."""
        (norm,) = self._beside
        rows: Tensor = self.curve(temb).view(-1, _MODULATIONS * self.width)
        return rows.to(next(norm.parameters()).dtype).chunk(_MODULATIONS, dim=-1)


class CurveNormOut(nn.Module):
    """The last norm, modulated in float32 from the curve's coordinates."""

    def __init__(self, coordinates: int, width: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=eps)
        self.curve = nn.Linear(coordinates, 2 * width)

    def forward(self, hidden_states: Tensor, temb: Tensor, timestep_indices: Tensor) -> Tensor:
        """Return tokens ``[B, S, width]``, of which each has the modulation of its time, an index into ``temb``."""
        shift, scale = (part.index_select(0, timestep_indices) for part in self.curve(temb).chunk(2, dim=-1))
        modulated: Tensor = self.norm(hidden_states) * (1.0 + scale) + shift
        return modulated


class MiniMaxH3Transformer3DModel(Whole):  # type: ignore[misc]
    """diffusers' class, whose blocks take samples with times of their own, and with a pruned model's layers for time.

    Args:
        adaln_curve_grid: the number of times in a pruned model's table; None for a whole model. A pruned model's
            ``time_embed_dim`` is the number of the curve's coordinates.
    """

    _keep_in_fp32_modules: ClassVar[list[str]] = [*Whole._keep_in_fp32_modules, "curve"]

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        num_attention_heads: int = 56,
        attention_head_dim: int = 128,
        hidden_size: int = 5376,
        num_layers: int = 50,
        num_refiner_layers: int = 2,
        ffn_dim: int = 14336,
        in_channels: int = 24,
        audio_in_channels: int = 32,
        patch_size: tuple[int, int, int] = (1, 2, 2),
        text_dim: int = 5120,
        freq_dim: int = 256,
        time_embed_hidden_dim: int = 5376,
        time_embed_dim: int = 2688,
        rope_freq_dim: int = 16,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
        qk_norm_eps: float = 1e-5,
        final_norm_eps: float = 1e-5,
        adaln_curve_grid: int | None = None,
    ) -> None:
        whole: dict[str, Any] = {
            "num_attention_heads": num_attention_heads, "attention_head_dim": attention_head_dim,
            "hidden_size": hidden_size, "num_layers": num_layers, "num_refiner_layers": num_refiner_layers,
            "ffn_dim": ffn_dim, "in_channels": in_channels, "audio_in_channels": audio_in_channels,
            "patch_size": patch_size, "text_dim": text_dim, "freq_dim": freq_dim,
            "time_embed_hidden_dim": time_embed_hidden_dim, "time_embed_dim": time_embed_dim,
            "rope_freq_dim": rope_freq_dim, "rope_theta": rope_theta, "norm_eps": norm_eps,
            "qk_norm_eps": qk_norm_eps, "final_norm_eps": final_norm_eps,
        }  # fmt: skip
        super().__init__(**whole)
        for block in self.transformer_blocks:
            block.attn.__class__ = AttentionOfSamples
        if adaln_curve_grid is not None:
            self._tabulate(adaln_curve_grid, time_embed_dim, hidden_size, final_norm_eps)

    def _tabulate(self, grid: int, coordinates: int, width: int, eps: float) -> None:
        """Replace the layers for time by a pruned model's."""
        self.time_proj = nn.Identity()
        self.time_embedder = TimeCurve(grid, coordinates)
        for block in self.transformer_blocks:
            block.adaln_proj = CurveModulation(coordinates, width, block.norm1)
        self.norm_out = CurveNormOut(coordinates, width, eps)
