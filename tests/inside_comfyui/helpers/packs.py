"""Other people's packs of nodes, from a folder of the machine's: none of their code is in this repository."""

import asyncio
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import nodes as core_nodes

VARIABLE = "PARALLEL_DIT_PACKS"
"""Names the folder, which has a pack in each of its folders, as ``custom_nodes`` has."""


def pack_folders() -> list[Path]:
    """Return the packs, of which there are none unless the variable is set."""
    folder = os.environ.get(VARIABLE)
    return sorted(path for path in Path(folder).iterdir() if (path / "__init__.py").exists()) if folder else []


def load_pack(path: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the classes of a pack's nodes.

    Args:
        path: of the pack.
        patch: what it undoes ends with the nodes, and with a stand-in for ComfyUI's server, which packs ask for when
            they are imported.
    """
    patch.setitem(sys.modules, "server", MagicMock())
    before = core_nodes.NODE_CLASS_MAPPINGS
    patch.setattr(core_nodes, "NODE_CLASS_MAPPINGS", dict(before))
    assert asyncio.run(_load(path, set(before))), f"ComfyUI cannot import {path.name}: its log says why"
    return {name: kind for name, kind in core_nodes.NODE_CLASS_MAPPINGS.items() if name not in before}


async def _load(path: Path, before: set[str]) -> bool:
    loaded = core_nodes.load_custom_node(str(path), ignore=before, module_parent="custom_nodes")
    return bool(await loaded if inspect.isawaitable(loaded) else loaded)


def changes_models(kind: Any) -> bool:
    """Whether a node takes and gives a MODEL."""
    declared = kind.INPUT_TYPES()
    types = [each[0] for group in ("required", "optional") for each in declared.get(group, {}).values()]
    return "MODEL" in types and "MODEL" in kind.RETURN_TYPES


MODELS = ("Flux.1", "HunyuanVideo", "LTX-Video", "Qwen-Image", "SD3", "Wan T2V", "Wan I2V", "Z-Image")
"""Of ``node_sweep``: those that packs change most."""
FOUND = Path(__file__).parents[1] / "pack_nodes.json"
"""What packs are known to do: for each node a letter per model. ``python -m scripts.node_table`` makes a page of it."""

_EAGER = {"backend": "eager"}
_WHOLE = {"start_percent": 0.0, "end_percent": 1.0}
VALUES: dict[str, dict[str, Any]] = {
    "ApplyFBCacheOnModel": {"residual_diff_threshold": 0.5},
    "CompileModel": _EAGER,
    "PathchSageAttentionKJ": {"sage_attention": "auto"},
    "SkipLayerGuidanceWanVideo": {"blocks": "0", **_WHOLE},
    "TorchCompileModelAdvanced": _EAGER,
    "TorchCompileModelFluxAdvancedV2": _EAGER,
    "TorchCompileModelFluxAdv": _EAGER,
    "TorchCompileModelSD35": _EAGER,
    "TorchCompileModelWanVideoV2": _EAGER,
    "TorchCompileModels": _EAGER,
}
"""Values that are not a node's defaults, where those have no effect, or take a minute to compile."""
TEACACHE = {"ltx": "ltxv", "hunyuan_video": "hunyuan_video", "wan": "wan2.1_t2v_1.3B", "z_image": "lumina_2"}
"""TeaCache's names of families; Flux for others."""


def values_for(family: str) -> dict[str, dict[str, Any]]:
    """Return inputs of packs' nodes for a model of a family."""
    return VALUES | {"TeaCache": {"cache_device": "cpu", "model_type": TEACACHE.get(family, "flux")}}


def known(pack: str, model: str) -> dict[str, str]:
    """Return what is known of a pack's nodes with a model: a letter each."""
    content = _content()
    place = content["models"].index(model)
    return {node: letters[place] for node, letters in content["packs"].get(pack, {}).items()}


def write_known(pack: str, model: str, letters: dict[str, str]) -> None:
    """Replace what is known of a pack's nodes with a model."""
    content = _content()
    place, nodes = content["models"].index(model), content["packs"].setdefault(pack, {})
    for node, letter in sorted(letters.items()):
        line = list(nodes.get(node, "-" * len(content["models"])))
        line[place] = letter
        nodes[node] = "".join(line)
    content["packs"] = dict(sorted(content["packs"].items()))
    FOUND.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FOUND.read_text(encoding="utf-8"))
    return content
