"""The folder of certificates: who may read it, what is kept, and what is made anew."""

import stat
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from parallel_backend.__main__ import main
from parallel_backend.errors import InvalidRequest
from parallel_backend.machines.certificates.files import make
from parallel_backend.machines.certificates.tls import CA, CA_KEY, CLIENT, SERVER, TOKEN, Credentials, valid_until
from tests.support.certificates import authority_of, made

FILES = {"ca.pem", "ca.key", "server.pem", "server.key", "client.pem", "client.key", "token"}


def test_nobody_else_can_read_the_files(tmp_path: Path) -> None:
    folder = made(tmp_path / "deep" / "certificates")
    made(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == dict.fromkeys(FILES, 0o600)


def test_another_run_keeps_the_authority_and_the_token(tmp_path: Path) -> None:
    folder = made(tmp_path / "c")
    before = {name: (folder / name).read_bytes() for name in FILES}
    made(folder, "first.example", "10.0.0.1")
    after = {name: (folder / name).read_bytes() for name in FILES}
    assert {name for name in FILES if before[name] == after[name]} == {CA, CA_KEY, TOKEN}
    make(folder, ["first.example"], days=2, new=True)
    assert {name for name in FILES if (folder / name).read_bytes() == after[name]} == set()


def test_the_token_is_long_and_random(tmp_path: Path) -> None:
    tokens = {Credentials.of_server(made(tmp_path / name)).token for name in "ab"}
    assert len(tokens) == 2
    assert min(map(len, tokens)) >= 43  # 32 bytes in base64


def test_certificates_hold_for_as_many_days_as_asked_for_and_no_longer_than_their_authority(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    make(folder, ["a"], days=30)
    for name in (SERVER, CLIENT):
        left = valid_until((folder / name).read_text()) - datetime.now(timezone.utc)
        assert timedelta(days=29, hours=23) < left <= timedelta(days=30)
    make(folder, ["a"], days=36500)
    assert valid_until((folder / SERVER).read_text()) == valid_until((folder / CA).read_text())


def test_a_time_with_four_digits_for_the_year_is_read(tmp_path: Path) -> None:
    """Certificates have them from 2050 on."""
    far = authority_of(made(tmp_path / "c")).make(days=20000)
    assert valid_until(far.signed.certificate.decode()).year >= 2050


def test_a_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(InvalidRequest, match="mode 0700"):
        made(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_authority_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    folder, other = made(tmp_path / "c"), made(tmp_path / "other")
    (folder / CA_KEY).write_bytes((other / CA_KEY).read_bytes())
    with pytest.raises(InvalidRequest, match="do not fit each other: --new"):
        made(folder)
    (folder / CA).write_bytes(authority_of(other).make(days=-1).signed.certificate)
    with pytest.raises(InvalidRequest, match=r"ca\.pem has expired on .* certificates --new"):
        made(folder)


def test_the_command_says_which_files_go_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["certificates", "--hosts", "First.example, 10.0.0.1,10.0.0.1", "--folder", str(tmp_path / "c")]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "for first.example, 10.0.0.1\n" in printed
    assert "connects to it  ca.pem, and either client.pem and client.key or token" in printed
    assert (tmp_path / "c" / TOKEN).read_text().strip() not in printed


@pytest.mark.parametrize("hosts", ["", "a b", "1.2.3", "0", "a,,b", "-a.example", "*.example"])
def test_what_is_no_host_is_refused(hosts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certificates", f"--hosts={hosts}", "--folder", str(tmp_path / "c")]) == 1
    assert "is neither the name of a host nor an IP address" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
