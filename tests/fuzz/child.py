"""One process that fuzzes one target with libFuzzer, within limits of time and memory: ``python -m tests.fuzz.child``.

It ends at its first finding, with libFuzzer's status and report.
"""

import argparse
import resource
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["parallel_backend", "gguf"], enable_loader_override=False):
    from . import targets
from .mutations import mutator

MEMORY = 512 << 20
"""Bytes of addresses that a target may take beyond those of the process at its start."""
SECONDS = 5
"""Time limit of one input."""
LARGEST = 16384
"""Most bytes of an input."""


def main() -> None:
    """Fuzz until the time is over, or until something is found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True, choices=targets.TARGETS)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0, help="of libFuzzer; 0 for another one each time")
    parser.add_argument("--findings", type=Path, required=True, help="folder for inputs that found something")
    parser.add_argument("corpus", nargs="+", type=Path, help="folders of inputs; new ones go to the first")
    options = parser.parse_args()
    target = targets.TARGETS[options.target]
    arguments = [
        sys.argv[0],
        f"-max_total_time={options.seconds}",
        f"-seed={options.seed}",
        f"-timeout={SECONDS}",
        f"-max_len={LARGEST}",
        f"-artifact_prefix={options.findings}/{options.target}-",
        "-rss_limit_mb=0",  # the limit below raises MemoryError, which has a trace
        "-print_final_stats=1",
        *map(str, options.corpus),
    ]

    def run(data: bytes) -> None:
        targets.check(target, data)

    def noise(data: bytes, max_size: int) -> bytes:
        return bytes(atheris.Mutate(data, max_size))  # another function once Fuzz() runs

    atheris.Setup(arguments, run, custom_mutator=mutator(target, noise))
    run(b"")  # imports what it needs
    limit = _addresses() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    atheris.Fuzz()


def _addresses() -> int:
    """Return the bytes of this process's address space (``statm`` in proc(5))."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
