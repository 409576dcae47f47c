"""Describes an architecture: the names of its weights in files, and how names and shapes determine the config."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidRequest

Shape = tuple[int, ...]
Config = dict[str, Any]
Tensors = dict[str, Any]
Converter = Callable[[Tensors], Tensors]
"""Maps tensors from published names to diffusers' names. It only moves rows and renames."""


def single_file(name: str) -> Converter:
    """Return diffusers' converter of this name."""

    def convert(tensors: Tensors) -> Tensors:
        from diffusers.loaders import single_file_utils

        converted: Tensors = getattr(single_file_utils, name)(dict(tensors))
        return converted

    return convert


BESIDE = "config.json"
"""Key of the metadata under which the text of the JSON file beside a file of weights is, where there is one."""


def describes(entries: Any, class_name: str) -> bool:
    """Whether the content of a ``config.json`` says that it belongs to a class."""
    if not isinstance(entries, dict):
        return False
    named = (entries.get("model_type"), entries.get("_class_name"), entries.get("architectures"))
    return class_name in named[:2] or named[2] == [class_name]


class Weights:
    """The names and shapes of a component's weights, with access by diffusers' names.

    Args:
        shapes: shapes by the file's names, without the file's prefix.
        renamed: the beginnings of the file's names, by the beginnings of diffusers' names.
        metadata: the file's metadata.
    """

    def __init__(self, shapes: Mapping[str, Shape], renamed: Mapping[str, str], metadata: Mapping[str, str]) -> None:
        self.shapes, self.metadata = shapes, metadata
        self._renamed = sorted(renamed.items(), key=lambda pair: -len(pair[0]))

    def __contains__(self, name: str) -> bool:
        return self._in_file(name) in self.shapes

    def shape(self, name: str) -> Shape:
        """Return the shape of a weight.

        Raises:
            KeyError: the file lacks the weight. The message has the file's name for it.
        """
        return self.shapes[self._in_file(name)]

    def rows(self, name: str) -> int:
        """Return the first dim of a weight: a linear layer's outputs."""
        return self.shape(name)[0]

    def columns(self, name: str) -> int:
        """Return the second dim of a weight: a linear layer's inputs."""
        return self.shape(name)[1]

    def count(self, layers: str) -> int:
        """Return the number of layers in a list, counted from 0 up to the first gap."""
        start = f"{self._in_file(layers)}."
        numbers = {name.removeprefix(start).partition(".")[0] for name in self.shapes if name.startswith(start)}
        count = 0
        while str(count) in numbers:
            count += 1
        return count

    def described(self, component: str) -> dict[str, Any]:
        """Return a component's part of the metadata's ``config``, as ComfyUI reads it."""
        try:
            entries = json.loads(self.metadata.get("config", "{}")).get(component)
        except (ValueError, RecursionError, AttributeError):
            return {}
        return entries if isinstance(entries, dict) else {}

    def beside(self, class_name: str) -> dict[str, Any]:
        """Return what the JSON file beside the weights says of this class; nothing if it describes another."""
        try:
            entries = json.loads(self.metadata.get(BESIDE, "{}"))
            return entries if describes(entries, class_name) else {}
        except (ValueError, RecursionError):
            return {}

    def _in_file(self, name: str) -> str:
        for ours, theirs in self._renamed:
            if name == ours or name.startswith(f"{ours}."):
                return theirs + name.removeprefix(ours)
        return name


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One diffusers class whose weights can be recognised in a single file.

    Attributes:
        class_name: diffusers' class.
        native: names that together identify this architecture's files in original names.
        diffusers: names that together identify its files in diffusers' names.
        config: returns the config of diffusers' class.
        layers: what ``layer`` returns for all names that files of this architecture have, in either naming. Empty if
            files may hold anything else.
        renamed: beginnings of original names by the beginnings of diffusers' names, for what ``config`` asks for.
        published: returns the published name for a name that ComfyUI saves.
        in_diffusers: returns diffusers' names by the published ones, without weights that the class does not use; None
            if only ``convert`` knows them.
        convert: the converter of original names; None if they are diffusers', or ``in_diffusers`` is enough.
        unused: names that neither this class nor ComfyUI's uses.
        one_first: the number of dims of weights whose first dim is 1, by name without numbers of blocks. GGUF files
            that llama.cpp has written lack that dim.
        expected: returns the allowed values of the settings that ComfyUI reads from the metadata, by setting. ComfyUI
            has other classes or computes something else for other values.
        foreign: parts of names that only other models have, with a description of these models.
        pipeline: returns the class of diffusers' pipeline, if it says more than the transformer's config.
    """

    class_name: str
    native: tuple[str, ...]
    diffusers: tuple[str, ...]
    config: Callable[[Weights], Config]
    layers: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    published: Callable[[str], str] = field(default=lambda name: name)
    in_diffusers: Callable[[Iterable[str]], Mapping[str, str]] | None = None
    convert: Converter | None = None
    unused: frozenset[str] = frozenset()
    one_first: Mapping[str, int] = field(default_factory=dict)
    flat: Mapping[str, int] = field(default_factory=dict)
    expected: Callable[[Config], Mapping[str, tuple[Any, ...]]] = field(default=lambda config: {})
    foreign: Mapping[str, str] = field(default_factory=dict)
    pipeline: Callable[[Weights], str] = field(default=lambda weights: "")

    def knows(self, name: str) -> bool:
        """Whether a weight of this name, a published one or diffusers', may be of this architecture."""
        if name in self.unused:
            return True
        return not is_of_lora(name) and (not self.layers or layer(name) in self.layers)

    def to_diffusers(self, tensors: Tensors) -> Tensors:
        """Return tensors by diffusers' names from tensors by published names."""
        if self.convert is not None:
            return self.convert(tensors)
        assert self.in_diffusers is not None
        return {new: tensors[name] for name, new in self.in_diffusers(tensors).items()}

    def shape(self, name: str, stored: Shape) -> Shape:
        """Return the shape of a weight from its shape in a file."""
        kind = re.sub(r"\.\d+(?=\.)", "", name)
        rows = self.flat.get(kind, 0)
        if rows and len(stored) == 1 and stored[0] % rows == 0:
            return (rows, stored[0] // rows)
        return (1,) * (self.one_first.get(kind, 0) - len(stored)) + stored


def not_supported(what: str) -> InvalidRequest:
    """Return the error about a file that only ComfyUI can load. ``what`` is a sentence about its content."""
    return InvalidRequest(f"{what}, which is not supported: load it with ComfyUI's own loader")


def layers(names: str) -> frozenset[str]:
    """Return the names in a text. ``blocks(attn ffn)`` stands for ``blocks.attn blocks.ffn``."""
    inner = re.findall(r"(\w+)\(([^)]*)\)", names)
    lists = {f"{outer}.{name}" for outer, listed in inner for name in listed.split()}
    return frozenset(lists | set(re.sub(r"\w+\([^)]*\)", "", names).split()))


def layer(name: str) -> str:
    """Return the beginning of a weight's name: the top-level layer, and for entries of a list the layer inside."""
    top, number, inner, *_ = (*name.split("."), "", "")
    return f"{top}.{inner}" if number.isdigit() and inner not in ("", "weight", "bias") else top


_LORA = (
    ".lora_up.", ".lora_down.", ".lora_A.", ".lora_B.", ".lora.up.", ".lora.down.", ".lokr_w", ".hada_w", ".dora_scale",
)  # fmt: skip
"""Parts of names. Every file of a LoRA has at least one of them."""


def is_of_lora(name: str) -> bool:
    """Whether a weight is part of a LoRA. Its names contain names of the model."""
    return any(part in name for part in _LORA)


def renamed(name: str, parts: Iterable[tuple[str, str]]) -> str:
    """Return a name with parts of it replaced, one after the other."""
    for old, new in parts:
        name = name.replace(old, new)
    return name


def substituted(name: str, patterns: Iterable[tuple[str, str]]) -> str:
    """Return a name with regular expressions replaced in it, one after the other."""
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name
