"""Which packages are missing, and how to bring them to a machine without a network.

Needs the standard library alone.
"""

import importlib.metadata
import platform
import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTING = ("pytest", "pytest-timeout", "psutil")
"""What the checks need besides ``requirements.txt``."""
IMPORTED = (
    "anyio", "certifi", "charset-normalizer", "h11", "httpcore2", "httpx2", "huggingface_hub", "idna", "iniconfig",
    "packaging", "pillow", "pluggy", "pygments", "pyyaml", "regex", "requests", "tqdm", "trampoline", "truststore",
    "urllib3",
)  # fmt: skip
"""What those packages import themselves, in the versions of ``constraints.txt``, less what torch brings.

Some of their requirements are not here, such as scipy, which takes as much as all others: the checks do not import
them.
"""


def missing() -> list[str]:
    """Return the requirements that are not installed, or not in a version that works."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").split()
    return [line for line in (*lines, *TESTING, *IMPORTED) if not _is_installed(line)]


def _is_installed(requirement: str) -> bool:
    name, _, least = requirement.partition(">=")
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return not least or _numbers(version) >= _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.match(r"[\d.]*", version)[0].strip(".").split("."))  # type: ignore[index]


def advice(names: list[str]) -> str:
    """Say how to bring packages here."""
    python, folder = ".".join(platform.python_version_tuple()[:2]), Path("wheels")
    quoted = " ".join(map(shlex.quote, names))
    return (
        f"Missing packages: {', '.join(names)}\n"
        f"With a network: python -m pip install {quoted}\n"
        "Without: on another machine run in this folder, for 61 MB if all of them are missing,\n"
        f"  python -m pip download --no-deps --only-binary=:all: --python-version {python} "
        f"--platform manylinux_2_28_{platform.machine()} --platform manylinux2014_{platform.machine()} "
        f"-d {folder} -c constraints.txt {quoted}\n"
        f"and here: python -m pip install --no-index --no-deps {folder}/*.whl\n"
        "--no-deps keeps the GPU's torch."
    )
