"""The command ``bash scripts/gpu_check.sh``, which is ``python -m lab gpu-check``."""

import argparse
from pathlib import Path

from lab.gpu_check import packages
from lab.gpu_check.parts import LIMIT, PARTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser, and the list of parts to its help."""
    titles = "\n".join(f"  {part.number}  {part.title}" for part in PARTS)
    parser.description = f"Try the backend on real GPUs, in parts of at most {LIMIT / 60:.0f} minutes:\n{titles}"
    numbers = [part.number for part in PARTS]
    parser.add_argument("--part", type=int, choices=numbers, help="run this part alone, even if it has run")
    parser.add_argument("--out", type=Path, default=Path("gpu_check"), help="folder of the results (gpu_check)")


def run(options: argparse.Namespace) -> int:
    """Run the parts and return the exit status: 1 if a check failed, 2 if packages are missing."""
    names = packages.missing()
    if names:
        print(packages.advice(names))
        return 2
    from lab.gpu_check import command  # imports what may have been missing

    return command.run(options.part, options.out)
