"""A workflow in API format: class and inputs by node, where an input may be another node's id and output."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from .loaders import LOADERS, TEXT, Readable, reason
from .report import NODES, Added, Kept, Kind, Loader, Made

Prompt = dict[str, dict[str, Any]]


def make_parallel(given: Mapping[str, Any], readable: Readable, devices: str) -> Made:
    """Put nodes behind the loaders of a prompt."""
    prompt: Prompt = copy.deepcopy(dict(given))
    added, kept = list[Added](), list[Kept]()
    for key in list(prompt):
        loader = _loader(prompt, key)
        if TEXT.search(loader.type):
            kept.append(Kept(loader=loader, kind="CLIP", reason="text"))
        known = LOADERS.get(loader.type)
        for kind, output in known.outputs.items() if known else ():
            takers = list(_takers(prompt, key, output))
            if not takers:
                continue
            file = str(prompt[key]["inputs"].get(known.file, "")) if known else ""
            why = _why(prompt, loader, kind, file, takers, readable)
            if why:
                kept.append(why)
            else:
                added.append(Added(loader=loader, kind=kind, node=_insert(prompt, key, kind, output, takers, devices)))
    return Made(workflow=prompt, added=tuple(added), kept=tuple(kept))


def _loader(prompt: Prompt, key: str) -> Loader:
    node = prompt[key]
    kind = str(node["class_type"])
    meta = node.get("_meta")
    title = meta.get("title") if isinstance(meta, dict) else None
    return Loader(node=key, type=kind, title=str(title or kind))


def _why(
    prompt: Prompt, loader: Loader, kind: Kind, file: str, takers: list[tuple[str, str]], readable: Readable
) -> Kept | None:
    near = [prompt[key]["class_type"] for key, _ in takers]
    why = reason(loader.type, kind, file, near, _downstream(prompt, takers, kind))
    if why:
        return Kept(loader=loader, kind=kind, reason=why)
    detail = readable(loader.type, file, kind)
    return Kept(loader=loader, kind=kind, reason="file", detail=detail) if detail else None


def _takers(prompt: Prompt, key: str, output: int) -> Iterator[tuple[str, str]]:
    """Yield the nodes and inputs that an output leads to."""
    for taker, node in prompt.items():
        for name, value in node["inputs"].items():
            if is_link(value) and (str(value[0]), value[1]) == (key, output):
                yield taker, name


def _downstream(prompt: Prompt, takers: list[tuple[str, str]], kind: Kind) -> set[str]:
    """Return the classes of what takes an output, and of what gets it passed on: by an input that is named after it."""
    pending, seen = [key for key, _ in takers], set[str]()
    while pending:
        key = pending.pop()
        if key not in seen:
            seen.add(key)
            pending += [taker for taker, name in _takers(prompt, key, 0) if kind.lower() in name]
    return {str(prompt[key]["class_type"]) for key in seen}


def _insert(prompt: Prompt, key: str, kind: Kind, output: int, takers: list[tuple[str, str]], devices: str) -> str:
    """Put a node between an output and what takes it, and return its id."""
    new = _free_key(prompt)
    name = NODES[kind]
    title = {"ParallelModel": "Parallel Model", "ParallelVAE": "Parallel VAE"}[name]
    inputs = {kind.lower(): [key, output], "devices": devices}
    prompt[new] = {"class_type": name, "inputs": inputs, "_meta": {"title": title}}
    for taker, given in takers:
        prompt[taker]["inputs"][given] = [new, 0]
    return new


def _free_key(prompt: Prompt) -> str:
    numbers = [int(part) for key in prompt for part in key.split(":") if part.isdecimal()]
    return str(max(numbers, default=0) + 1)


def is_link(value: Any) -> bool:
    """Whether an input is another node's output."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str | int) and isinstance(value[1], int)
