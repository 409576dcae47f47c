"""The check on GPUs runs its commands in time, goes on where it stopped, and says what it leaves out."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from importlib import metadata

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lab.__main__ import main
from lab.gpu_check import command, kept, packages, page, parts, running
from lab.gpu_check.parts import Check, Part


def python(code, **options):
    return Check(title="code", command=("-c", code), **({"cards": 0} | options))


@pytest.fixture
def run(tmp_path):
    """Run a check, on a machine without GPUs."""
    return lambda check, *, cards=0, seconds=60: running.run(
        check, cards=cards, seconds=seconds, kept=tmp_path / "kept"
    )


def test_a_command_that_succeeds_gives_its_figures(run):
    outcome = run(python("print('a line'); print('{\"seconds\": 1.5}')"))
    assert (outcome.status, outcome.figures) == ("passed", {"seconds": 1.5})


def test_a_command_that_fails_shows_the_end_of_its_output(run):
    outcome = run(python("print('{no figures'); raise SystemExit('the reason')"))
    assert (outcome.status, outcome.figures) == ("failed", {})
    assert outcome.output.endswith("the reason\n")


@pytest.mark.long
def test_nothing_is_left_of_a_command_that_takes_too_long(run, tmp_path):
    child = "import time; time.sleep(300)"
    code = (
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "time.sleep(300)"
    )
    started = time.monotonic()
    outcome = run(python(code), seconds=5)
    assert outcome.status == "timed out"
    assert time.monotonic() - started < 60
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_what_cannot_run_is_left_out_with_the_reason(run):
    outcome = run(python("", cards=2), cards=1)
    assert (outcome.status, outcome.left_out) == ("left out", "it needs 2 GPUs, and there are 1")


def test_what_runs_with_fewer_gpus_says_what_it_leaves_out(run):
    check = python("", cards=2, rest="gloo")
    few, enough = run(check, cards=1), run(check, cards=2)
    assert (few.status, few.left_out) == ("passed", "all but gloo, since it needs 2 GPUs, and there are 1")
    assert (enough.status, enough.left_out) == ("passed", "")


def test_a_check_for_which_no_time_is_left_is_not_finished(run):
    outcome = run(python(""), seconds=0)
    assert (outcome.status, outcome.seconds) == ("timed out", 0.0)
    assert "before it began" in outcome.output


def test_missing_packages_are_named_with_how_to_bring_them(monkeypatch):
    monkeypatch.setattr(packages, "TESTING", ("pytest", "pytest>=10000", "no-such-package>=2"))
    assert packages.missing() == ["pytest>=10000", "no-such-package>=2"]
    advice = packages.advice(["no-such-package>=2"])
    assert "pip download" in advice
    assert advice.count("'no-such-package>=2'") == 2, "a shell would take the > for a redirection"


IMPORTS = """
import importlib.metadata, json, pkgutil, sys
import lab.gpu_check as package
for module in pkgutil.walk_packages(package.__path__, "lab.gpu_check."):
    if not module.name.endswith("__main__"):
        __import__(module.name)
import diffusers, gguf, pytest_timeout, torchsde, transformers, comfy_kitchen
from parallel_backend.families.modules import module_class_of
from parallel_backend.families.registry import FAMILIES
from parallel_backend.vaes import VAES, module_class_of as vae_class_of
[module_class_of(name) for name in FAMILIES], [vae_class_of(name) for name in VAES]
diffusers.LTXPipeline, transformers.UMT5EncoderModel
of_module, modules = importlib.metadata.packages_distributions(), {name.partition(".")[0] for name in sys.modules}
print(json.dumps([name for module in modules for name in of_module.get(module, [])]))
"""


def required(names, but=frozenset()):
    """Return the packages that packages require, these included."""
    found, rest = set[str](), [*names]
    while rest:
        name = canonicalize_name(rest.pop())
        if name in found | but:
            continue
        found.add(name)
        lines = map(Requirement, metadata.requires(name) or [])
        rest += [line.name for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.long
def test_the_packages_to_bring_are_those_that_the_checks_import_and_torch_does_not_bring():
    names = [line.partition(">=")[0] for line in (packages.ROOT / "requirements.txt").read_text().split()]
    others = required([*names, *packages.TESTING], but=required(["torch"]))
    result = subprocess.run([sys.executable, "-c", IMPORTS], cwd=packages.ROOT, capture_output=True, text=True,
                            timeout=300, check=True)  # fmt: skip
    imported = others & {canonicalize_name(name) for name in json.loads(result.stdout.splitlines()[-1])}
    listed = {canonicalize_name(name) for name in (*names, *packages.TESTING, *packages.IMPORTED)}
    assert imported - listed <= {"scipy"}, "diffusers imports scipy only where it is installed"
    assert set(map(canonicalize_name, packages.IMPORTED)) <= imported


@pytest.fixture
def one_part(monkeypatch):
    def use(code):
        part = Part(number=7, title="Something", checks=(python(code), Check(title="two cards", command=(), cards=99)))
        monkeypatch.setattr(command, "PARTS", (part,))

    return use


FINDS = """
import sys, time
from lab.gpu_check.kept import Kept
kept = Kept()
def find(name):
    open({log!r}, "a").write(name)
    return name
kept.find("a", lambda: find("a"))
if not {end!r} or not __import__("pathlib").Path({end!r}).exists():
    time.sleep(60)
