"""The folder with the files of an authority."""

import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from ...errors import InvalidRequest
from ...protocol.private_file import FOLDER_MODE, opener
from .authority import Authority, Signed
from .tls import CA, CA_KEY, CLIENT, CLIENT_KEY, SERVER, SERVER_KEY, TOKEN, Credentials, check_certificate

_TOKEN_BYTES = 32

_TEXT = f"""\
on the machine of the backend     {CA}, {SERVER}, {SERVER_KEY}, {TOKEN}
on a machine that connects to it  {CA}, and either {CLIENT} and {CLIENT_KEY} or {TOKEN}
nowhere else                      {CA_KEY}, which makes further certificates

Copy them into the same folder there, by a way that nobody else can read, and keep their modes (0600, folder 0700)."""


def make(folder: Path, hosts: Sequence[str], *, days: int, new: bool = False) -> str:
    """Make the files. Keeps an existing authority and token unless ``new``.

    Args:
        folder: where the files go; made if it does not exist.
        hosts: names and IP addresses of the server.
        days: until the certificates expire.
        new: make all anew, so that the old ones are void.

    Returns:
        Which files go where.

    Raises:
        InvalidRequest: others may enter the folder, it is not writable, or its authority cannot be used.
    """
    _prepare(folder)
    kept = not new and (folder / CA_KEY).exists()
    try:
        authority = _kept(folder) if kept else Authority.make()
        if not kept:
            _write(folder, CA, CA_KEY, authority.signed)
        if not kept or not (folder / TOKEN).exists():
            _replace(folder / TOKEN, f"{secrets.token_urlsafe(_TOKEN_BYTES)}\n".encode())
        _write(folder, SERVER, SERVER_KEY, authority.sign_server(hosts, days=days))
        _write(folder, CLIENT, CLIENT_KEY, authority.sign_client(days=days))
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be written: {error.strerror}; name another --folder") from error
    Credentials.of_server(folder).server_context()
    made = "new certificates of the authority that was there" if kept else "a new authority and its certificates"
    return f"{made} in {folder}, for {', '.join(hosts)}\n\n{_TEXT}"


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        info = folder.stat()
    except OSError as error:
        raise InvalidRequest(f"{folder} cannot be made: {error.strerror}; name another --folder") from error
    if info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise InvalidRequest(f"{folder} must be a folder that you own, with mode 0700: chmod 700 it, or name another")


def _kept(folder: Path) -> Authority:
    ca = folder / CA
    check_certificate(ca)
    try:
        return Authority(Signed(certificate=ca.read_bytes(), key=(folder / CA_KEY).read_bytes()))
    except ValueError as error:
        raise InvalidRequest(f"{ca} and {CA_KEY} do not fit each other: --new makes all files anew") from error


def _write(folder: Path, certificate: str, key: str, signed: Signed) -> None:
    _replace(folder / key, signed.key)
    _replace(folder / certificate, signed.certificate)


def _replace(path: Path, data: bytes) -> None:
    """Write a file that only this user can read, completely or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    with open(partial, "xb", opener=opener) as file:
        file.write(data)
    partial.replace(path)
