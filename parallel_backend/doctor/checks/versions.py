"""Python's packages, and the attention kernels that they give."""

import platform
import subprocess
import sys
from collections.abc import Iterator

from ... import last_words
from ... import packages as others
from ...client import gpus
from ...errors import BrokenPackage
from ..finding import Finding, Setting

_NAMED = ("torch", "diffusers", "transformers", "msgspec", "safetensors")
"""Packages whose versions are shown."""
_KERNEL_PACKAGES = {"flash": "flash_attn", "sage": "sageattention"}
"""By kernel, the package that brings it or makes it faster."""
_SOME_MODELS = ("gguf", "comfy_kitchen", "torchsde", "cryptography")
"""What ranks import for some files, samplers and machines alone."""
_OTHERS = ("accelerate", "bitsandbytes", "flash_attn", "peft", "sageattention", "torchaudio", "torchvision", "xformers")
"""Hidden packages that are often broken."""
_IMPORT_SECONDS = 60.0


def packages(_: Setting) -> list[Finding]:
    """Whether what ``requirements.txt`` asks for is installed, and whether what ranks import can be imported."""
    versions = {name: others.version_of(name) or "missing" for name in _NAMED}
    text = ", ".join([f"Python {platform.python_version()}", *map(" ".join, versions.items())])
    wrong = _unmet()
    if wrong:
        advice = f"Run with the backend's Python: python -m pip install -r {others.REQUIREMENTS}"
        return [Finding.broken(f"{text}; {'; '.join(wrong)}", advice)]
    if broken := list(_broken()):
        advice = "Do what the sentence says, and then python -m parallel_backend stop."
        return [Finding.broken(sentence, advice) for sentence in broken]
    return [Finding.fine(text)]


def _unmet() -> list[str]:
    """Return what is missing or has another version, one clause each."""
    from packaging.requirements import Requirement

    wrong = []
    for requirement in map(Requirement, others.requirements().values()):
        version = others.version_of(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    return wrong


def _broken() -> Iterator[str]:
    """Import in this process what ranks import, and yield a sentence for each package that cannot be."""
    from ...rank.spare import imports

    others.hide()
    try:
        for _ in imports():
            pass
    except Exception as error:
        if (broken := others.broken_by(error)) is None:
            raise
        yield str(broken)
    for name in _SOME_MODELS:
        try:
            others.load(name)
        except BrokenPackage as error:
            yield str(error)


def other_packages(_: Setting) -> list[Finding]:
    """Which packages are broken that ranks do without, each tried in a process of its own."""
    found = {each: f"{each} {others.version_of(each) or ''}".strip() for each in _OTHERS if others.is_installed(each)}
    broken = [f"{named} ({reason})" for each, named in found.items() if (reason := _import_error(each))]
    text = f"ranks do without {', '.join(found.values()) or 'any'}"
    if broken:
        text += f"; cannot be imported here, which other nodes may notice: {'; '.join(broken)}"
    return [Finding.fine(text)]


def _import_error(package: str) -> str:
    command = [sys.executable, "-c", f"import {package}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end after {_IMPORT_SECONDS:g} s"
    return last_words.of(done.returncode, done.stderr) or "no reason" if done.returncode else ""


def kernels(_: Setting) -> list[Finding]:
    """Which attention kernels run here, and installed ones that do not."""
    refusals = _refusals()
    works = [kernel for kernel, refusal in refusals.items() if refusal is None]
    text = f"{', '.join(works)} run{'s' if len(works) == 1 else ''} here"
    useless = [f"{_KERNEL_PACKAGES[kernel]}: {refusal}" for kernel, refusal in refusals.items() if refusal
               and kernel in _KERNEL_PACKAGES and others.is_installed(_KERNEL_PACKAGES[kernel])]  # fmt: skip
    if useless and gpus.count():
        advice = "Install a version of the package that fits this GPU and this torch, or go on without it."
        return [Finding.slow(f"{text}; installed but not usable: {'; '.join(useless)}", advice)]  # fmt: skip
    return [Finding.fine(text)]


def _refusals() -> dict[str, str | None]:
    """Return by kernel why it does not run here; None if it does."""
    import torch

    from ...attention.flash_package import flash_package
    from ...attention.kernels import KERNELS

    gpu = gpus.count() > 0
    device, dtype = torch.device("cuda:0" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    refusals = {name: kernel.unavailable(device, dtype) for name, kernel in KERNELS.items()}
    if gpu and others.is_installed("flash_attn") and refusals["flash"] is None and flash_package(device) is None:
        refusals["flash"] = "it does not run on this GPU, and torch's own operator takes its place"
    return refusals
