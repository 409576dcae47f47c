"""Finds the loader upstream of a node's input in the prompt, and rebuilds what lies between them behind our loader.

ComfyUI's own loader then has no consumer, so ComfyUI never reads the weights.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comfy_execution.graph import DynamicPrompt
from comfy_execution.graph_utils import GraphBuilder, is_link

from ..backend import checkpoints
from ..backend.executing import remember_expanded
from ..backend.session import current
from ..bridges.refusals import layers_unavailable
from .preflight import REPLACING, executed_nodes

Link = list[Any]
"""A node's id and the number of its output."""


@dataclass(frozen=True, kw_only=True)
class _Source:
    """The file that a node's input came from when it last ran.

    Attributes:
        name: as Parallel Loader lists it.
        stamp: its stamp then.
        changes: how often it had changed until then.
    """

    name: str
    stamp: str
    changes: int


class _Sources(dict[str, _Source]):
    """By node."""


@dataclass(frozen=True, kw_only=True)
class CoreLoader:
    """A loader that reads one file.

    Attributes:
        kind: ComfyUI's kind of the file.
        name: the input that names the file.
        output: the output that is followed.
        plain: the other inputs, and the values with which it loads the file as it is.
    """

    kind: str
    name: str
    output: int
    plain: Mapping[str, Any]


_READS_WEIGHTS = re.compile("merge", re.IGNORECASE)
"""Nodes of these classes read weights, so what they make is read from ComfyUI and not from the file."""

_MODEL_LOADERS: dict[str, CoreLoader] = {
    "UNETLoader": CoreLoader(kind="diffusion_models", name="unet_name", output=0, plain={"weight_dtype": "default"}),
    "CheckpointLoaderSimple": CoreLoader(kind="checkpoints", name="ckpt_name", output=0, plain={}),
    # Of the extension ComfyUI-GGUF.
    "UnetLoaderGGUF": CoreLoader(kind="diffusion_models", name="unet_name", output=0, plain={}),
    "UnetLoaderGGUFAdvanced": CoreLoader(
        kind="diffusion_models", name="unet_name", output=0, plain={"dequant_dtype": "default"}
    ),
}
_VAE_LOADERS: dict[str, CoreLoader] = {
    "VAELoader": CoreLoader(kind="vae", name="vae_name", output=0, plain={}),
    "CheckpointLoaderSimple": CoreLoader(kind="checkpoints", name="ckpt_name", output=2, plain={}),
}
_FOLLOWED = {"ParallelModel": ("model", "MODEL", _MODEL_LOADERS), "ParallelVAE": ("vae", "VAE", _VAE_LOADERS)}
"""By our nodes: the lazy input that is followed, its type, and the loaders to look for."""


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """A loader, and the nodes between it and an input.

    Attributes:
        loader_id: the loader's node.
        kind: ComfyUI's kind of its file.
        file: the file's name, or the link that it arrives by.
        between: node, the input to follow, and the output that was followed, from the loader on.
    """

    loader_id: str
    kind: str
    file: str | Link
    between: tuple[tuple[str, str, int], ...]

    @property
    def model_name(self) -> str | None:
        """The name by which Parallel Loader lists the file; None if the name arrives by a link."""
        return f"{self.kind}/{self.file}" if isinstance(self.file, str) else None


def find_upstream(prompt: DynamicPrompt, node_id: str) -> Upstream | None:
    """Follow the MODEL or VAE of one of our nodes back to a loader, through nodes with one input of the same type.

    Args:
        prompt: the prompt with the nodes that other nodes expanded into.
        node_id: a Parallel Model or Parallel VAE.

    Returns:
        None if there is no such loader, or it changes the weights while loading, or a VAE's file is not known yet.
    """
    own = prompt.get_node(node_id)
    name, io_type, loaders = _FOLLOWED[own["class_type"]]
    found = _follow(prompt, own["inputs"].get(name), io_type, loaders)
    if found and io_type == "VAE" and (found.between or found.model_name is None):
        return None
    return found


def _follow(prompt: DynamicPrompt, link: Any, io_type: str, loaders: Mapping[str, CoreLoader]) -> Upstream | None:
    between: list[tuple[str, str, int]] = []
    seen: set[str] = set()
    while is_link(link) and link[0] not in seen and prompt.has_node(link[0]):
        node_id, output = link
        seen.add(node_id)
        node = prompt.get_node(node_id)
        loader = loaders.get(node["class_type"])
        if loader is not None and loader.output == output:
            return _found(node_id, node["inputs"], loader, between)
        same_type = [name for name, value in node["inputs"].items() if _type_of(prompt, value) == io_type]
        if len(same_type) != 1 or _READS_WEIGHTS.search(node["class_type"]):
            return None
        between.append((node_id, same_type[0], output))
        link = node["inputs"][same_type[0]]
    return None


