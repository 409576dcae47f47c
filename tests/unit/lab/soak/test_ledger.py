"""What the ledger of a soak calls a failure, and how it shows the rest."""

import json
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lab.soak.command import SoakOptions
from lab.soak.ledger import LOST, NOISE, RESUMED, RIGHT, ROOM, WRONG, Footprint, Ledger, processes_of
from parallel_backend.errors import InvalidRequest
from scripts.processes import wait_until

START = Footprint(supervisor_pid=1, processes=4, descriptors=6, memory=100, supervisor=10, supervisor_descriptors=11)


def ledger(**changes: Any) -> Ledger:
    entries: dict[str, Any] = {
        "prompts": Counter({RIGHT: 3, RESUMED: 2}),
        "start": START,
        "same": START,
        "end": START,
    } | changes
    return Ledger(seed=7, **entries)


def test_nothing_lost_passes():
    killed = "SIGKILL of a rank"
    passed = ledger(faults=Counter({killed: 3}), recoveries={killed: [1.0, 4.25]}, with_spares={killed: [0.5]})
    text = str(passed)
    assert text.startswith("passed: 5 prompts and 3 faults in 0 s, seed 7\n")
    assert "| resumed | 2 |" in text
    assert "| SIGKILL of a rank | 3 | 0.5 | 4.2 |" in text
    assert "| supervisor descriptors | 11 | 11 |" in text
    assert json.loads(passed.as_json())["passed"] is True


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": Counter({RIGHT: 3, LOST: 1})},
        {"prompts": Counter({RIGHT: 3, WRONG: 1})},
        {"left": 1},
        {"wants_faults": True},
        {"end": replace(START, supervisor=START.supervisor + NOISE + 1)},
        {"end": replace(START, descriptors=7)},
        {"end": replace(START, supervisor_descriptors=12 + ROOM)},
        {"memory": [0, 0, 0, 0, NOISE + 1, NOISE + 1]},
    ],
)
def test_what_is_lost_wrong_or_leaked_fails(changes):
    failed = ledger(**changes)
    assert not failed.passed
    assert str(failed).startswith("FAILED: ")
    assert json.loads(failed.as_json())["passed"] is False


def test_memory_of_the_first_prompts_does_not_count():
    assert ledger(memory=[0, 0, NOISE * 9, NOISE * 9, NOISE * 9, NOISE * 9]).passed


def test_processes_of_a_folder_are_found_by_their_environment(tmp_path):
    assert processes_of(tmp_path) == []
    pid = os.posix_spawn("/bin/sleep", ["sleep", "30"], {"PARALLEL_DIT_RUNTIME": str(tmp_path)})
    try:
        wait_until(lambda: processes_of(tmp_path) == [pid], 10.0, "the process is found")
    finally:
        os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(("name", "value"), [("minutes", 0.0), ("minutes", float("nan")), ("ranks", 1), ("ranks", 9)])
def test_options_that_make_no_sense_are_refused(name, value):
    with pytest.raises(InvalidRequest, match=f"--{name}"):
        SoakOptions(**{"minutes": 1.0, "faults": True, "seed": 1, "ranks": 3, name: value})
