"""The models that every node of ComfyUI is tried with, and what each node is known to do to them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfyui_version
from helpers import custom_cases, loras
from helpers.custom_cases import without_backend
from helpers.inside_fixtures import native_case
from helpers.node_outcomes import Native, Outcome
from helpers.scene import Scene
from natives import CASES

KNOWN = Path(__file__).parents[1] / "core_nodes.json"
"""What is known: for each version and node a letter per model. ``python -m scripts.node_table`` makes a page of it."""

LETTERS: dict[Outcome, str] = {"works": "W", "no effect": "N", "refused": "R", "fails": "F"}
UNTRIED = "-"
"""The letter of a model that a version's nodes were not tried with."""

NATIVE = {
    "Flux.1": "flux dev", "Flux.1 Fill": "flux fill", "Flux.1 Kontext": "flux kontext", "Flux.2": "flux2 dev",
    "HunyuanVideo": "hunyuan_video t2v", "HunyuanVideo I2V": "hunyuan_video i2v concat", "LTX-Video": "ltx t2v",
    "Mochi": "mochi t2v", "PixArt": "pixart alpha", "Qwen-Image": "qwen_image image",
    "Qwen-Image-Edit": "qwen_image edit", "SD3": "sd3 medium", "Wan T2V": "wan t2v", "Wan I2V": "wan i2v 2.1",
    "Z-Image": "z_image image", "CogVideoX 1.5": "cogvideox 1.5", "CogVideoX 1.5 I2V": "cogvideox 1.5 i2v",
    "Chroma": "chroma guided", "Krea-2": "krea2 image", "Krea-2 with references": "krea2 references",
    "LTX-2.3": "ltx2 2.3", "MiniMax-H3": "minimax_h3 tags",
}  # fmt: skip
"""Cases of ComfyUI's own classes, by the name that the page shows."""
CUSTOM = {"CogVideoX 5B": "cogvideox 5b", "DiT": "dit", "Latte": "latte"}
"""Cases of families that ComfyUI lacks."""
MODELS = tuple(name for name, case in NATIVE.items() if case in CASES) + tuple(CUSTOM)
"""Those that this version of ComfyUI has."""
VERSION = comfyui_version.__version__


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One of the models, natively.

    Attributes:
        case: its case's name, which is also that of its checkpoint.
        native: what ComfyUI alone samples.
        patch: what a native node does to the MODEL before sampling.
    """

    case: str
    native: Native
    patch: Callable[[Any], Any]


def native_subject(name: str, *, fresh: bool = False) -> Subject:
    """Return a model of ComfyUI's own class, which other tests use, too, unless it is to be a fresh one."""
    case = CASES[NATIVE[name]]
    model = case.patch(case.native() if fresh else native_case(NATIVE[name]))
    scene = Scene(
        family=NATIVE[name].split()[0], lora=loras.plain(case.native(), "diffusion_model.", rank=3, seed=1),
        model=model, positive=case.conditioning(1), negative=case.conditioning(2, case.shorter),
        latent=_one(case.samples()),
    )  # fmt: skip
    return Subject(case=NATIVE[name], native=Native(scene, case.cfg), patch=case.patch)


def custom_subject(name: str, folder: Path) -> Subject:
    """Return a model of a family that ComfyUI lacks: diffusers' forward in our class for it."""
    case = custom_cases.CASES[CUSTOM[name]]
    model = without_backend(folder)
    scene = Scene(
        family=name.split()[0], lora=loras.plain(without_backend(folder), "diffusion_model.", rank=3, seed=1),
        model=model, positive=case.conditioning(1), negative=case.conditioning(2, 3), latent=_one(case.samples()),
    )  # fmt: skip
    return Subject(case=CUSTOM[name], native=Native(scene, 4.0), patch=lambda model: model)


def _one(latent: dict[str, Any]) -> dict[str, Any]:
    """Return the first sample of LATENT: some of ComfyUI's nodes take only one."""
    return {name: tensor[:1] for name, tensor in latent.items()}


def known() -> dict[str, Any]:
    """Return the file's content."""
    content: dict[str, Any] = json.loads(KNOWN.read_text(encoding="utf-8"))
    return content


def known_outcome(node: str, model: str) -> str | None:
    """Return the letter for a node and a model in this version of ComfyUI, or None if nobody has tried it there."""
    content = known()
    letters = content["outcomes"].get(VERSION)
    letter = letters[node][content["models"].index(model)] if letters else UNTRIED
    return None if letter == UNTRIED else letter


def write_known(model: str, outcomes: dict[str, Outcome]) -> None:
    """Replace what is known of a model in this version."""
    content = known() if KNOWN.exists() else {"models": [], "outcomes": {}}
    models = [*NATIVE, *CUSTOM]
    by_model = {
        version: {node: dict(zip(content["models"], letters, strict=True)) for node, letters in lines.items()}
        for version, lines in content["outcomes"].items()
    }
    before = by_model.get(VERSION, {})
    by_model[VERSION] = {node: before.get(node, {}) | {model: LETTERS[outcomes[node]]} for node in sorted(outcomes)}
    content["models"] = models
    for version, lines in by_model.items():
        lines_now = {node: "".join(line.get(each, UNTRIED) for each in models) for node, line in lines.items()}
        content["outcomes"][version] = lines_now
    KNOWN.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
