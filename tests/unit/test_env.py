"""Environment variables: each has one place, one sentence and one refusal."""

import ast
import os
from pathlib import Path

import pytest

from parallel_backend import env
from parallel_backend.errors import InvalidRequest
from scripts import settings_table

ROOT = Path(__file__).parents[2]
FILES = [file for folder in ("parallel_backend", "nodes", "lab", "scripts") for file in (ROOT / folder).rglob("*.py")]


def test_the_reference_page_is_made_of_them() -> None:
    text = settings_table.PAGE.read_text(encoding="utf-8")
    assert text == settings_table.page(text), "run python -m scripts.generate"


def test_no_other_file_spells_a_name() -> None:
    names = {each.name for each in env.variables()}
    spelled = {
        f"{file.relative_to(ROOT)}: {node.value}"
        for file in FILES
        if file != Path(env.__file__)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    }
    assert spelled == set()


def test_every_one_is_used() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in FILES if file != Path(env.__file__))
    unused = [each.name for each in env.variables() if f"env.{each.name.removeprefix('PARALLEL_DIT_')}" not in text]
    assert unused == []


@pytest.mark.parametrize(
    ("variable", "bad", "works"),
    [
        (env.IDLE_TIMEOUT, ("soon", "-1", "inf", "nan"), "it must be a number of seconds, 0 or more"),
        (env.SPARES, ("many", "-1", "1.5"), "it must be a number, 0 or more"),
        (env.CPU_RANKS, ("0", "17", "two"), "it must be a number from 1 to 16"),
        (env.MEMORY_LIMIT, ("0", "much", "1e9", "20 GiB"), "write a rank's memory in bytes, or with a unit"),
        (env.COLLECTIVES, ("mpi",), "it must be nccl or gloo"),
        (env.DEVICES, ("0;1", "$(x)"), "write all, or numbers such as 0,1"),
        (env.MODE, ("fast",), "it must be auto or memory"),
        (env.PREVIEWS, ("yes",), "it must be on or off"),
        (env.LOG_LEVEL, ("info", "5"), "it must be DEBUG, INFO or WARNING"),
        (env.HANDICAP, ("1", "1=0.5", "a=2"), "write RANK=FACTOR with factors of at least 1"),
    ],
    ids=str,
)
def test_a_bad_value_is_refused(monkeypatch, variable, bad, works) -> None:
    for text in bad:
        monkeypatch.setenv(variable.name, text)
        with pytest.raises(InvalidRequest) as caught:
            variable.get()
        assert str(caught.value).startswith(f"{variable}={text}: {works}")


def test_values_are_read_when_they_are_asked_for(monkeypatch) -> None:
    for text, value in (("", None), ("1.5 kb", 1500), ("7", 7)):
        monkeypatch.setenv(env.MEMORY_LIMIT.name, text)
        assert env.MEMORY_LIMIT.get() == value
    monkeypatch.setenv(env.MODELS.name, "/a::/b")
    assert env.MODELS.get() == (Path("/a"), Path("/b"))
    monkeypatch.setenv(env.LOGS.name, "here")
    assert env.LOGS.get() == Path.cwd() / "here"


def test_what_is_changed_for_a_while_comes_back(monkeypatch) -> None:
    monkeypatch.setenv(env.SPARES.name, "3")
    monkeypatch.delenv(env.CPU_RANKS.name, raising=False)
    with env.changed({env.SPARES.name: "1", env.CPU_RANKS.name: "4"}):
        assert (env.SPARES.get(), env.CPU_RANKS.get()) == (1, 4)
    assert (env.SPARES.get(), env.CPU_RANKS.get()) == (3, 2)
    assert env.CPU_RANKS.name not in os.environ
