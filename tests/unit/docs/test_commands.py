"""Every command of the documentation runs here or in another test, or is listed with the reason why not."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.docs import commands

NAMED = list(commands.commands())


def test_every_command_is_in_one_list() -> None:
    assert len(NAMED) > 40
    assert {f"{page}: {command}": kept for page, command in NAMED if len(kept := commands.kept_by(command)) != 1} == {}


def test_no_list_has_a_command_that_no_page_has() -> None:
    named = {command for _, command in NAMED}
    named |= {line for page in commands.BLOCKS for _, block in commands.blocks(commands.ROOT / page)
              for line in commands.lines(block)}  # fmt: skip
    assert [command for command in commands.RUN if command not in named] == []
    patterns = [*commands.ELSEWHERE, *commands.LEFT_OUT]
    assert [pattern for pattern in patterns if not any(re.fullmatch(pattern, each) for each in named)] == []


def test_the_other_tests_are_there() -> None:
    files = [*commands.ELSEWHERE.values(), *commands.BLOCKS.values(), *commands.BLOCKS]
    assert [file for file in files if not (commands.ROOT / file).is_file()] == []


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables with which commands find nothing of the user's."""
    with tempfile.TemporaryDirectory(prefix="pdit-docs-", dir="/tmp") as short:  # a socket's path is limited
        yield {
            **os.environ, "HOME": str(tmp_path), "PARALLEL_DIT_SPARES": "0",
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
            "PARALLEL_DIT_RUNTIME": f"{short}/runtime", "PYTHONPATH": str(commands.ROOT),
        }  # fmt: skip


def run(command: str, environment: dict[str, str]) -> str:
    """Run a command with this Python, and return what it prints."""
    words = shlex.split(command)
    assert words[0] == "python"
    done = subprocess.run(
        [sys.executable, *words[1:]], env=environment, cwd=commands.ROOT, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def test_commands_run(environment: dict[str, str]) -> None:
    printed = {}
    try:
        for command in commands.RUN:
            printed[command] = run(command, environment)
    finally:
        run("python -m parallel_backend stop", environment)
    assert re.fullmatch(r"parallel-dit \d+\.\d+\.\d+\n", printed[commands.RUN[0]])
    assert '"state"' in printed["python -m parallel_backend status --json"]
    assert "ssh" in printed["python -m parallel_backend serve --forwarded --detach"]
