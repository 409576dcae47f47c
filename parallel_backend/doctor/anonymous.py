"""Leaves out of a text who wrote it and where."""

import contextlib
import getpass
import os
import pwd
import re
import socket
from collections.abc import Iterable
from pathlib import Path


class Anonymiser:
    """Replaces home folders, user names and host names in a text.

    Args:
        homes: paths, which become ``~``.
        users: names, which become ``<user>`` where they are whole words.
        hosts: names, which become ``<host>`` where they are whole words.
    """

    def __init__(self, *, homes: Iterable[str], users: Iterable[str], hosts: Iterable[str]) -> None:
        self._rules = [
            *((re.compile(rf"{re.escape(home)}(?![\w.-])"), "~") for home in _longest_first(homes) if home != "/"),
            *((_word(host), "<host>") for host in _longest_first(hosts)),
            *((_word(user), "<user>") for user in _longest_first(users)),
        ]

    @classmethod
    def here(cls) -> "Anonymiser":
        """For this user on this machine."""
        homes, users = {str(Path.home()), os.path.realpath(Path.home())}, {os.environ.get("USER", "")}
        with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
            users |= {getpass.getuser(), pwd.getpwuid(os.getuid()).pw_name}
            homes.add(pwd.getpwuid(os.getuid()).pw_dir)
        host = socket.gethostname()
        return cls(homes=homes, users=users, hosts={host, host.partition(".")[0]} - {"localhost"})

    def __call__(self, text: str) -> str:
        """Return the text without them."""
        for pattern, replacement in self._rules:
            text = pattern.sub(replacement, text)
        return text


def _longest_first(texts: Iterable[str]) -> list[str]:
    return sorted(filter(None, {text.rstrip("/") or text for text in texts}), key=len, reverse=True)


def _word(name: str) -> "re.Pattern[str]":
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])")
