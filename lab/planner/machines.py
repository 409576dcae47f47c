"""This machine made into another one for a measurement: a slower rank, little memory, a slow network."""

import argparse
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.bench.loop import links
from parallel_backend import env
from parallel_backend.errors import InvalidRequest

_WRAPPER_MODE = 0o700


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is to be different.

    Attributes:
        handicap: by which the last rank is slower.
        all_slower: by which all ranks are slower, so that more ranks than cores leave each other room.
        link: megabits a second that all ranks' exchanges share; 0 for as many as there are.
        limit: memory of a rank, as ``env.MEMORY_LIMIT`` has it; "" for all.

    Raises:
        InvalidRequest: a number is out of range.
    """

    handicap: float = 1.0
    all_slower: float = 1.0
    link: float = 0.0
    limit: str = ""

    def __post_init__(self) -> None:
        for name, factor in (("handicap", self.handicap), ("all-slower", self.all_slower)):
            if not 1 <= factor < float("inf"):
                raise InvalidRequest(f"--{name} {factor:g}: at least 1 is needed")
        if not 0 <= self.link < float("inf"):
            raise InvalidRequest(f"--link {self.link:g}: a number of megabits is needed, or 0 for no limit")

    def __str__(self) -> str:
        words = (
            f", all {self.all_slower:g} times slower" if self.all_slower > 1 else "",
            f", the last {self.handicap:g} times slower" if self.handicap > 1 else "",
            f", {self.link:g} Mbit/s" if self.link else "",
            f", {self.limit} a rank" if self.limit else "",
        )
        return "".join(words)

    @contextmanager
    def made(self, ranks: int, folder: Path) -> Iterator[None]:
        """Let backends that start inside of the ``with`` block have such a machine.

        Args:
            ranks: their number.
            folder: for a file.
        """
        variables = dict[str, str]()
        if max(self.handicap, self.all_slower) > 1:
            factors = [self.all_slower] * (ranks - 1) + [self.all_slower * self.handicap]
            slower = (f"{rank}={factor:g}" for rank, factor in enumerate(factors) if factor > 1)
            variables[env.HANDICAP.name] = " ".join(slower)
        if self.limit:
            variables[env.MEMORY_LIMIT.name] = self.limit
        with ExitStack() as stack:
            if self.link:
                prefix = stack.enter_context(links.slow_loopback(self.link))
                variables[env.PYTHON.name] = str(_wrapper(folder / "python", prefix))
            stack.enter_context(env.changed(variables))
            env.MEMORY_LIMIT.get()  # refused here, and not by each rank
            yield


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``of`` reads."""
    parser.add_argument(
        "--handicap", type=float, default=1.0, metavar="FACTOR", help="by which the last rank is slower"
    )
    parser.add_argument(
        "--all-slower", type=float, default=1.0, metavar="FACTOR",
        help="by which all ranks are slower, so that more ranks than cores leave each other room",
    )  # fmt: skip
    parser.add_argument(
        "--link", type=float, default=0.0, metavar="MBIT", help="megabits a second that all exchanges share; needs root"
    )
    parser.add_argument("--memory-limit", default="", metavar="SIZE", help="memory of a rank for weights, such as 50MB")


def of(options: argparse.Namespace) -> Machine:
    """Return the machine that options ask for."""
    return Machine(
        handicap=options.handicap, all_slower=options.all_slower, link=options.link, limit=options.memory_limit
    )


def _wrapper(path: Path, prefix: list[str]) -> Path:
    """Write a program that is Python behind a prefix."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join([*prefix, sys.executable])} "$@"\n', encoding="utf-8")
    path.chmod(_WRAPPER_MODE)
    return path
