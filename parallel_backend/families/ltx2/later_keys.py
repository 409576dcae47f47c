"""The order of LTX-2's attention across its streams, where ComfyUI has another one than diffusers.

In diffusers and in ComfyUI up to 0.27, the sound attends to the picture as it was before it attended to the sound. From
0.33 on, ComfyUI lets it attend to the picture as it is afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class LaterKeys:
    """Gives a layer's sound the picture after its attention to the sound. Outside of ``by`` it changes nothing.

    Args:
        layer: a block of diffusers' transformer.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self._given: tuple[Tensor, Tensor, Tensor] | None = None
        self._before: Tensor | None = None
        self._added: Tensor | None = None
        layer.audio_to_video_norm.register_forward_pre_hook(self._note_before)
        layer.audio_to_video_attn.register_forward_hook(self._note_added)
        layer.video_to_audio_attn.register_forward_pre_hook(self._keys, with_kwargs=True)

    @contextmanager
    def by(self, share: Tensor | None, across: Tensor, gate: Tensor) -> Iterator[None]:
        """Change the keys in what runs inside.

        Args:
            share: how much of what the picture has heard it adds before the sound attends to it, ``[B]``: 0 or 1. None
                changes nothing.
            across: the layer's ``temb_ca_scale_shift``.
            gate: the layer's ``temb_ca_gate``.
        """
        self._given = None if share is None else (share, across, gate)
        try:
            yield
        finally:
            self._given = self._before = self._added = None

    def _note_before(self, module: nn.Module, arguments: tuple[Tensor]) -> None:
        if self._given is not None:
            (self._before,) = arguments

    def _note_added(self, module: nn.Module, arguments: Any, out: Tensor) -> None:
        if self._given is not None:
            self._added = out

    def _keys(self, module: nn.Module, arguments: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if self._given is None:
            return None
        (share, across, gate), layer = self._given, self.layer
        assert self._before is not None, "the layer has another order"
        assert self._added is not None, "the layer has another order"
        table, batch = layer.video_a2v_cross_attn_scale_shift_table, len(across)
        _, _, scale, shift = layer.get_mod_params(table[:4], across, batch)
        (gated,) = layer.get_mod_params(table[4:], gate, batch)
        after = self._before + share[:, None, None].to(self._before.dtype) * gated * self._added
        keys = layer.audio_to_video_norm(after) * (1 + scale) + shift
        return arguments, options | {"encoder_hidden_states": keys}
