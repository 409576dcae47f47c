"""The registry of families, which the backend, the readers of files and the nodes share.

A row says where a family is. Its modules are imported at their first use, so the table imports neither torch nor
diffusers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import InvalidRequest
from .architecture import Architecture

if TYPE_CHECKING:
    from ..interfaces.family import Family


@dataclass(frozen=True, kw_only=True)
class Row:
    """Where a family is.

    Attributes:
        folder: its folder here. Its bridge is in the file of this name in ``nodes/families``.
        name: its class in ``transformer.py``, and its bridge's class.
        in_files: whether single files hold it. Then ``files.py`` has their ``ARCHITECTURE``.
        within_frames: whether frames attend only to themselves (see ``Geometry``).
        own_module: whether its module class is in ``module.py`` of its folder, because diffusers lacks the family or
            a kind of its files.
        in_core: whether ComfyUI has the family. Otherwise its bridge brings a model class.
        since: the first version of diffusers that has its layers, if that is newer than ``requirements.txt`` asks for.
    """

    folder: str
    name: str
    in_files: bool = True
    within_frames: bool = False
    own_module: bool = False
    in_core: bool = True
    since: str = ""


FAMILIES: Mapping[str, Row] = {
    "ChromaTransformer2DModel": Row(folder="chroma", name="Chroma"),
    "CogVideoXTransformer3DModel": Row(folder="cogvideox", name="CogVideoX"),
    "DiTTransformer2DModel": Row(folder="dit", name="DiT", in_files=False),
    "Flux2Transformer2DModel": Row(folder="flux2", name="Flux2"),
    # Before Flux.1, whose marks its files have, too.
    "OpenSora2Transformer3DModel": Row(folder="open_sora2", name="OpenSora2", own_module=True, in_core=False),
    "FluxTransformer2DModel": Row(folder="flux", name="Flux"),
    "HunyuanVideoTransformer3DModel": Row(folder="hunyuan_video", name="HunyuanVideo"),
    "Krea2Transformer2DModel": Row(folder="krea2", name="Krea2", since="0.39"),
    "LTX2VideoTransformer3DModel": Row(folder="ltx2", name="LTX2", since="0.40"),  # before LTX-Video's marks
    "LTXVideoTransformer3DModel": Row(folder="ltx", name="LTXVideo"),
    "LatteTransformer3DModel": Row(folder="latte", name="Latte", in_files=False, within_frames=True),
    "MiniMaxH3Transformer3DModel": Row(folder="minimax_h3", name="MiniMaxH3", own_module=True, since="0.40"),
    "MochiTransformer3DModel": Row(folder="mochi", name="Mochi"),
    # Before PixArt, whose marks its files have, too.
    "STDiT3": Row(folder="open_sora1", name="OpenSora1", own_module=True, in_core=False, within_frames=True),
    "PixArtTransformer2DModel": Row(folder="pixart", name="PixArt"),
    "QwenImageTransformer2DModel": Row(folder="qwen_image", name="QwenImage"),
    "SD3Transformer2DModel": Row(folder="sd3", name="SD3"),
    "WanTransformer3DModel": Row(folder="wan", name="Wan"),
    "ZImageTransformer2DModel": Row(folder="z_image", name="ZImage"),
}
"""Families by the name of their module class, in the order in which files are compared with their marks."""


def row_of(class_name: str) -> Row:
    """Return the row of a diffusers transformer class.

    Raises:
        InvalidRequest: no family supports the class. The message lists the supported classes.
    """
    if class_name not in FAMILIES:
        raise InvalidRequest(f"transformer class {class_name} is not supported; supported: {', '.join(FAMILIES)}")
    return FAMILIES[class_name]


def family_of(class_name: str) -> "type[Family]":
    """Return the family of a diffusers transformer class.

    Raises:
        InvalidRequest: no family supports the class. The message lists the supported classes.
    """
    row = row_of(class_name)
    family: type[Family] = getattr(import_module(f".{row.folder}.transformer", __package__), row.name)
    return family


@cache
def architectures() -> tuple[Architecture, ...]:
    """Return the architectures of families in single files."""
    rows = [row for row in FAMILIES.values() if row.in_files]
    return tuple(import_module(f".{row.folder}.files", __package__).ARCHITECTURE for row in rows)
