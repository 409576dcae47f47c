"""Let ComfyUI import torchvision and torchaudio with a CPU build of torch.

torchvision registers fake kernels for two operators whose schemas are defined in its C++ library. That library does not
load with a torch of another build, and the import fails. This module defines the schemas, so that the import works;
calling the operators still fails. Where the library loads, this module defines nothing.

torchaudio is not built for every torch, and recent releases of ComfyUI import it unconditionally. Where it is not
installed, empty modules replace it: ComfyUI starts, and only its audio nodes fail.

Only the tests and the quickstart put this folder on the path.
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

    if torch.version.cuda or torch.version.hip or _library_loads():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS.values():
        library.define(schema)
    _LIBRARIES.append(library)  # its schemas are removed when it is garbage collected


def _library_loads() -> bool:
    """Whether torchvision's C++ library loads, which defines the schemas. They can be defined only once."""
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
    """The last finder, so that an installed torchaudio is found first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_replaced = any(f"{name}.".startswith(f"{fullname}.") for name in TORCHAUDIO)
        return ModuleSpec(fullname, self, is_package=True) if is_replaced else None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "torchaudio":
            for name in TORCHAUDIO[1:]:
                import_module(name)


sys.meta_path.insert(0, _BeforeTorchvision())
sys.meta_path.append(_EmptyTorchaudio())
