"""The command of CI leaves the machine as it was, and ends as the tests do."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
AUTOGROUPS = "/proc/sys/kernel/sched_autogroup_enabled"


def start(folder: Path, tests: str) -> "subprocess.Popen[bytes]":
    """Run the command in a folder with other tests and a file in the place of the kernel's."""
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert AUTOGROUPS in text
    for name, content in (
        (".ci/run", text.replace(AUTOGROUPS, str(folder / "autogroups"))),
        ("scripts/test.sh", tests),
    ):
        (folder / name).parent.mkdir()
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "autogroups").write_text("1\n")
    # A shell cannot trap what it was started to ignore, as what runs in the background may be.
    return subprocess.Popen(["bash", str(folder / ".ci" / "run")], preexec_fn=heed_signals)


def heed_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("status", [0, 3])
def test_autogroups_are_off_for_the_tests_alone(tmp_path: Path, status: int) -> None:
    process = start(tmp_path, f"cat autogroups >seen\nexit {status}\n")
    assert process.wait(30) == status
    assert (tmp_path / "seen").read_text() == "0\n"
    assert (tmp_path / "autogroups").read_text() == "1\n"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_tests_first(tmp_path: Path, number: signal.Signals) -> None:
    ends = "trap 'sleep 0.3; cat autogroups >seen; kill %1; exit 7' TERM"
    process = start(tmp_path, f"sleep 60 &\n{ends}\ntouch runs\nwait\n")
    end = time.monotonic() + 30
    while not (tmp_path / "runs").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(30) == 7
    assert (tmp_path / "seen").read_text() == "0\n"
    assert (tmp_path / "autogroups").read_text() == "1\n"
