"""The check on GPUs runs its commands in time, goes on where it stopped, and says what it leaves out."""

import json
import subprocess
import sys
import time

import psutil
import pytest

from scripts.gpu_check import __main__ as start
from scripts.gpu_check import command, packages, page, parts, running
from scripts.gpu_check.parts import Check, Part


def python(code, **options):
    return Check(title="code", command=("-c", code), cards=0, **options)


def test_a_command_that_succeeds_gives_its_figures():
    outcome = running.run(python("print('a line'); print('{\"seconds\": 1.5}')"), cards=0, seconds=60)
    assert (outcome.status, outcome.figures) == ("passed", {"seconds": 1.5})


def test_a_command_that_fails_shows_the_end_of_its_output():
    outcome = running.run(python("print('{no figures'); raise SystemExit('the reason')"), cards=0, seconds=60)
    assert (outcome.status, outcome.figures) == ("failed", {})
    assert outcome.output.endswith("the reason\n")


def test_nothing_is_left_of_a_command_that_takes_too_long(tmp_path):
    child = "import time; time.sleep(300)"
    code = (
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(300)"
    )
    started = time.monotonic()
    outcome = running.run(python(code), cards=0, seconds=5)
    assert outcome.status == "timed out"
    assert time.monotonic() - started < 60
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("cards", "seconds", "reason"), [(1, 60, "needs 2 GPUs"), (2, 0, "time is over")])
def test_what_cannot_run_is_left_out_with_the_reason(cards, seconds, reason):
    outcome = running.run(Check(title="two", command=("-c", ""), cards=2), cards=cards, seconds=seconds)
    assert outcome.status == "left out"
    assert reason in outcome.output


def test_missing_packages_are_named_with_how_to_bring_them(monkeypatch):
    monkeypatch.setattr(packages, "TESTING", ("pytest", "pytest>=10000", "no-such-package>=2"))
    assert packages.missing() == ["pytest>=10000", "no-such-package>=2"]
    advice = packages.advice(["no-such-package>=2"])
    assert "pip download" in advice
    assert "no-such-package>=2" in advice


@pytest.fixture
def one_part(monkeypatch):
    def use(code):
        part = Part(number=7, title="Something", checks=(python(code), Check(title="two cards", command=(), cards=99)))
        monkeypatch.setattr(command, "PARTS", (part,))

    return use


def test_a_part_that_has_run_is_not_run_again(one_part, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "_commit", lambda: "abc")
    log = tmp_path / "log"
    one_part(f"open({str(log)!r}, 'a').write('x'); print('{{\"figure\": 2}}')")
    options = ["--out", str(tmp_path / "out")]
    assert [command.run(options), command.run(options)] == [0, 0]
    assert log.read_text() == "x"
    assert command.run([*options, "--part", "7"]) == 0
    assert log.read_text() == "xx"
    monkeypatch.setattr(command, "_commit", lambda: "def")
    assert command.run(options) == 0
    assert log.read_text() == "xxx"
    text = (tmp_path / "out" / "page.md").read_text()
    assert "| figure | 2 |" in text
    assert "left out: needs 99 GPUs" in text
    assert "two cards" in capsys.readouterr().out


def test_a_failed_check_fails_the_command(one_part, tmp_path):
    one_part("raise SystemExit(3)")
    assert command.run(["--out", str(tmp_path)]) == 1
    assert json.loads((tmp_path / "part-7.json").read_text())["outcomes"][0]["status"] == "failed"


def test_missing_packages_are_named_by_a_python_that_has_none_of_them():
    isolated = [sys.executable, "-S", "-m", "scripts.gpu_check"]
    result = subprocess.run(isolated, cwd=packages.ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2, result.stderr
    assert "msgspec>=0.18" in result.stdout


def test_missing_packages_end_the_command_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "missing", lambda: ["msgspec>=0.18"])
    assert start.main(["--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_every_part_has_a_number_of_its_own_and_commands_that_exist():
    assert len({part.number for part in parts.PARTS}) == len(parts.PARTS)
    modules = [check.command[1] for part in parts.PARTS for check in part.checks if check.command[0] == "-m"]
    names = {name for name in modules if name.startswith("scripts.")}
    assert names
    for name in names:
        file = packages.ROOT / (name.replace(".", "/") + ".py")
        assert "def main() -> int:" in file.read_text()


def test_numbers_are_short_on_the_page():
    outcome = {"title": "a", "status": "passed", "seconds": 1.0, "output": "", "figures": {"x": {"y": 0.123456}}}
    text = page.page([{"number": 1, "title": "t", "outcomes": [outcome]}], machine="m", commit="c")
    assert "| x | y 0.123 |" in text
