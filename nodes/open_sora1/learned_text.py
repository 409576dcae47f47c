"""The text that Open-Sora 1.2 has learned to stand for no prompt."""

from typing import Any

from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.families.open_sora1.files import CLASS_NAME
from ..bridges.stored_weight import stored_weight

_NAME = "y_embedder.y_embedding"


def is_empty(conditioning: list[Any]) -> bool:
    """Whether a conditioning is that of an empty text, which is T5's end of text alone."""
    return all(text.shape[1] == 1 for text, _ in conditioning)


def learned_text(model: Any, positive: list[Any]) -> list[Any]:
    """Return the learned text as CONDITIONING, with as many tokens as the positive prompt.

    Raises:
        InvalidRequest: the MODEL is another, or its file's learned text cannot be read or is too short.
    """
    checkpoint = checkpoint_of(model)
    rows = stored_weight(checkpoint, _NAME)
    if rows is None:
        raise InvalidRequest(
            f"{checkpoint.name} stores {_NAME} compressed, which is not supported: use a safetensors file in bf16, "
            "fp16 or fp32, or write a negative prompt"
        )
    tokens = _tokens(positive)
    if tokens > len(rows):
        raise InvalidRequest(
            f"a prompt of {tokens} tokens is too long: Open-Sora takes at most {len(rows)}; shorten it"
        )
    return [[rows[:tokens].float()[None], {}]]


def checkpoint_of(model: Any) -> Any:
    """Return the checkpoint of a parallel MODEL of Open-Sora 1.2.

    Raises:
        InvalidRequest: the MODEL is another.
    """
    bridge = getattr(getattr(model.model, "model_config", None), "bridge", None)
    if bridge is None or bridge.checkpoint.components.get("transformer") != CLASS_NAME:
        raise InvalidRequest(
            "Open-Sora 1.2 Video needs the MODEL of Open-Sora 1.2, from Parallel Loader or Parallel Model"
        )
    return bridge.checkpoint


def _tokens(positive: list[Any]) -> int:
    """Return the number of tokens that count in the first conditioning."""
    text: Tensor = positive[0][0]
    mask = positive[0][1].get("attention_mask")
    return int(text.shape[1] if mask is None else mask[0].sum())
