"""What is chosen in ComfyUI's page, and what goes before it."""

import json
from pathlib import Path

import pytest

from parallel_backend import env, saved
from parallel_backend.client.devices import parse_devices
from parallel_backend.errors import InvalidRequest


@pytest.fixture
def file(tmp_path: Path, monkeypatch) -> Path:
    path = tmp_path / "config" / "settings.json"
    monkeypatch.setenv(env.SETTINGS.name, str(path))
    for variable in env.variables():
        if variable.in_page:
            monkeypatch.delenv(variable.name, raising=False)
    return path


def test_a_choice_is_read_until_it_changes_and_the_environment_goes_before_it(file: Path, monkeypatch) -> None:
    assert env.IDLE_TIMEOUT.get() is None
    saved.save(file, {env.IDLE_TIMEOUT.name: "120", env.MODE.name: "memory"})
    assert (env.IDLE_TIMEOUT.get(), env.MODE.get()) == (120.0, "memory")
    assert env.IDLE_TIMEOUT.chosen == "120"
    saved.save(file, {env.IDLE_TIMEOUT.name: "60"})
    assert (env.IDLE_TIMEOUT.get(), env.MODE.get()) == (60.0, "memory")
    monkeypatch.setenv(env.IDLE_TIMEOUT.name, "5")
    assert env.IDLE_TIMEOUT.get() == 5.0
    saved.save(file, {env.MODE.name: ""})
    assert env.MODE.get() == "auto"
    assert json.loads(file.read_text()) == {env.IDLE_TIMEOUT.name: "60"}


def test_only_what_the_page_offers_is_read_from_the_file(file: Path) -> None:
    saved.save(file, {env.PYTHON.name: "/evil", env.RUNTIME.name: "/evil"})
    assert env.PYTHON.get() == ""
    assert env.RUNTIME.get() is None


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}', "\xff"])
def test_a_broken_file_is_refused_by_name(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content, encoding="latin-1")
    with pytest.raises(InvalidRequest, match="remove the file"):
        env.IDLE_TIMEOUT.get()


def test_a_bad_choice_is_refused_as_a_bad_variable_is(file: Path) -> None:
    saved.save(file, {env.LOG_LEVEL.name: "LOUD"})
    with pytest.raises(InvalidRequest, match="LOG_LEVEL=LOUD: it must be DEBUG, INFO or WARNING"):
        env.LOG_LEVEL.get()


def test_a_folder_that_cannot_be_written_is_named(file: Path) -> None:
    file.parent.write_text("no folder")
    with pytest.raises(InvalidRequest, match=r"the settings cannot be saved in .*settings\.json"):
        saved.save(file, {env.MODE.name: "memory"})


def test_all_means_the_chosen_devices(file: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    saved.save(file, {env.DEVICES.name: "0,1,2"})
    assert parse_devices("all").indices == (0, 1, 2)
    assert parse_devices("0").indices == (0,)


def test_without_a_name_the_file_is_among_the_users_settings(monkeypatch) -> None:
    monkeypatch.delenv(env.SETTINGS.name)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/config")
    assert env.settings_file() == Path("/config/parallel-dit/settings.json")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert env.settings_file() == Path.home() / ".config/parallel-dit/settings.json"
