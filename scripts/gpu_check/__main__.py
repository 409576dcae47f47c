"""The command ``bash scripts/gpu_check.sh``.

Each part writes a file when it ends. A part whose file is there, from the same commit, is not run again, so a check
that was cut short goes on where it stopped.
"""

import sys
from collections.abc import Sequence

from scripts.gpu_check import packages


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and return the exit status: 1 if a check failed, 2 if packages are missing."""
    names = packages.missing()
    if names:
        print(packages.advice(names))
        return 2
    from scripts.gpu_check import command  # imports what may have been missing

    return command.run(argv)


if __name__ == "__main__":
    sys.exit(main())
