"""Let a stock torchvision import on a CPU build of torch.

torchvision's Python files register fake kernels for two operators whose schemas live in its C++
library, which does not load next to a torch of another build. The schemas alone let the import
through; calling the operators still fails. Where the library does load, nothing is done. Only the
tests and the quickstart put this on the path.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
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


sys.meta_path.insert(0, _BeforeTorchvision())
