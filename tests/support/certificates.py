"""Folders of certificates, as machines of a test have them."""

import shutil
from pathlib import Path

from parallel_backend.machines.certificates.authority import Authority, Signed
from parallel_backend.machines.certificates.files import make
from parallel_backend.machines.certificates.tls import CA, CA_KEY, CLIENT, CLIENT_KEY, SERVER, SERVER_KEY, TOKEN
from parallel_backend.protocol.private_file import opener

WITH_CERTIFICATE, WITH_TOKEN = (CA, CLIENT, CLIENT_KEY), (CA, TOKEN)
"""Files of a client."""


def made(folder: Path, *hosts: str) -> Path:
    """Make a folder of certificates for a server at these hosts (127.0.0.1)."""
    make(folder, hosts or ("127.0.0.1",), days=2)
    return folder


def copied(source: Path, folder: Path, files: tuple[str, ...]) -> Path:
    """Make a folder with some of another one's files."""
    folder.mkdir(mode=0o700, parents=True)
    for name in files:
        shutil.copy2(source / name, folder)
    return folder


def authority_of(folder: Path) -> Authority:
    """Return the authority of a folder."""
    return Authority(Signed(certificate=(folder / CA).read_bytes(), key=(folder / CA_KEY).read_bytes()))


def write_client(folder: Path, signed: Signed) -> None:
    """Give a folder another client's certificate."""
    _write(folder / CLIENT, signed.certificate)
    _write(folder / CLIENT_KEY, signed.key)


def write_server(folder: Path, signed: Signed) -> None:
    """Give a folder another server's certificate."""
    _write(folder / SERVER, signed.certificate)
    _write(folder / SERVER_KEY, signed.key)


def _write(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    with open(path, "xb", opener=opener) as file:
        file.write(data)
