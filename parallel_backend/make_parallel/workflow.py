"""Recognises the format of a workflow."""

from typing import Any

from ..errors import InvalidRequest
from . import api_format, page_format
from .level import levels
from .loaders import Readable, no_check
from .report import Made

WANTED = "save the workflow in ComfyUI with Export or with Export (API)"


def make_parallel(workflow: Any, *, readable: Readable = no_check, devices: str = "all") -> Made:
    """Put Parallel Model and Parallel VAE behind every loader. The given workflow stays as it is.

    Args:
        workflow: the JSON of a workflow in either format, or of a request to ``/prompt``.
        readable: says of a file why it cannot be parallel.
        devices: for the new nodes.

    Raises:
        InvalidRequest: it is no workflow.
    """
    if not isinstance(workflow, dict):
        raise InvalidRequest(f"the file holds a {type(workflow).__name__}, and no workflow: {WANTED}")
    if "nodes" in workflow:
        _check_graph(workflow)
        return page_format.make_parallel(workflow, readable, devices)
    if isinstance(workflow.get("prompt"), dict):
        made = make_parallel(workflow["prompt"], readable=readable, devices=devices)
        return Made(workflow=workflow | {"prompt": made.workflow}, added=made.added, kept=made.kept)
    if workflow and all(map(_is_entry, workflow.values())):
        return api_format.make_parallel(workflow, readable, devices)
    raise InvalidRequest(f"the file holds no workflow: {WANTED}")


def _is_entry(value: Any) -> bool:
    return (
        isinstance(value, dict) and isinstance(value.get("class_type"), str) and isinstance(value.get("inputs"), dict)
    )


def _check_graph(workflow: dict[str, Any]) -> None:
    for content in levels(workflow):
        nodes, links = content.get("nodes"), content.get("links") or []
        if not isinstance(nodes, list) or not all(map(_is_node, nodes)):
            raise InvalidRequest(f"its nodes are not those of a workflow: {WANTED}")
        if not isinstance(links, list) or not all(map(_is_link, links)):
            raise InvalidRequest(f"its links are not those of a workflow: {WANTED}")


def _is_node(node: Any) -> bool:
    slots = isinstance(node, dict) and all(isinstance(node.get(name) or [], list) for name in ("inputs", "outputs"))
    return slots and isinstance(node.get("type"), str) and isinstance(node.get("id"), int | str)


def _is_link(link: Any) -> bool:
    if isinstance(link, dict):
        return {"id", "origin_id", "origin_slot", "target_id", "target_slot"} <= link.keys()
    return isinstance(link, list) and len(link) >= 6
