"""Compiled code, which torch unpickles, is in a folder that nobody else can write to."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from parallel_backend.errors import BackendUnavailable
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.supervisor.ranks.compiled_code import FOLDER, TRITONS, keep_compiled_code

TORCHS = Path(tempfile.gettempdir()) / "torchinductor_someone"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's caches. After a test, the environment is as it was."""
    for name in (FOLDER, TRITONS):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


@pytest.fixture
def endpoint(tmp_path: Path) -> Endpoint:
    return Endpoint(folder=tmp_path / "run")


def test_it_is_among_the_users_caches(caches: Path, endpoint: Endpoint) -> None:
    for _ in range(2):  # a second start finds the folder
        assert keep_compiled_code(endpoint) == ""
        assert os.environ[FOLDER] == str(caches / "parallel-dit" / "compiled")
        assert stat.S_IMODE(Path(os.environ[FOLDER]).stat().st_mode) == 0o700
        os.environ[FOLDER] = ""


@pytest.mark.parametrize("named", ["", "relative"])
def test_without_a_name_for_caches_it_is_in_the_home_folder(
    named: str, tmp_path: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(tmp_path))
    keep_compiled_code(endpoint)
    assert os.environ[FOLDER] == str(tmp_path / ".cache" / "parallel-dit" / "compiled")


def test_the_users_choice_counts(caches: Path, endpoint: Endpoint) -> None:
    os.environ[FOLDER], os.environ[TRITONS] = "/chosen", "/tritons"
    assert keep_compiled_code(endpoint) == ""
    assert (os.environ[FOLDER], os.environ[TRITONS]) == ("/chosen", "/tritons")
    assert not caches.exists()


def test_torchs_default_is_no_choice(caches: Path, endpoint: Endpoint) -> None:
    os.environ[FOLDER], os.environ[TRITONS] = str(TORCHS), str(TORCHS / "triton" / "0")
    keep_compiled_code(endpoint)
    assert Path(os.environ[FOLDER]).is_relative_to(caches)
    assert TRITONS not in os.environ


@pytest.mark.parametrize("wrong", ["others may enter", "a link", "cannot be made", "no home"])
def test_it_is_in_the_runtime_folder_where_it_would_not_be_safe(
    wrong: str, caches: Path, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = caches / "parallel-dit" / "compiled"
    reason = "it is no folder that this user owns, with mode 0700"
    if wrong == "others may enter":
        folder.mkdir(parents=True)
        folder.chmod(0o750)
    elif wrong == "a link":
        folder.parent.mkdir(parents=True)
        (caches / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(caches / "elsewhere")
    elif wrong == "cannot be made":
        caches.touch()
        reason = "it cannot be made (Not a directory)"
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
        folder, reason = Path("~/.cache/parallel-dit/compiled"), "this user has no home folder"
    assert (
        keep_compiled_code(endpoint)
        == f"compiled code is kept in {endpoint.folder}/compiled, not in {folder}: {reason}"
    )
    assert os.environ[FOLDER] == str(endpoint.folder / "compiled")
    assert stat.S_IMODE(endpoint.folder.stat().st_mode) == 0o700


def test_it_is_nowhere_if_the_runtime_folder_is_not_safe_either(caches: Path, endpoint: Endpoint) -> None:
    caches.touch()
    endpoint.folder.mkdir()
    endpoint.folder.chmod(0o755)
    with pytest.raises(BackendUnavailable, match="with mode 0700"):
        keep_compiled_code(endpoint)
    assert not os.environ[FOLDER]
