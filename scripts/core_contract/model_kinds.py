"""Kinds of entries about constants, supported models and nodes."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scripts.core_contract.core_source import CoreSource, Found, Function
from scripts.core_contract.entry import Entry, moved


@dataclass(frozen=True)
class Equals(Entry):
    """A constant or class attribute has this value.

    Attributes:
        constant: its name inside the module.
        value: the value.
    """

    constant: str
    value: Any

    @property
    def name(self) -> str:
        return self.constant

    @property
    def default_words(self) -> list[str]:
        return [self.constant.rpartition(".")[2]]

    def compare(self, core: CoreSource, found: Found) -> Iterator[str]:
        if (value := literal(found.node)) != self.value:
            yield f"it is {value!r}, not {self.value!r}, in {found.place}"


@dataclass(frozen=True)
class Detects(Entry):
    """Core detects a ``unet_config`` as this class of ``comfy.supported_models``.

    As in ``model_config_from_unet_config``, the first class of the list ``models`` wins whose ``unet_config`` is a
    subset.

    Attributes:
        kind: the class.
        unet_config: the keys that distinguish it from the other classes.
        model: the class of ``comfy.model_base`` that its ``get_model`` makes.
        latent: its latent format, a class of ``comfy.latent_formats``.
        settings: keys of its ``sampling_settings``, separated by spaces.
    """

    kind: str
    unet_config: Mapping[str, Any]
    model: str
    latent: str
    settings: str = ""

    @property
    def name(self) -> str:
        return self.kind

    @property
    def default_words(self) -> list[str]:
        return [*self.unet_config, *(value for value in self.unet_config.values() if isinstance(value, str))]

    def compare(self, core: CoreSource, found: Found) -> Iterator[str]:
        detected = self._detected(core)
        if detected != self.kind:
            yield f"{dict(self.unet_config)} is detected as {detected}, in {found.place}"
        yield from self._attributes(core, found)

    def _detected(self, core: CoreSource) -> str | None:
        listed = core.find(f"{self.module}.models")
        elements = listed.node.elts if listed and isinstance(listed.node, ast.List) else []
        for element in elements:
            found = core.expression(listed.module, element) if listed else None
            config = core.member(found, "unet_config") if found else None
            subset = literal(config.node) if config else None
            if isinstance(subset, dict) and subset.items() <= dict(self.unet_config).items():
                return ast.unparse(element)
        return None

    def _attributes(self, core: CoreSource, found: Found) -> Iterator[str]:
        latent = core.member(found, "latent_format")
        name = _last_name(latent.node) if latent else None
        if name != self.latent:
            yield f"its latent_format is {name}, not {self.latent}, in {found.place}"
        sampling_settings = core.member(found, "sampling_settings")
        keys = literal(sampling_settings.node) if sampling_settings else {}
        for key in self.settings.split():
            if key not in keys:
                yield f"its sampling_settings have no {key}, in {found.place}"
        get_model = core.member(found, "get_model")
        calls = [ast.unparse(n.func) for n in ast.walk(get_model.node) if isinstance(n, ast.Call)] if get_model else []
        if f"model_base.{self.model}" not in calls:
            yield f"its get_model does not make a model_base.{self.model}, in {(get_model or found).place}"


@dataclass(frozen=True)
class Node(Entry):
    """A node of core with these inputs.

    Attributes:
        node_id: its id, which is ``class_type`` in workflows.
        inputs: names of inputs, separated by spaces.
    """

    node_id: str
    inputs: str = ""

    @property
    def name(self) -> str:
        return self.node_id

    @property
    def default_words(self) -> list[str]:
        return [self.node_id, *self.inputs.split()]

    def find(self, core: CoreSource) -> Found | None:
        """The function that lists the node's inputs. It may be in any file, since prompts name nodes by id alone."""
        for module in (self.module, *core.modules_with(f'"{self.node_id}"')):
            if found := _inputs_function(core, module, self.node_id):
                return found
        return None

    def missing(self, core: CoreSource) -> str:
        return "there is no node of this id" + moved(core, self.node_id)

    def compare(self, core: CoreSource, found: Found) -> Iterator[str]:
        inputs = [*_dict_keys(found.node), *_schema_inputs(core, found)]
        unknown = [name for name in self.inputs.split() if name not in inputs]
        if unknown:
            yield f"no input {', '.join(unknown)}: it has {', '.join(inputs)}, in {found.place}"


def _inputs_function(core: CoreSource, module: str, node_id: str) -> Found | None:
    """``INPUT_TYPES`` of a node in ``NODE_CLASS_MAPPINGS``, or ``define_schema`` of a V3 node."""
    mappings = core.find(f"{module}.NODE_CLASS_MAPPINGS")
    if mappings and isinstance(mappings.node, ast.Dict):
        for key, value in zip(mappings.node.keys, mappings.node.values, strict=True):
            if key is not None and literal(key) == node_id and (found := core.expression(mappings.module, value)):
                return core.member(found, "INPUT_TYPES")
    source = core.module(module)
    for node in source.tree.body if source else []:
        if source and isinstance(node, ast.ClassDef) and (schema := _schema(node, node_id)):
            return Found(source, schema, node)
    return None


def _schema(node: ast.ClassDef, node_id: str) -> Function | None:
    for function in node.body:
        if isinstance(function, Function) and function.name == "define_schema":
            ids = [n.value for n in ast.walk(function) if isinstance(n, ast.keyword) and n.arg == "node_id"]
            if any(literal(value) == node_id for value in ids):
                return function
    return None


def _dict_keys(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is not None and literal(key) in ("required", "optional") and isinstance(value, ast.Dict):
                    yield from (str(literal(inner)) for inner in value.keys if inner is not None)


def _schema_inputs(core: CoreSource, found: Found) -> Iterator[str]:
    """Inputs that a function makes itself, or with functions of core that it calls."""
    for node in ast.walk(found.node):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "Input":
            names = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "id")]
            yield from (str(literal(name)) for name in names[:1])
        elif isinstance(node.func, ast.Name) and (helper := core.expression(found.module, node.func)):
            yield from _schema_inputs(core, helper) if isinstance(helper.node, Function) else ()


def _last_name(node: ast.AST) -> str | None:
    """The name of a class, or the last part of an expression such as ``comfy.latent_formats.Flux``."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "name", None)


def literal(node: ast.AST) -> Any:
    """The value of a literal. For any other expression, its source text."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return ast.unparse(node)
