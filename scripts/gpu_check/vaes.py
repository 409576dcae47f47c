"""Every VAE decoded and encoded by two ranks, against diffusers' own in one process: the command ``verify --vae``.

The ranks share the first GPU; without one they are CPU ranks.
"""

import json
import sys

import torch

from parallel_backend.errors import BackendError
from parallel_backend.verify.full_float32 import disable_tf32
from parallel_backend.verify.vae.kinds import KINDS
from parallel_backend.verify.vae.run import VaeCase, compare
from scripts.gpu_check.two_ranks import SHARED


def main() -> int:
    """Print the largest differences as JSON, and fail if one is too large."""
    disable_tf32()
    devices, wrong = SHARED if torch.cuda.is_available() else None, 0
    found: dict[str, float | str] = {}
    for kind in KINDS:
        for encode in (False, True):
            name = f"{kind}, {'encode' if encode else 'decode'}"
            try:
                report = compare(VaeCase(kind=kind, ranks=2, encode=encode, devices=devices))
            except BackendError as error:
                found[name], wrong = str(error), wrong + 1
            else:
                found[name], wrong = report.max_abs_error, wrong + report.failed
            print(f"{name}: {found[name]}", flush=True)  # stays if the time runs out
    print(json.dumps(found))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
