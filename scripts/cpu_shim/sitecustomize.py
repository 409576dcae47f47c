"""Let a stock torchvision import on a CPU build of torch.

torchvision's Python files register fake kernels for two operators whose schemas live in its C++
library, which does not load next to a torch of another build. The schemas alone let the import
through; calling the operators still fails. Only the tests and the quickstart put this on the path.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
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

    if torch.version.cuda or torch.version.hip:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS.values():
        library.define(schema)
    _LIBRARIES.append(library)  # one that is collected takes its schemas along


sys.meta_path.insert(0, _BeforeTorchvision())