def _found(
    node_id: str, inputs: Mapping[str, Any], loader: CoreLoader, between: Sequence[tuple[str, str, int]]
) -> Upstream | None:
    """Return a loader with its file, or None if its other inputs make it change the weights."""
    file: Any = inputs.get(loader.name)
    is_plain = all(inputs.get(name, value) == value for name, value in loader.plain.items())
    if not is_plain or not (isinstance(file, str) or is_link(file)):
        return None
    return Upstream(loader_id=node_id, kind=loader.kind, file=file, between=tuple(reversed(between)))


def remember_source(node_id: str, name: str) -> None:
    """Note which file a node's input came from, for ``source_changes``."""
    source = _Source(name=name, stamp=checkpoints.stamp(name), changes=source_changes(node_id))
    current().part(_Sources)[node_id] = source


def source_changes(node_id: str) -> int:
    """Return how often the file has changed that a node's input came from when it last ran.

    ComfyUI asks for it before the node knows the prompt's graph. The first run does not count as a change, so an
    unchanged prompt is not run again.
    """
    source = current().part(_Sources).get(node_id)
    if source is None:
        return 0
    return source.changes + (checkpoints.stamp(source.name) != source.stamp)


def rebuild(prompt: DynamicPrompt, upstream: Upstream, **inputs: Any) -> tuple[Link, dict[str, Any]]:
    """Return the output of a copy of the nodes between, behind Parallel Loader, and the graph of the copies.

    Args:
        inputs: Parallel Loader's inputs, without the file's name.
    """
    graph = GraphBuilder()
    name = upstream.model_name or graph.node(
        "StringConcatenate", string_a=upstream.kind, string_b=upstream.file, delimiter="/"
    ).out(0)
    given = {name: value for name, value in inputs.items() if value is not None}
    link: Link = graph.node("ParallelLoader", model_name=name, **given).out(0)
    for node_id, name, output in upstream.between:
        node = prompt.get_node(node_id)
        copy = graph.node(node["class_type"])
        for key, value in (node["inputs"] | {name: link}).items():
            copy.set_input(key, value)
        remember_expanded(copy.id, copy.inputs)
        link = copy.out(output)
    return link, graph.finalize()


def describe_reading(prompt: DynamicPrompt, upstream: Upstream, node_id: str) -> str:
    """Return what one of our nodes shows about its file, and about what makes ComfyUI load it, too."""
    file = upstream.file if isinstance(upstream.file, str) else "the file"
    consumers = _other_consumers(prompt, upstream, node_id)
    if not consumers:
        return f"{file}: ComfyUI does not load it"
    return f"{file}: ComfyUI loads it too, for {', '.join(consumers)}"


def _other_consumers(prompt: DynamicPrompt, upstream: Upstream, node_id: str) -> list[str]:
    """Return the nodes that still make ComfyUI run the loader, as ``class (id)``."""
    chain = {upstream.loader_id, *(each for each, _, _ in upstream.between)}
    nodes = {each: _without_lazy(prompt, each) for each in prompt.all_node_ids()}
    expanded = prompt.all_node_ids() - prompt.get_original_prompt().keys()
    others = set(executed_nodes(nodes, expanded)) - chain - {node_id}
    return sorted(
        f"{nodes[each]['class_type']} ({each})"
        for each in others
        if any(is_link(value) and value[0] in chain for value in nodes[each]["inputs"].values())
    )


def _without_lazy(prompt: DynamicPrompt, node_id: str) -> dict[str, Any]:
    """Return a node without the input that ComfyUI does not compute, because its file is known."""
    node: dict[str, Any] = prompt.get_node(node_id)
    if node["class_type"] not in _FOLLOWED or find_upstream(prompt, node_id) is None:
        return node
    lazy, *_ = _FOLLOWED[node["class_type"]]
    return node | {"inputs": {name: value for name, value in node["inputs"].items() if name != lazy}}


def check_upstream(prompt: DynamicPrompt, node_id: str) -> None:
    """Refuse nodes that replace attention and whose MODEL reaches a node.

    Raises:
        InvalidRequest: there is such a node. The message names it.
    """
    pending, seen = [node_id], set[str]()
    while pending:
        each = pending.pop()
        if each in seen:
            continue
        seen.add(each)
        node = prompt.get_node(each)
        if node["class_type"] in REPLACING:
            raise layers_unavailable(f"{node['class_type']} ({each}) replaces attention in the model")
        pending += [value[0] for value in node["inputs"].values() if _type_of(prompt, value) == "MODEL"]


def _type_of(prompt: DynamicPrompt, value: Any) -> str | None:
    """Return ComfyUI's type of what arrives by a link."""
    import nodes  # ComfyUI's module of this name

    if not is_link(value) or not prompt.has_node(value[0]):
        return None
    classes: dict[str, Any] = nodes.NODE_CLASS_MAPPINGS
    types = classes[prompt.get_node(value[0])["class_type"]].RETURN_TYPES
    return str(types[value[1]]) if value[1] < len(types) else None
