"""Cases of every family with sizes that can be read from a file: as wide as the heads' published width allows."""

import json
from dataclasses import replace
from typing import Any

from natives import CASES, PRESENT, name_of
from natives.case import Case

SKIPPED = ("wan ti2v 5b, first frame", "chroma all blocks")
"""Cases whose weights are those of another case, and which are too large when they are wide."""


_WIDE = {name_of(family): getattr(family, "WIDE", {}) for family in PRESENT}


def _wide(name: str, case: Case) -> Case:
    return replace(case, unet={**case.unet, **_WIDE[name.split()[0]]})


FILE_CASES: dict[str, Case] = {name: _wide(name, case) for name, case in CASES.items() if name not in SKIPPED}
FIRST_FILES = tuple(next(name for name in FILE_CASES if name.split()[0] == name_of(family)) for family in PRESENT)
"""One case a family."""

IN_METADATA = {"causal_temporal_positioning"}
"""What ComfyUI reads from a file's metadata of families whose names say the rest."""


def in_metadata(case: Case) -> dict[str, Any]:
    """Return what the metadata of a case's file says: of LTX-2, everything."""
    everything = case.unet.get("image_model") == "ltxav"
    return {key: value for key, value in case.unet.items() if everything or key in IN_METADATA}


def metadata(case: Case) -> dict[str, str]:
    """Return the metadata of a case's file."""
    said = in_metadata(case)
    return {"config": json.dumps({"transformer": said})} if said else {}
