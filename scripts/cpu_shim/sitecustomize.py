"""Let ComfyUI import torchvision and torchaudio on a CPU build of torch.

torchvision's Python files register fake kernels for two operators whose schemas live in its C++
library, which does not load next to a torch of another build. The schemas alone let the import
through; calling the operators still fails. Where the library does load, nothing is done.

torchaudio has no build for every torch, and newer ComfyUIs import it unconditionally. Where it is not
installed, empty modules take its place: ComfyUI starts, and its audio nodes fail when they run.

Only the tests and the quickstart put this on the path.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
TORCHAUDIO = ("torchaudio", "torchaudio.functional", "torchaudio.transforms", "torchaudio.compliance.kaldi")
_LIBRARIES: list[object] = []


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _define_schemas()
        return None


def _define_schemas() -> None:
    import torch

    if torch.version.cuda or torch.version.hip or _own_library_loads():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS.values():
        library.define(schema)
    _LIBRARIES.append(library)  # one that is collected takes its schemas along


def _own_library_loads() -> bool:
    """Whether torchvision's library is there for this torch; a schema can be defined only once."""
    import torch

    package = find_spec("torchvision")
    library = PathFinder.find_spec("_C", package.submodule_search_locations) if package else None
    if library is None or library.origin is None:
        return False
    try:
        torch.ops.load_library(library.origin)
    except OSError:
        return False
    return True


class _EmptyTorchaudio(MetaPathFinder, Loader):
    """Asked last, so a torchaudio that is installed goes first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        stands_in = any(f"{name}.".startswith(f"{fullname}.") for name in TORCHAUDIO)
        return ModuleSpec(fullname, self, is_package=True) if stands_in else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "torchaudio":
            for name in TORCHAUDIO[1:]:
                import_module(name)


sys.meta_path.insert(0, _BeforeTorchvision())
sys.meta_path.append(_EmptyTorchaudio())
