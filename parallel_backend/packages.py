"""Other Python packages: ranks hide some that libraries would import, and say what mends a broken one.

Environments of ComfyUI are full of packages that are broken, or older than the library that finds them wants. diffusers
and transformers import each optional package that is installed, so one of these ends the import of every model.
"""

import errno
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from .errors import BrokenPackage, InvalidRequest

HIDDEN = (
    "accelerate", "aiter", "apex", "bitsandbytes", "flash_attn", "flash_attn_3", "flash_attn_interface", "flashinfer",
    "gguf", "hqq", "kernels", "librosa", "mistral_common", "peft", "sageattention", "scipy", "sentencepiece",
    "sklearn", "soundfile", "soxr", "torch_xla", "torchao", "torchaudio", "torchdistx", "torchvision", "xformers",
)  # fmt: skip
"""What diffusers 0.38 to 0.42 and transformers 4.56 to 5.23 import where they find it, and no model needs. The kernels
and formats that do need one of these import it by ``load``."""

_FRAMEWORKS = {"USE_TORCH": "1", "USE_TF": "0", "USE_FLAX": "0"}
"""Variables by which older versions do without TensorFlow and JAX. Hiding these would not do: einops imports each
framework whose name is in ``sys.modules``."""

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements.txt"
_OURS = __package__.rpartition(".")[2]
_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
"""Errors of the operating system by which an import fails of a sound package: the machine lacks something."""
_MAX_TEXT = 300
"""Characters of an import's error that are quoted."""


def hide() -> None:
    """Have this process take the packages in ``HIDDEN`` for absent, unless it has imported them.

    Python refuses to import a name that ``sys.modules`` maps to None, and ``find_spec`` then finds nothing.
    """
    os.environ.update(_FRAMEWORKS)
    for name in HIDDEN:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def is_installed(name: str) -> bool:
    """Whether there is a package of this name, hidden or not."""
    hidden = _reveal(name)
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a module in ``sys.modules`` without a spec is one that somebody has made
        return name in sys.modules
    finally:
        if hidden:
            sys.modules[name] = None  # type: ignore[assignment]


def load(name: str) -> ModuleType:
    """Import a package that may be hidden. It stays hidden if that fails.

    Raises:
        BrokenPackage: it is missing or cannot be imported. The message says what mends it.
    """
    hidden = _reveal(name)
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise broken_by(error) or BrokenPackage(_sentence(name, error), package=name) from error
    finally:
        if hidden and name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]


def _reveal(name: str) -> bool:
    """Return whether a package was hidden, which it is no longer."""
    if sys.modules.get(name, sys) is not None:
        return False
    del sys.modules[name]
    return True


def broken_by(error: BaseException) -> BrokenPackage | None:
    """Return what to raise instead of an error if it, or what it was raised from, ended the import of a package.

    Returns:
        None if no import of a package of others failed.
    """
    while error.__cause__ is not None and not isinstance(error, BrokenPackage):
        error = error.__cause__
    if isinstance(error, BrokenPackage):
        return error
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _LACKS):
        return None
    importing = [name for name in _importing(error) if name != _OURS]
    named = error.name.partition(".")[0] if isinstance(error, ImportError) and error.name else ""
    culprit = named or next(reversed(importing), "")
    if not culprit or culprit in (_OURS, "__main__"):
        return None
    importer = next(iter(importing), "")
    return BrokenPackage(_sentence(culprit, error, importer), package=culprit)


def _importing(error: BaseException) -> Iterator[str]:
    """Yield the packages of the modules that were being imported when an error was raised, the outermost first."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "<module>":
            yield str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _sentence(culprit: str, error: BaseException, importer: str = "") -> str:
    """Return what is wrong with a package, and what mends it."""
    distribution, version = _distribution(culprit), version_of(culprit)
    for_whom = ""
    if importer not in ("", culprit):
        for_whom = f", which {_distribution(importer)} {version_of(importer) or ''}".rstrip() + " imports,"
    if version is None and isinstance(error, ModuleNotFoundError):
        what = f"the package {distribution}{for_whom} is missing"
    else:
        text = " ".join(str(error).split())[:_MAX_TEXT]
        named = " ".join(filter(None, (distribution, version)))
        what = f"the package {named}{for_whom} cannot be imported ({type(error).__name__}: {text})"
    return f"{what}: {remedy(culprit, importer)}"


def remedy(package: str, importer: str = "") -> str:
    """Return the commands that mend a package, as the end of a sentence.

    Args:
        package: what has to be mended.
        importer: the package that imports it; "" if this one does.
    """
    wanted = requirements()
    names = list(dict.fromkeys(_distribution(name) for name in (importer, package) if name))
    if len(names) > 1:
        options = ["--upgrade"]  # pip then chooses versions that go together
    else:
        options = ["--upgrade", "--force-reinstall", "--no-deps"] if version_of(package) else []
    command = [sys.executable, "-m", "pip", "install", *options, *(wanted.get(name.lower(), name) for name in names)]
    return (
        f"run {shlex.join(command)}, or name another Python with PARALLEL_DIT_PYTHON: one of an environment of its "
        "own, with requirements.txt installed there"
    )


def version_of(package: str) -> str | None:
    """Return the version of an installed package by its module's name; None if it has none."""
    return _installed(_distribution(package))


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_diffusers(class_name: str, since: str) -> None:
    """Refuse a module class for which the installed diffusers is too old.

    Args:
        class_name: of the module.
        since: the first version that has its layers; "" for one that ``requirements.txt`` allows.

    Raises:
        InvalidRequest: both versions are in the message, and the command that mends it.
    """
    installed = _installed("diffusers") if since else None
    if installed is None or _release(installed) >= _release(since):
        return
    command = shlex.join([sys.executable, "-m", "pip", "install", "--upgrade", f"diffusers>={since}"])
    raise InvalidRequest(f"{class_name} needs diffusers {since}, and {installed} is installed: run {command}")


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def requirements() -> dict[str, str]:
    """Return the lines of requirements.txt by the package's name in lower case."""
    if REQUIREMENTS.exists():
        lines = REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    else:  # an installed wheel has its requirements in its metadata
        lines = importlib.metadata.requires("parallel-dit") or []
    return {re.split(r"[^\w.-]", line)[0].lower(): line for line in map(str.strip, lines) if line[:1] not in ("", "#")}


def _distribution(package: str) -> str:
    """Return the name under which pip knows a package that is imported by another one, from all that are installed."""
    return next(iter(importlib.metadata.packages_distributions().get(package, ())), package.replace("_", "-"))
