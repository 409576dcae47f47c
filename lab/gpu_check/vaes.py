"""Every VAE decoded and encoded by two ranks, against diffusers' own in one process: what ``verify --vae`` does.

Decoded in half precision, too. The ranks share the first GPU; without one they are CPU ranks, and the latents are
smaller.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from lab.gpu_check.kept import Kept
from lab.gpu_check.two_ranks import SHARED
from lab.verify.vae.kinds import KINDS
from lab.verify.vae.run import VaeCase, VaeComparison
from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.errors import BackendError
from parallel_backend.protocol.model_spec import DType
from parallel_backend.verify.full_float32 import disable_tf32

PICTURES = ("image", "flux2")
"""The kinds that are not for videos."""


def main() -> int:
    """Print the largest differences as JSON, and fail if one is too large."""
    disable_tf32()
    kept, devices = Kept(), SHARED if torch.cuda.is_available() else None
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder, temporary_backend(Path(folder)) as client:
        for kind in KINDS:
            half: DType = "float16" if kind == "mochi" else "bfloat16"
            works: tuple[tuple[bool, DType], ...] = ((False, "float32"), (True, "float32"), (False, half))
            for encode, dtype in works:
                size = None if devices else (9, 6) if kind in PICTURES else (2, 9, 6)
                case = VaeCase(kind=kind, ranks=2, encode=encode, devices=devices, size=size, dtype=dtype)
                name = f"{kind}, {'encode' if encode else 'decode'}{'' if dtype == 'float32' else f', {dtype}'}"
                found = kept.find(name, partial(_difference, case, Path(folder), client))
                print(f"{name}: {found}", flush=True)
    print(json.dumps(kept.found))
    return int(any(isinstance(found, str) for found in kept.found.values()))


def _difference(case: VaeCase, folder: Path, client: Client) -> float | str:
    """Return the largest difference of a value, or what is wrong."""
    subject = VaeComparison(case, folder)
    expected, formula_bytes = subject.wanted(), subject.formula()
    own_error = subject.own_error(expected)
    torch.cuda.empty_cache()  # the ranks need the memory
    try:
        report = subject.compare(client, expected, formula_bytes, rounds=1, own_error=own_error)
    except BackendError as error:
        return f"WRONG: {error}"
    return f"WRONG: {report.describe()}" if report.failed else report.max_abs_error


if __name__ == "__main__":
    sys.exit(main())
