"""Python's packages, and the attention kernels that they give."""

import importlib.metadata
import importlib.util
import platform
from pathlib import Path

from ...client import gpus
from ...client.launch import ROOT
from ..finding import Finding, Setting

REQUIREMENTS = ROOT / "requirements.txt"
_NAMED = ("torch", "diffusers", "transformers", "msgspec", "safetensors")
"""Packages whose versions are shown."""
_KERNEL_PACKAGES = {"flash": "flash_attn", "sage": "sageattention"}
"""By kernel, the package that brings it or makes it faster."""


def packages(_: Setting) -> list[Finding]:
    """Whether what ``requirements.txt`` asks for is installed."""
    shown = [f"Python {platform.python_version()}", *(f"{name} {_version(name) or 'missing'}" for name in _NAMED)]
    text, wrong = ", ".join(shown), _unmet(REQUIREMENTS)
    if not wrong:
        return [Finding(check="packages", verdict="fine", text=text)]
    advice = f"Run with the backend's Python: python -m pip install -r {REQUIREMENTS}"
    return [Finding(check="packages", verdict="broken", text=f"{text}; {'; '.join(wrong)}", advice=advice)]


def _unmet(requirements: Path) -> list[str]:
    """Return what is missing or has another version, one clause each."""
    from packaging.requirements import Requirement

    if not requirements.exists():  # an installed wheel has its requirements in its metadata
        lines = importlib.metadata.requires("parallel-dit") or []
    else:
        lines = requirements.read_text(encoding="utf-8").splitlines()
    wrong = []
    for requirement in (Requirement(line) for line in lines if line.strip() and not line.startswith("#")):
        version = _version(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    return wrong


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def kernels(_: Setting) -> list[Finding]:
    """Which attention kernels run here, and installed ones that do not."""
    name, refusals = "attention kernels", _refusals()
    works = [kernel for kernel, refusal in refusals.items() if refusal is None]
    text = f"{', '.join(works)} run{'s' if len(works) == 1 else ''} here"
    useless = [f"{_KERNEL_PACKAGES[kernel]}: {refusal}" for kernel, refusal in refusals.items() if refusal
               and kernel in _KERNEL_PACKAGES and _installed(_KERNEL_PACKAGES[kernel])]  # fmt: skip
    if useless and gpus.count():
        advice = "Install a version of the package that fits this GPU and this torch, or go on without it."
        return [Finding(check=name, verdict="slow", text=f"{text}; installed but not usable: {'; '.join(useless)}",
                        advice=advice)]  # fmt: skip
    return [Finding(check=name, verdict="fine", text=text)]


def _refusals() -> dict[str, str | None]:
    """Return by kernel why it does not run here; None if it does."""
    import torch

    from ...attention.flash_package import flash_package
    from ...attention.kernels import KERNELS

    gpu = gpus.count() > 0
    device, dtype = torch.device("cuda:0" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32
    refusals = {name: kernel.unavailable(device, dtype) for name, kernel in KERNELS.items()}
    if gpu and _installed("flash_attn") and refusals["flash"] is None and flash_package(device) is None:
        refusals["flash"] = "it does not run on this GPU, and torch's own operator takes its place"
    return refusals


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