kept.find("b", lambda: find("b"))
print('{{"found": ' + str(len(kept.found)) + '}}')
"""


@pytest.mark.long
def test_what_timed_out_goes_on_with_the_rest_and_what_ended_does_not_run_again(monkeypatch, tmp_path, capsys):
    log, end, ended = tmp_path / "log", tmp_path / "end", tmp_path / "ended"
    checks = (
        replace(python(f"open({str(ended)!r}, 'a').write('x')"), title="first"),
        replace(python(FINDS.format(log=str(log), end=str(end))), title="second"),
        replace(python(f"open({str(ended)!r}, 'a').write('y')"), title="third"),
    )
    monkeypatch.setattr(command, "PARTS", (Part(number=7, title="Something", checks=checks),))
    monkeypatch.setattr(command, "_commit", lambda: "abc")
    monkeypatch.setattr(command, "LIMIT", 8.0)
    options = ["--out", str(tmp_path / "out")]

    assert main(["gpu-check", *options]) == 1
    assert "run the command again" in capsys.readouterr().out
    assert (log.read_text(), ended.read_text()) == ("a", "x")
    assert "| second | timed out |" in (tmp_path / "out" / "page.md").read_text()

    end.touch()
    assert main(["gpu-check", *options]) == 0
    assert (log.read_text(), ended.read_text()) == ("ab", "xy")
    assert "| found | 2 |" in (tmp_path / "out" / "page.md").read_text()
    assert not list((tmp_path / "out").glob("*.kept"))

    assert main(["gpu-check", *options]) == 0
    assert (log.read_text(), ended.read_text()) == ("ab", "xy")
    assert main(["gpu-check", *options, "--part", "7"]) == 0
    assert (log.read_text(), ended.read_text()) == ("abab", "xyxy")


def test_nothing_is_kept_without_a_file(monkeypatch):
    monkeypatch.delenv(kept.FILE, raising=False)
    first = kept.Kept()
    assert first.find("a", lambda: 1) == first.find("a", lambda: 2) == 1
    assert kept.Kept().found == {}


def test_a_part_that_has_run_is_not_run_again(one_part, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "_commit", lambda: "abc")
    log = tmp_path / "log"
    one_part(f"open({str(log)!r}, 'a').write('x'); print('{{\"figure\": 2}}')")
    options = ["--out", str(tmp_path / "out")]
    assert [main(["gpu-check", *options]), main(["gpu-check", *options])] == [0, 0]
    assert log.read_text() == "x"
    assert main(["gpu-check", *options, "--part", "7"]) == 0
    assert log.read_text() == "xx"
    monkeypatch.setattr(command, "_commit", lambda: "def")
    assert main(["gpu-check", *options]) == 0
    assert log.read_text() == "xxx"
    text = (tmp_path / "out" / "page.md").read_text()
    assert "| figure | 2 |" in text
    assert "## Left out\n\n- 7. two cards: it needs 99 GPUs, and there are 0" in text
    assert "two cards" in capsys.readouterr().out


def test_the_page_lists_what_has_not_run_at_this_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "_commit", lambda: "abc")
    all_parts = [Part(number=number, title=f"Part {number}", checks=(python("print()"),)) for number in (1, 2)]
    monkeypatch.setattr(command, "PARTS", tuple(all_parts))
    options, page_file = ["--out", str(tmp_path)], tmp_path / "page.md"
    assert main(["gpu-check", *options, "--part", "2"]) == 0
    text = page_file.read_text()
    assert "- 1. code: it has not run at this commit" in text
    assert "| code | not run | 0 |" in text
    assert "- 2." not in text
    assert main(["gpu-check", *options]) == 0
    assert "not run" not in page_file.read_text()


def test_a_failed_check_fails_the_command(one_part, tmp_path):
    one_part("raise SystemExit(3)")
    assert main(["gpu-check", "--out", str(tmp_path)]) == 1
    assert json.loads((tmp_path / "part-7.json").read_text())["outcomes"][0]["status"] == "failed"


def test_missing_packages_are_named_by_a_python_that_has_none_of_them():
    isolated = [sys.executable, "-S", "-m", "lab", "gpu-check"]
    result = subprocess.run(isolated, cwd=packages.ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2, result.stderr
    assert "msgspec>=0.21" in result.stdout


def test_missing_packages_end_the_command_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "missing", lambda: ["msgspec>=0.21"])
    assert main(["gpu-check", "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def test_every_part_has_a_number_of_its_own_and_commands_that_exist():
    assert len({part.number for part in parts.PARTS}) == len(parts.PARTS)
    modules = [check.command[1] for part in parts.PARTS for check in part.checks if check.command[0] == "-m"]
    names = {name for name in modules if name.startswith("lab.")}
    assert names
    for name in names:
        file = packages.ROOT / (name.replace(".", "/") + ".py")
        assert "def main() -> int:" in file.read_text()


def test_figures_are_short_on_the_page():
    figures = {
        "x": {"y": 0.123456, "z": 12345.6},
        "formats": {"float32": {"seconds": 2.0, "error": 0.0}, "TF32": {"seconds": 1.0}},
        "killed": "rank 1 was killed (log: /tmp/gpu-check-1/run/rank1.log) (0.4 s later)",
    }
    outcome = asdict(running.Outcome(title="a", status="passed", figures=figures))
    text = page.page([{"number": 1, "title": "t", "outcomes": [outcome]}], machine="m", commit="c")
    assert "| x | y 0.123, z 12346 |" in text
    assert "| formats | float32: seconds 2, error 0; TF32: seconds 1 |" in text
    assert "| killed | rank 1 was killed (0.4 s later) |" in text
