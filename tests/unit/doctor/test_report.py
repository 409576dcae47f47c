"""The archive for a bug report, and the doctor's lines."""

import json
import stat
import zipfile
from pathlib import Path

import pytest

from parallel_backend.__main__ import main
from parallel_backend.doctor import command, report
from parallel_backend.doctor.anonymous import Anonymiser
from parallel_backend.doctor.finding import Check, Finding
from parallel_backend.errors import InvalidRequest
from parallel_backend.protocol.endpoint import Endpoint

HIDE = Anonymiser(homes={"/home/ann", "/mnt/homes/ann"}, users={"ann"}, hosts={"box.lan", "box"})


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("/home/ann/ComfyUI/models", "~/ComfyUI/models"),
        ("'/home/ann'", "'~'"),
        ("/mnt/homes/ann/x", "~/x"),
        ("/home/anna/x", "/home/anna/x"),
        ("/data/ann/models", "/data/<user>/models"),
        ("ann@box.lan: a box, boxes, annex, box-1", "<user>@<host>: a <host>, boxes, annex, <host>-1"),
        ("rank 0 ran", "rank 0 ran"),
    ],
)
def test_who_and_where_is_left_out(text, hidden):
    assert HIDE(text) == hidden


def test_a_root_folder_as_home_is_no_home():
    assert Anonymiser(homes={"/"}, users={""}, hosts={""})("/etc/x") == "/etc/x"


def test_names_of_this_machine(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr("socket.gethostname", lambda: "box.lan")
    assert Anonymiser.here()("/home/somebody/x on box and box.lan") == "~/x on <host> and <host>"


def test_the_archive(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("PARALLEL_DIT_PYTHON", "/home/somebody/bin/python")
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    endpoint = Endpoint(folder=tmp_path / "run")
    endpoint.logs.mkdir(parents=True, mode=0o700)
    endpoint.folder.chmod(0o700)
    (endpoint.logs / "rank0.log").write_text("loaded /home/somebody/models/flux\n")
    (endpoint.logs / "rank0.log.1").write_text("x" * (3 * report._MAX_FILE))
    (endpoint.logs / "other.txt").write_text("not ours")
    (endpoint.logs / "link.log").symlink_to("/etc/passwd")
    file = report.new_file(str(tmp_path / "report.zip"))
    report.write(file, [Finding(check="a", verdict="fine", text="b")], endpoint, tmp_path / "checks")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with zipfile.ZipFile(file) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert set(texts) == {
        "doctor.json", "status.json", "versions.txt", "environment.txt", "doctor.log", "logs/rank0.log",
        "logs/rank0.log.1",
    }  # fmt: skip
    assert texts["logs/rank0.log"] == "loaded ~/models/flux\n"
    assert len(texts["logs/rank0.log.1"]) == report._MAX_FILE
    assert "PARALLEL_DIT_PYTHON=~/bin/python" in texts["environment.txt"]
    assert "hunter2" not in "".join(texts.values())
    assert "msgspec==" in texts["versions.txt"]
    assert "no backend answers" in texts["status.json"]


def test_an_archive_replaces_nothing(tmp_path: Path, monkeypatch):
    (tmp_path / "there.zip").write_text("")
    with pytest.raises(InvalidRequest, match=r"there\.zip: File exists"):
        report.new_file(str(tmp_path / "there.zip"))
    monkeypatch.chdir(tmp_path)
    assert report.new_file("").name.startswith("parallel-dit-report-20")


def test_a_line():
    fine = Finding(check="memory", verdict="fine", text="23 GB free")
    assert command.describe(fine) == "fine      memory              23 GB free"
    slow = Finding(check="memory", verdict="slow", text="1 GB free", advice="End others.")
    assert command.describe(slow) == f"slow      memory              1 GB free\n{'':30}-> End others."


@pytest.mark.parametrize(("names", "status"), [(["fine"], 0), (["fine", "refuses"], 1)])
def test_the_exit_status(monkeypatch, capsys, names, status):
    checks = [Check(name=name, target=f"tests.unit.doctor.fake_checks:{name}", seconds=60.0) for name in names]
    monkeypatch.setattr(command, "CHECKS", checks)
    assert main(["doctor"]) == status
    firsts = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert firsts == ["fine", *(["broken", "->"] if status else [])]
    assert main(["doctor", "--json"]) == status
    assert [found["verdict"] for found in json.loads(capsys.readouterr().out)] == ["fine", "broken"][: len(names)]


def test_a_text_to_paste(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr(Endpoint, "default", lambda: Endpoint(folder=tmp_path / "run"))
    found = [Finding(check="packages", verdict="slow", text="a|b in /home/somebody/x\nand c", advice="Install d.")]
    monkeypatch.setattr(command, "examine", lambda checks, setting: [found])
    assert main(["doctor", "--markdown"]) == 0
    text = capsys.readouterr().out
    assert "| slow | packages | a\\|b in ~/x and c | Install d. |" in text
    assert "- torch " in text
    assert "no backend answers" in text
