"""ComfyUI's CLIP whose weights are read when something is called, and not because somebody looks.

ComfyUI's caches and memory management look at every output, in any thread. So until the first call, the CLIP, its
patcher, its text encoder and its tokenizer are stand-ins of ComfyUI's classes. A call of a method reads the weights and
turns the stand-in into the object that was read. So does setting an attribute of a part, which would be lost otherwise.
"""

import copy
import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import torch
from typing_extensions import override

from ..bridges.refusals import Unavailable

_SIZES = (
    "current_loaded_device", "get_ram_usage", "is_clone", "is_dynamic", "loaded_ram_size", "loaded_size",
    "lowvram_patch_counter", "model_size", "pinned_memory_size",
)  # fmt: skip
"""What memory management asks a patcher or a CLIP. The answers hold without weights, which take no memory yet."""
_OWN = ("clip_layer", "set_tokenizer_option", "add_hooks_to_dict")
"""Methods of a CLIP that concern its own attributes alone."""


class _Source:
    """Reads a CLIP once.

    Attributes:
        found: the CLIP, once it is read.
        reading: held by the thread that reads it. It may ask for parts meanwhile.
    """

    def __init__(self, read: Callable[[], comfy.sd.CLIP]) -> None:
        self._read = read
        self.found: comfy.sd.CLIP | None = None
        self.reading = threading.RLock()

    def clip(self) -> comfy.sd.CLIP:
        """Return the CLIP."""
        if self.found is None:
            self.found = self._read()
        return self.found

    def __deepcopy__(self, memo: Any) -> "_Source":
        """Return a copy with a lock of its own, since locks cannot be copied."""
        copied = _Source(self._read)
        copied.found = copy.deepcopy(self.found, memo)
        return copied


def _reads_first(*names: str, of: type = object, but: Iterable[str] = ()) -> Callable[[type], type]:
    """Make methods of a class read first: all that another class has, and others by name."""
    found = {name for name, _ in inspect.getmembers(of, inspect.isfunction) if not name.startswith("__")}

    def give(kind: type) -> type:
        for name in {*found, *names} - {*but}:
            setattr(kind, name, _read_first(name))
        return kind

    return give


def _read_first(name: str) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        # What is bound to a stand-in may be called after the stand-in has turned.
        if isinstance(self, _Part | LazyCoreClip):
            self.become_read()
        return getattr(self, name)(*args, **kwargs)

    return call


def _turn(stand_in: object, kind: type, attributes: dict[str, Any]) -> None:
    """Turn an object into another one. Its own ``__setattr__`` may be the stand-in's."""
    object.__setattr__(stand_in, "__dict__", attributes)
    object.__setattr__(stand_in, "__class__", kind)


class _Part:
    """Stands for a part of a CLIP."""

    def become_read(self) -> None:
        """Read the weights, and turn this object into what was read."""
        source = vars(self).get("_source")
        if source is None:
            return
        with source.reading:
            if "_source" in vars(self):  # no other thread has done it
                read = getattr(source.clip(), vars(self)["_part"])
                _turn(self, type(read), vars(read))

    def __getattr__(self, name: str) -> Any:
        source = vars(self).get("_source")
        if source is not None and source.found is not None and not name.startswith("__"):
            self.become_read()
            return getattr(self, name)
        raise Unavailable(
            f"a node uses {name} of a CLIP before the CLIP is used: encode a prompt with it first, or load it with "
            "ComfyUI's Load CLIP"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        self.become_read()
        setattr(self, name, value)


@_reads_first(of=comfy.model_patcher.ModelPatcher, but=_SIZES)
class _Patcher(_Part, comfy.model_patcher.ModelPatcher):  # type: ignore[misc]
    @override
    def model_size(self) -> int:
        return 0

    @override
    def __del__(self) -> None:
        """Release nothing, for nothing is loaded."""


@_reads_first(
    "encode_token_weights", "generate", "load_sd", "reset_clip_options", "set_clip_options",
    of=torch.nn.Module, but=("extra_repr", "_get_name"),
)  # fmt: skip
class _TextEncoder(_Part, torch.nn.Module):
    pass


@_reads_first("decode", "state_dict", "tokenize_with_weights", "untokenize")
class _Tokenizer(_Part):
    pass


@_reads_first(of=comfy.sd.CLIP, but=(*_SIZES, *_OWN))
class LazyCoreClip(comfy.sd.CLIP):  # type: ignore[misc]
    """A CLIP that is not read yet. It turns into a plain one."""

    def __init__(self, read: Callable[[], comfy.sd.CLIP]) -> None:
        super().__init__(no_init=True)
        self._source = _Source(read)
        self.cond_stage_model, self.tokenizer = torch.nn.Module(), _Tokenizer()
        self.patcher = _patcher(self.cond_stage_model)
        for part, kind in (("cond_stage_model", _TextEncoder), ("patcher", _Patcher), ("tokenizer", _Tokenizer)):
            stand_in = getattr(self, part)
            _turn(stand_in, kind, {**vars(stand_in), "_source": self._source, "_part": part})
        self.apply_hooks_to_conds = self.layer_idx = None
        self.use_clip_schedule = False
        self.tokenizer_options: dict[str, Any] = {}

    def become_read(self) -> None:
        """Read the weights, and turn this object into ComfyUI's CLIP, with what nodes have set on this one."""
        source = vars(self).get("_source")
        if source is None:
            return
        with source.reading:
            own = dict(vars(self))
            if own.pop("_source", None) is source:  # no other thread has done it
                kept = {name: value for name, value in own.items() if not isinstance(value, _Part)}
                _turn(self, comfy.sd.CLIP, {**vars(source.clip()), **kept})


def _patcher(encoder: torch.nn.Module) -> Any:
    """Return a patcher as ComfyUI makes it for a CLIP."""
    management = comfy.model_management
    devices = management.text_encoder_device(), management.text_encoder_offload_device()
    patcher = comfy.model_patcher.ModelPatcher(encoder, *devices)
    patcher.hook_mode, patcher.is_clip = comfy.hooks.EnumHookMode.MinVram, True
    return patcher
