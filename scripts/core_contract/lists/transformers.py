"""Core's own transformers, which ours stand in for: how they are made, and how they are called."""

from scripts.core_contract.entry import Entry
from scripts.core_contract.kinds import Calls, Mentions

BRIDGE, MODEL = "nodes/bridges/bridge.py", "nodes/remote/transformer.py"


def transformer(signature: str, by: str, reads: str = "") -> tuple[Entry, ...]:
    """Core's own transformer: made for the names of its weights, and called as ``signature`` of its ``forward``.

    ``reads`` are the arguments of core's call that the bridge reads, separated by spaces.
    """
    name, _, arguments = signature.partition("(")
    everyone = f"{by} {BRIDGE} {MODEL}"
    return (
        Calls(f"{name}(*, device, dtype, operations)", by=f"{by} {BRIDGE}", why="names and shapes of its weights"),
        Calls(
            f"{name}.forward({arguments}",
            by=everyone,
            why="the stand-in is called like it",
            word=f"forward {name} {reads}",
        ),
    )


def skippable(forward: str, by: str, kinds: str = "double_block") -> Entry:
    """Core's transformer lets a node replace blocks of these kinds, separated by spaces, and thereby leave them out."""
    return Mentions(forward, kinds, by=by, why="blocks that a node leaves out")
