"""Finds the pack of nodes that a call, an error or a function comes from."""

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
    """Return the node that calls our code, such as ``TeaCache of ComfyUI-TeaCache``; "" if ComfyUI does.

    Libraries are skipped: they act for their callers. The search ends at ComfyUI's code: callers beyond it, such as
    other packs' samplers and wrappers, need not be the cause.
    """
    codes = [code for code in _stack() if not _is_in(_OWN, code.co_filename)]
    return _node(codes) if _first_owner_is_a_pack(codes) else ""


def failed_node(error: BaseException) -> str:
    """Return the node whose code raised an error, or nothing if ComfyUI's or ours did.

    Libraries are skipped: they act for their callers.
    """
    codes = [*reversed([*_traceback(error)])]
    return _node(codes) if _first_owner_is_a_pack(codes) else ""


def maker(value: Any) -> str:
    """Return the node that made a value, or an item of a dictionary or list; "" if ComfyUI made it.

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
    """Return the pack of a file of code; "" outside of packs and for ours."""
    for root in folder_paths.get_folder_paths("custom_nodes"):
        if _is_in(root, file) and not _is_in(_OWN, file):
            return file[len(root) :].strip(os.sep).partition(os.sep)[0].removesuffix(".py")
    return ""


def _first_owner_is_a_pack(codes: Iterable[CodeType]) -> bool:
    """Whether a pack wrote the first code outside of libraries and Python itself."""
    for file in (code.co_filename for code in codes):
        if _pack(file):
            return True
        if any(_is_in(root, file) for root in (folder_paths.base_path, _OWN)):
            return False
    return False


def _is_in(root: str, file: str) -> bool:
    return file.startswith(os.path.join(root, ""))


def _name(code: CodeType) -> str:
    """Return the name of the node whose class defines a function, or ""."""
    import nodes  # ComfyUI's module of this name

    # Python 3.10 does not know it.
    owner, _, inner = getattr(code, "co_qualname", "").partition(".")
    classes = nodes.NODE_CLASS_MAPPINGS.items() if inner else ()
    return next((name for name, each in classes if each.__name__ == owner and _pack(_file_of(each))), "")


def _file_of(owner: Any) -> str:
    return getattr(sys.modules.get(owner.__module__), "__file__", None) or ""
