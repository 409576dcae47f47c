"""Whether what nodes add to weights fits them.

ComfyUI logs a change of another shape, and leaves that weight as it is: some LoRAs for Wan's text to video change one
layer that its image to video has in another shape. What no file can mean is refused.
"""

import logging
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.lora
import torch
from comfy.weight_adapter import LoRAAdapter, WeightAdapterBase
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from .digests import is_finite
from .weight_patches import Patch

_AGAIN = "download the file again"
_MODEL_AS_LORA = "model_as_lora"
"""ComfyUI's kind of change that turns a weight into another model's."""


def misfit(name: str, shape: Sequence[int], change: Patch) -> str:
    """Return why a change does not fit its weight, or nothing.

    Raises:
        InvalidRequest: it has a number that is not finite, or is broken. The message names the weight.
    """
    strength, value, weight_strength, offset, _ = change
    for number in (strength, weight_strength, *_numbers(value)):
        if not is_finite(number):
            raise InvalidRequest(f"the change of {name} has a number that is not finite: {_AGAIN}")
    wanted = list(shape)
    if offset is not None:
        if offset[1] + offset[2] > wanted[offset[0]]:
            return f"the change of {name} is for rows up to {offset[1] + offset[2]}, and the weight has {wanted}"
        wanted[offset[0]] = offset[2]
    if isinstance(value, LoRAAdapter):
        return _misfit_lora(name, wanted, value)
    if isinstance(value, WeightAdapterBase):
        return _misfit_by_trial(name, wanted, value)
    return "" if isinstance(value, list) else _misfit_tensor(name, wanted, value)


def _numbers(value: Any) -> Iterator[Any]:
    """Yield all tensors and numbers of a change."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, WeightAdapterBase):
        yield from _numbers(value.weights)
    elif isinstance(value, Tensor | float):
        yield value


def _misfit_lora(name: str, wanted: list[int], adapter: LoRAAdapter) -> str:
    up, down, _, mid, dora_scale, reshape = adapter.weights
    if 0 in up.shape or 0 in down.shape:
        raise InvalidRequest(f"the factors for {name} have rank 0 ({_sizes(up, down)}): {_AGAIN}")
    if reshape is not None:
        check_enlarged(name, wanted, [*reshape])
    unfit = f"the factors for {name} have shapes {_sizes(up, down)}, and the weight has {wanted}"
    if not up.ndim or not down.ndim or up[0].numel() != len(down):
        return unfit
    columns = down[0].numel()
    if mid is not None:
        if mid.ndim != 4 or down.ndim < 2 or [*mid.shape[:2]] != [len(down)] * 2 or columns != down.shape[1]:
            raise InvalidRequest(f"lora_mid for {name} has shape {[*mid.shape]}, beside {_sizes(up, down)}: {_AGAIN}")
        columns *= mid[0, 0].numel()
    if (len(up), columns) != (wanted[0] if wanted else 1, math.prod(wanted[1:])):
        return unfit
    return "" if dora_scale is None else _misfit_by_trial(name, wanted, adapter)


def _sizes(up: Tensor, down: Tensor) -> str:
    return f"{list(up.shape)} and {list(down.shape)}"


def _misfit_tensor(name: str, wanted: list[int], value: tuple[Any, ...]) -> str:
    kind, parts = value if len(value) == 2 else ("diff", value)
    if kind not in ("diff", "set", _MODEL_AS_LORA):
        return f"the change of {name} is of the unknown kind {kind}"
    if parts[0] is None:  # only the weight's own factor changes
        return ""
    found = list(parts[0].shape)
    if kind == "diff" and len(parts) > 1 and parts[1]["pad_weight"]:
        check_enlarged(name, wanted, found)
    unfit = f"the {kind} for {name} has shape {found}, and the weight has {wanted}"
    if found != wanted and kind != "diff":
        raise InvalidRequest(f"{unfit}: the file is for another model")
    return unfit if found != wanted else ""


def check_enlarged(name: str, shape: Sequence[int], larger: Sequence[int]) -> None:
    """Refuse a change that gives a weight another shape.

    Raises:
        InvalidRequest: it does.
    """
    if len(larger) != len(shape) or any(new < old for new, old in zip(larger, shape, strict=True)):
        raise InvalidRequest(f"reshape_weight for {name} is {[*larger]}, and the weight has {[*shape]}: {_AGAIN}")
    if [*larger] != [*shape]:
        raise InvalidRequest(
            f"a node enlarges {name} from {[*shape]} to {[*larger]}, which a parallel model cannot do yet: load the "
            "model with ComfyUI's own loader, and put Parallel Model behind that node"
        )


def _misfit_by_trial(name: str, wanted: list[int], adapter: WeightAdapterBase) -> str:
    """Let ComfyUI change a weight that has a shape alone."""
    weight = torch.empty(wanted, device="meta")
    with said_by_comfyui() as messages:
        try:
            changed_weight(name, weight, [(1.0, adapter, 1.0, None, None)])
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            messages.append(str(error))
    # What looks at numbers cannot be tried so: ``_changed`` in ``overlays`` will see.
    return "" if not messages or "meta" in messages[0] else f"{name} cannot be changed ({messages[0].strip()})"


def changed_weight(name: str, weight: Tensor, changes: Sequence[Patch]) -> Tensor:
    """Return a weight with all its changes, by ComfyUI's own function, which may change ``weight`` in place.

    Packs replace that function by one of an older signature. So the weight before all changes is passed only where
    ComfyUI passes it and a change asks for it.
    """
    given: dict[str, Any] = {}
    if any(isinstance(value, tuple) and value[0] == _MODEL_AS_LORA for _, value, *_ in changes):
        given = {"original_weights": {name: [(weight.clone(), None)]}}
    changed: Tensor = comfy.lora.calculate_weight(list(changes), weight, name, **given)
    return changed


@contextmanager
def said_by_comfyui() -> Iterator[list[str]]:
    """Collect what ComfyUI logs in this thread where it leaves a weight as it is, whatever ``--verbose`` says."""
    messages: list[str] = []
    thread = threading.get_ident()

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.thread == thread:
                messages.append(record.getMessage())

    root, handler = logging.getLogger(), Collect(logging.WARNING)
    level = root.level
    root.addHandler(handler)
    root.setLevel(min(level, logging.WARNING))
    try:
        yield messages
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
