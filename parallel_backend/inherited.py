"""What the backend's processes inherit of the environment.

ComfyUI's is made for its own process, and shells and launchers add to it. What changes how Python, diffusers or
transformers work, or says where other ranks are, is left out: ranks know that themselves.
"""

import os
from collections.abc import Mapping

from . import env

_PREFIX = "DIFFUSERS_"
_LEFT_OUT = frozenset((
    # Without docstrings, with warnings as errors, or with a prompt at the end, imports or exits go another way.
    "PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONINSPECT",
    # These make diffusers and transformers do without torch, or load in a way that ranks do not.
    "USE_TF", "USE_TORCH", "USE_FLAX", "USE_JAX", "USE_SAFETENSORS", "FORCE_TF_AVAILABLE",
    "HF_ENABLE_PARALLEL_LOADING",
    # Of another launcher's ranks, and a transport that needs certificates.
    "NCCL_COMM_ID", "GLOO_DEVICE_TRANSPORT",
))  # fmt: skip
_DISTRIBUTED_DEBUG = "TORCH_DISTRIBUTED_DEBUG"


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what the backend's processes inherit of an environment.

    They run in other folders, so relative folders in ``PYTHONPATH`` become absolute ones.
    """
    kept = {
        name: value for name, value in environment.items() if name not in _LEFT_OUT and not name.startswith(_PREFIX)
    }
    if kept.get(_DISTRIBUTED_DEBUG, "OFF").upper() not in ("OFF", "INFO", "DETAIL"):
        del kept[_DISTRIBUTED_DEBUG]  # torch refuses any other value
    if kept.get(env.PYTHON.name):
        kept.pop("PYTHONHOME", None)  # it belongs to this Python
    folders = [os.path.abspath(folder) for folder in kept.pop("PYTHONPATH", "").split(os.pathsep) if folder]
    return kept | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})


def number_of_threads(text: str) -> int | None:
    """Return the number of threads in ``OMP_NUM_THREADS``; None if there is none, which OpenMP ignores.

    It may be a list: the first number counts, the others are for threads of threads.
    """
    first = text.partition(",")[0].strip()
    return int(first) if first.isascii() and first.isdecimal() and int(first) else None
