"""Make docs/nodes.md of what the sweep over ComfyUI's nodes has found: ``python -m scripts.node_table``."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOUND = ROOT / "tests" / "inside_comfyui" / "core_nodes.json"
FOUND_IN_PACKS = FOUND.with_name("pack_nodes.json")
PAGE = ROOT / "docs" / "nodes.md"

COLUMNS = {"W": "same effect", "N": "no effect", "R": "refused", "F": "error"}
"""Headings by the file's letters."""

INTRODUCTION = """\
# ComfyUI's nodes with a parallel MODEL

Every node of ComfyUI {version} that takes and gives a MODEL or a CONDITIONING, tried with these models:

{models}.

A parallel MODEL never ignores a node in silence:

- **same effect**: the latents equal those of ComfyUI alone, to 1e-4.
- **no effect**: the node changes nothing in ComfyUI alone either.
- **refused**: an error says what the node does and what to do instead.
- **error**: the node or the model raises an error in ComfyUI alone. A parallel MODEL raises the same one, or computes \
what the node asks for. Most of these nodes are for other models.

A test runs every node in KSampler and Parallel Sampler, on one rank and on two that share the weights, and compares \
what happens with this page: `bash scripts/test.sh --grid test_core_nodes`. It makes up the nodes' inputs, so a node \
may also be refused for some of its inputs only; the error then says which. Nodes that load a MODEL are on the help \
pages of Parallel Loader and Parallel Model.
"""

PACKS = """
## Nodes of other packs

Nodes of widespread packs that take and give a MODEL, tried in the same way with {models}. Their code is not in this \
repository: `PARALLEL_DIT_PACKS` names a folder with packs, and `bash scripts/test.sh --grid test_packs` runs them. A \
refusal names the node or its pack, and says what to use instead. RES4LYF's samplers give ComfyUI's own latents, to \
3e-6 in float32 or to their own rounding.
"""


def page(found: Mapping[str, object], found_in_packs: Mapping[str, object]) -> str:
    """Return the text of the page.

    Args:
        found: the content of ``FOUND``.
        found_in_packs: the content of ``FOUND_IN_PACKS``.
    """
    models, outcomes = found["models"], found["outcomes"]
    assert isinstance(models, list)
    assert isinstance(outcomes, dict)
    newest, *others = sorted(outcomes, key=_release, reverse=True)
    lines = [
        INTRODUCTION.format(version=newest, models=_tried(outcomes[newest], models)),
        f"| node | {' | '.join(COLUMNS.values())} |",
        f"|{'---|' * (1 + len(COLUMNS))}",
        *(_row(node, letters, models) for node, letters in outcomes[newest].items()),
    ]
    for version in others:
        lines += ["", _differences(version, outcomes[version], outcomes[newest], models)]
    return "\n".join([*lines, *_packs(found_in_packs)]) + "\n"


def _tried(outcomes: Mapping[str, str], models: Sequence[str]) -> str:
    """Return the models that nodes were tried with, and those that were left out."""
    left_out = [model for model, letters in zip(models, zip(*outcomes.values(), strict=True), strict=True)
                if set(letters) == {"-"}]  # fmt: skip
    tried = ", ".join(model for model in models if model not in left_out)
    return f"{tried}. Not tried with it: {', '.join(left_out)}" if left_out else tried


def _packs(found: Mapping[str, object]) -> Iterator[str]:
    """Yield the lines about other packs."""
    models, packs = found["models"], found["packs"]
    assert isinstance(models, list)
    assert isinstance(packs, dict)
    yield PACKS.format(models=", ".join(models))
    yield f"| pack | node | {' | '.join(COLUMNS.values())} |"
    yield f"|{'---|' * (2 + len(COLUMNS))}"
    for pack, nodes in packs.items():
        yield from (f"| {pack} {_row(node, letters, models)}" for node, letters in nodes.items())


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _row(node: str, letters: str, models: Sequence[str]) -> str:
    tried = [model for model, letter in zip(models, letters, strict=True) if letter != "-"]
    cells = (_cell([m for m, each in zip(models, letters, strict=True) if each == letter], tried) for letter in COLUMNS)
    return f"| {node} | {' | '.join(cells)} |"


def _cell(named: Sequence[str], tried: Sequence[str]) -> str:
    """Return the models of a cell, or all but the others, whichever is shorter."""
    if len(named) == len(tried):
        return "all"
    if len(named) > len(tried) / 2:
        return "all but " + ", ".join(model for model in tried if model not in named)
    return ", ".join(named)


def _differences(version: str, letters: dict[str, str], newest: dict[str, str], models: Sequence[str]) -> str:
    """Return a paragraph about what is different in another version."""
    different = [
        f"{node} with {model}: {COLUMNS[here]}"
        for node, line in letters.items()
        for model, here, there in zip(models, line, newest.get(node, "-" * len(models)), strict=True)
        if here != there and "-" not in (here, there)
    ]
    only = [node for node in letters if node not in newest]
    return f"ComfyUI {version} has the same but for: {_listed(different)}. Nodes that only it has: {_listed(only)}."


def _listed(items: Iterable[str]) -> str:
    return "; ".join(items) or "none"


def main() -> None:
    """Write the page."""
    found, in_packs = (json.loads(file.read_text(encoding="utf-8")) for file in (FOUND, FOUND_IN_PACKS))
    PAGE.write_text(page(found, in_packs), encoding="utf-8")


if __name__ == "__main__":
    main()
