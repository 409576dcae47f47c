"""Let a stock torchvision import on a CPU build of torch.

torchvision's Python files register fake kernels for two operators whose schemas live in its C++
library, which does not load next to a torch of another build. The schemas alone let the import
through; calling the operators still fails. Only the tests and the quickstart put this on the path.
"""

import sys
from importlib.abc import MetaPathFinder

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _define_schemas()


def _define_schemas():
    import torch

    if torch.version.cuda or torch.version.hip:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS.values():
        library.define(schema)
    torch.library._parallel_dit_torchvision_shim = library  # a Library that is collected takes its schemas along


sys.meta_path.insert(0, _BeforeTorchvision())
