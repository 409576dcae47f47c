"""``plan measured``: what is made different of this machine, and what is refused."""

import argparse
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from lab.bench.loop import links
from lab.planner import cells, machines
from lab.planner.machines import Machine
from parallel_backend import env
from parallel_backend.errors import InvalidRequest


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--handicap", "0.5"), "--handicap 0.5: at least 1 is needed"),
        (("--all-slower", "0.9"), "--all-slower 0.9: at least 1 is needed"),
        (("--link", "-1"), "--link -1: a number of megabits is needed, or 0 for no limit"),
        (("--batch", "0"), "--batch 0: at least 1 is needed"),
        (("--rounds", "0"), "--rounds 0: at least 1 is needed"),
    ],
)
def test_what_it_cannot_measure_is_refused(words, message):
    parser = argparse.ArgumentParser()
    cells.add_arguments(parser)
    with pytest.raises(InvalidRequest, match=message):
        cells.run(parser.parse_args(words))


def test_a_size_that_is_none_is_refused_before_a_backend_starts(tmp_path):
    with pytest.raises(InvalidRequest, match="20GB"), Machine(limit="much").made(2, tmp_path):
        pass


def test_ranks_are_slower_and_have_less_memory_for_a_while(tmp_path):
    machine = Machine(handicap=2.5, limit="1GB")
    assert str(machine) == ", the last 2.5 times slower, 1GB a rank"
    with machine.made(3, tmp_path):
        assert env.HANDICAP.get() == {2: 2.5}
        assert env.MEMORY_LIMIT.get() == 10**9
        assert not env.PYTHON.get()
    assert not env.HANDICAP.is_set()
    assert env.MEMORY_LIMIT.get() is None


def test_all_ranks_are_slower_and_the_last_even_more(tmp_path):
    machine = Machine(handicap=2.0, all_slower=1.5)
    assert str(machine) == ", all 1.5 times slower, the last 2 times slower"
    with machine.made(3, tmp_path):
        assert env.HANDICAP.get() == {0: 1.5, 1: 1.5, 2: 3.0}


def test_a_backend_gets_a_python_behind_the_slow_link(tmp_path, monkeypatch):
    @contextmanager
    def loopback(megabits):
        yield ["env", f"MEGABITS={megabits:g}"]

    monkeypatch.setattr(links, "slow_loopback", loopback)
    with Machine(link=100.0).made(2, tmp_path):
        command = [os.environ[env.PYTHON.name], "-c", "import os, sys; print(os.environ['MEGABITS'], sys.executable)"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert printed.split() == ["100", sys.executable]


def test_nothing_is_different_by_default(tmp_path):
    parser = argparse.ArgumentParser()
    machines.add_arguments(parser)
    machine, before = machines.of(parser.parse_args([])), dict(os.environ)
    assert str(machine) == ""
    with machine.made(2, tmp_path):
        assert dict(os.environ) == before
