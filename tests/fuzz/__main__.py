"""Fuzz the readers of messages and files: ``python -m tests.fuzz --minutes 20``."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from .fuzzing import ROUND, Result, fuzz, is_available
from .targets import TARGETS


def main() -> int:
    """Fuzz, print what came of it, and return 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the readers of messages and files.")
    parser.add_argument("--minutes", type=float, default=1.0, help="in all (default %(default)g)")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the random changes (default: another one each time)")
    parser.add_argument("--keep", type=Path, help="folder for inputs that are new or find something")
    options = parser.parse_args()
    if not is_available():
        print("atheris is not installed for this Python: pip install -r requirements-dev.txt", file=sys.stderr)
        return 2
    kept = options.keep or Path(tempfile.mkdtemp(prefix="fuzz"))
    results = _in_turns(options.target or list(TARGETS), options.minutes * 60, kept, options.seed)
    print(f"{'target':<12} {'executions':>12} {'features':>9} {'findings':>9}")
    for name, result in results.items():
        print(f"{name:<12} {result.executions:>12} {result.features:>9} {len(result.findings):>9}")
    for name, result in results.items():
        for report in result.findings:
            print(f"\n{name}: {report}")
    print(f"inputs are in {kept}")
    return int(any(result.findings for result in results.values()))


def _in_turns(names: list[str], seconds: float, kept: Path, seed: int) -> dict[str, Result]:
    """Fuzz targets in turns, so that each has its share of the time."""
    results = {name: Result() for name in names}
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) >= len(names):
        share = min(ROUND, left / len(names))
        for name, result in results.items():
            turn = fuzz(name, seconds=share, kept=kept, seed=seed)
            result.executions += turn.executions
            result.features = max(result.features, turn.features)
            result.findings += turn.findings
    return results


if __name__ == "__main__":
    sys.exit(main())
