"""Whose code it is: the pack of other people's nodes that a call, an error or a function comes from."""

import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import folder_paths

_OWN = str(Path(__file__).parents[2])


def calling_node() -> str:
    """Return the node whose code calls ours, such as ``TeaCache of ComfyUI-TeaCache``; nothing if ComfyUI's code does.

    Libraries call on behalf of those who call them. What is farther out than ComfyUI's code need not have to do with
    the call: other people's samplers and wrappers are around everything.
    """
    codes = [code for code in _stack() if not _is_in(_OWN, code.co_filename)]
    return _node(codes) if _first_owner_is_a_pack(codes) else ""


def failed_node(error: BaseException) -> str:
    """Return the node whose code raised an error, or nothing if ComfyUI's or ours did.

    Libraries raise errors on behalf of those who call them.
    """
    codes = [*reversed([*_traceback(error)])]
    return _node(codes) if _first_owner_is_a_pack(codes) else ""


def maker(value: Any) -> str:
    """Return the node that made a value, or one of those in a dictionary or list; nothing for ComfyUI's.

    Args:
        value: a function, a class, or an object of a class that a pack defines.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next(filter(None, map(maker, value)), "")
    function = inspect.unwrap(getattr(getattr(value, "func", value), "__func__", getattr(value, "func", value)))
    if isinstance(function, FunctionType):
        return _node([function.__code__])
    pack = _pack(_file_of(value if isinstance(value, type) else type(value)))
    return f"a node of {pack}" if pack else ""


def _stack() -> Iterator[CodeType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back  # type: ignore[assignment]


def _traceback(error: BaseException) -> Iterator[CodeType]:
    place = error.__traceback__
    while place is not None:
        yield place.tb_frame.f_code
        place = place.tb_next


def _node(codes: Iterable[CodeType]) -> str:
    """Return the first node among some code, with its pack."""
    pack = ""
    for code in codes:
        found = _pack(code.co_filename)
        if not found:
            continue
        pack = pack or found
        if found == pack and (name := _name(code)):
            return f"{name} of {pack}"
    return f"a node of {pack}" if pack else ""


def _pack(file: str) -> str:
    """Return the pack of a file of code, or nothing if it is in none, or ours."""
    for root in folder_paths.get_folder_paths("custom_nodes"):
        if _is_in(root, file) and not _is_in(_OWN, file):
            return file[len(root) :].strip(os.sep).partition(os.sep)[0].removesuffix(".py")
    return ""


def _first_owner_is_a_pack(codes: Iterable[CodeType]) -> bool:
    """Whether the first code that is neither a library's nor Python's is a pack's, rather than ComfyUI's or ours."""
    for file in (code.co_filename for code in codes):
        if _pack(file):
            return True
        if any(_is_in(root, file) for root in (folder_paths.base_path, _OWN)):
            return False
    return False


def _is_in(root: str, file: str) -> bool:
    return file.startswith(os.path.join(root, ""))


def _name(code: CodeType) -> str:
    """Return the name of the node in whose class a function is defined, or nothing."""
    import nodes  # ComfyUI's module of this name

    # Python 3.10 does not know it.
    owner, _, inner = getattr(code, "co_qualname", "").partition(".")
    classes = nodes.NODE_CLASS_MAPPINGS.items() if inner else ()
    return next((name for name, each in classes if each.__name__ == owner and _pack(_file_of(each))), "")


def _file_of(owner: Any) -> str:
    return getattr(sys.modules.get(owner.__module__), "__file__", None) or ""
