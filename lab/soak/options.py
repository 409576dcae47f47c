"""Arguments of ``soak``."""

import argparse
import random
from dataclasses import dataclass

from parallel_backend.errors import InvalidRequest

MOST_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """What to do.

    Attributes:
        minutes: how long prompts are made.
        faults: whether anything is done to the backend.
        seed: of prompts and faults. What depends on time, such as the step in which a fault arrives, still varies.
        ranks: number of CPU ranks.

    Raises:
        InvalidRequest: a value that makes no sense.
    """

    minutes: float
    faults: bool
    seed: int
    ranks: int

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise InvalidRequest(f"--minutes {self.minutes:g}: a number above 0 works")
        if not 2 <= self.ranks <= MOST_RANKS:
            raise InvalidRequest(f"--ranks {self.ranks}: 2 to {MOST_RANKS} works")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default %(default)g)")
    parser.add_argument("--faults", action="store_true", help="kill, stop and disturb the backend's processes, too")
    parser.add_argument("--seed", type=int, help="repeats the prompts and faults of a run (default: a new one)")
    parser.add_argument("--ranks", type=int, default=3, help="number of CPU ranks (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the ledger as JSON")


def parse(options: argparse.Namespace) -> SoakOptions:
    """Return the checked options."""
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    return SoakOptions(minutes=options.minutes, faults=options.faults, seed=seed, ranks=options.ranks)
