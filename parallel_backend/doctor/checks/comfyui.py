"""ComfyUI: its version, and whether it still has all that the nodes rely on."""

import re
import subprocess
import sys
from pathlib import Path

from ...client.launch import ROOT
from ...errors import InvalidRequest
from ..finding import Finding, Setting

CONTRACT = ROOT / "scripts" / "core_contract"
_OLDEST = (0, 8, 0)
"""The oldest release that the extension supports."""
_SECONDS = 120.0
_SHOWN = 3
"""Differences that are quoted."""


def comfyui(setting: Setting) -> list[Finding]:
    """Find ComfyUI and compare it with the core contract.

    Raises:
        InvalidRequest: ``--comfyui`` names another folder.
    """
    path = _find(setting.comfyui)
    if path is None:
        return [Finding.not_here("this extension is in no ComfyUI's custom_nodes; --comfyui PATH checks one")]
    version = _version(path)
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if numbers and numbers < _OLDEST:
        text = f"{version} is older than {'.'.join(map(str, _OLDEST))}, the oldest that works"
        return [Finding.broken(text, "Update ComfyUI.")]
    if not CONTRACT.is_dir():
        return [Finding.fine(f"{version}; the core contract is not part of this installation")]
    return [_compared(path, version)]


def _compared(path: Path, version: str) -> Finding:
    output, differs = _contract(path)
    if not differs:
        return Finding.fine(f"{version}, and all that the nodes rely on is there")
    lines = output.splitlines()[:-1]
    more = f" (and {len(lines) - _SHOWN} more)" if len(lines) > _SHOWN else ""
    text = f"{version} differs from what the nodes rely on: {' '.join(lines[:_SHOWN])}{more}"
    return Finding.broken(text, "Update this extension, or report this text.")


def _find(named: str | None) -> Path | None:
    if named:
        path = Path(named).expanduser()
        if not _is_comfyui(path):
            raise InvalidRequest(f"--comfyui {named}: it is not a ComfyUI's folder, which has a comfyui_version.py")
        return path
    around = ROOT.parent.parent
    return around if ROOT.parent.name == "custom_nodes" and _is_comfyui(around) else None


def _is_comfyui(path: Path) -> bool:
    return (path / "main.py").is_file() and (path / "comfyui_version.py").is_file()


def _version(path: Path) -> str:
    text = (path / "comfyui_version.py").read_text(encoding="utf-8")
    match = re.search(r"""__version__ *= *["']([^"']+)""", text)
    return match[1] if match else "of unknown version"


def _contract(path: Path) -> tuple[str, bool]:
    """Return what ``scripts.core_contract`` prints of a ComfyUI, and whether there are differences.

    Raises:
        RuntimeError: it fails.
    """
    command = [sys.executable, "-m", "scripts.core_contract", str(path.absolute())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        raise RuntimeError(f"the core contract cannot be checked: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout, done.returncode == 1
