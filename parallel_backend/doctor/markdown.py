"""The doctor's lines, the status and the versions as a text to paste into an issue.

It leaves out what the archive of ``report`` leaves out.
"""

import importlib.metadata
import platform
from collections.abc import Sequence

from ..protocol.endpoint import Endpoint
from .anonymous import Anonymiser
from .finding import Finding
from .report import status

PACKAGES = ("torch", "diffusers", "transformers", "safetensors", "numpy")
"""Packages whose versions matter most."""


def page(findings: Sequence[Finding], endpoint: Endpoint) -> str:
    """Return the text."""
    rows = [f"| {each.verdict} | {each.check} | {_cell(each.text)} | {_cell(each.advice)} |" for each in findings]
    lines = [
        "### Doctor", "", "| verdict | check | found | advice |", "|---|---|---|---|", *rows, "",
        "### Versions", "", *_versions(), "",
        "### Status", "", "```json", status(endpoint), "```",
    ]  # fmt: skip
    return Anonymiser.here()("\n".join(lines))


def _versions() -> list[str]:
    installed = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    known = [f"- {name} {installed[name]}" for name in PACKAGES if name in installed]
    return [f"- Python {platform.python_version()} on {system}", *known]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
