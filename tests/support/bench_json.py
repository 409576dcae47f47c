"""What ``python -m lab bench ... --json`` prints."""

from typing import Any

import msgspec


class _Document(msgspec.Struct, frozen=True):
    machine: dict[str, Any]
    results: msgspec.Raw


def results(text: str, kind: Any) -> Any:
    """Return the results as objects of a type. A document always says the machine and its versions."""
    document = msgspec.json.decode(text, type=_Document)
    assert document.machine.keys() >= {"version", "torch", "devices", "diffusers", "python"}
    return msgspec.json.decode(document.results, type=kind)
