"""The command ``python -m parallel_backend doctor``."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..client import query
from ..errors import BackendError
from ..protocol.endpoint import Endpoint
from . import markdown, report
from .finding import Finding, Setting
from .registry import CHECKS
from .runner import examine

_WIDTHS = (8, 18)


def run(options: argparse.Namespace) -> int:
    """Run all checks; return 1 if something is broken."""
    file = None if options.report is None else report.new_file(options.report)
    found: list[Finding] = []
    with _folder() as folder:
        setting = Setting(folder=str(folder), devices=options.devices, comfyui=options.comfyui)
        for findings in examine(CHECKS, setting):
            found += findings
            if not (options.json or options.markdown):
                print("\n".join(map(describe, findings)), flush=True)
        if options.markdown:
            print(markdown.page(found, Endpoint.default()))
        elif options.json:
            print(msgspec.json.encode(found).decode())
        if file:
            report.write(file, found, Endpoint.default(), folder)
            if not (options.json or options.markdown):
                print(f"report: {file}")
    return int(any(finding.verdict == "broken" for finding in found))


def describe(finding: Finding) -> str:
    """Return a finding as a line of text, and a second one with what to do."""
    verdict, check = (text.ljust(width) for text, width in zip((finding.verdict, finding.check), _WIDTHS, strict=True))
    lines = [f"{verdict}  {check}  {finding.text}"]
    if finding.advice:
        lines.append(f"{'':{sum(_WIDTHS) + 4}}-> {finding.advice}")
    return "\n".join(lines)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder; at the end, no backend that a check started there is left."""
    with tempfile.TemporaryDirectory(prefix="parallel-dit-doctor-") as name:
        try:
            yield Path(name)
        finally:
            with contextlib.suppress(BackendError):
                query.stop(Endpoint(folder=Path(name) / "run"))
