"""Encoding text on rank 0."""

from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidRequest
from ..protocol.frames import TensorMeta


def check(metas: tuple[TensorMeta, ...]) -> None:
    """Check the header of an ``EncodeText``.

    Raises:
        InvalidRequest: ids or lengths are missing or have another shape.
    """
    shapes = {meta.name: meta.shape for meta in metas if meta.dtype == "int64"}
    ids, lengths = shapes.get("ids", ()), shapes.get("lengths", ())
    if len(metas) != 2 or len(ids) != 2 or lengths != ids[:1] or 0 in ids:
        raise InvalidRequest("encoding text needs int64 tensors ids [N, L] and lengths [N], none of them empty")


def encode(encoder: torch.nn.Module, ids: Tensor, lengths: Tensor, *, layer: int = -1) -> Tensor:
    """Embeddings ``[N, L, D]`` in float32, zero after each text's length.

    Args:
        ids: token ids ``[N, L]``.
        lengths: number of tokens of each text ``[N]``.
        layer: see ``EncodeText``.

    Raises:
        InvalidRequest: an id is outside the vocabulary, or a length is not in 1 .. L.
    """
    vocabulary = encoder.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise InvalidRequest(
            f"token ids from {int(ids.min())} to {int(ids.max())} do not fit this text encoder's vocabulary of "
            f"{vocabulary}: use the tokenizer of the same checkpoint"
        )
    if lengths.min() < 1 or lengths.max() > ids.shape[1]:
        raise InvalidRequest(f"lengths {lengths.tolist()} are not all in 1 .. {ids.shape[1]}")
    inside = torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]
    hidden = _run(encoder, layer, input_ids=ids * inside, attention_mask=inside.to(torch.int64))
    return torch.where(inside[..., None], hidden.float(), 0.0)


def _run(encoder: Any, layer: int, **inputs: Tensor) -> Tensor:
    """The normalised output of a layer, equal to that of ``comfy.text_encoders.t5.T5Stack``."""
    stack = encoder.encoder
    if not -len(stack.block) <= layer < -1:
        last: Tensor = encoder(**inputs).last_hidden_state
        return last
    outputs: list[Tensor] = []
    hook = stack.block[layer].register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    try:
        encoder(**inputs)
    finally:
        hook.remove()
    normalised: Tensor = stack.final_layer_norm(outputs[0])
    return normalised
