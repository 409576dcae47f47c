"""The command ``bash scripts/gpu_check.sh``.

Each part writes what its checks have found to a file. What is there, from the same commit, is not run again, and a
check whose time ran out goes on with the rest.
"""

import sys
from collections.abc import Sequence

from lab.gpu_check import packages


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and return the exit status: 1 if a check failed, 2 if packages are missing."""
    names = packages.missing()
    if names:
        print(packages.advice(names))
        return 2
    from lab.gpu_check import command  # imports what may have been missing

    return command.run(argv)


if __name__ == "__main__":
    sys.exit(main())
