"""The process that checks: ``python -m parallel_backend.doctor.child FD SETTING CHECKS``.

It writes a line of JSON to the descriptor after each check. It is a process of its own because a call into a driver may
hang for ever, or end the process.
"""

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from ..errors import BackendError
from ..processes import die_with_parent
from .finding import Check, Finding, Setting


def findings_of(check: Check, setting: Setting) -> list[Finding]:
    """Run one check. If it raises, it is broken."""
    module, _, function = check.target.partition(":")
    try:
        found: list[Finding] = getattr(importlib.import_module(module), function)(setting)
    except Exception as error:
        text = str(error) if isinstance(error, BackendError) else f"{type(error).__name__}: {error}"
        advice = "If the sentence does not help, attach the archive of --report to a bug report."
        return [Finding(check=check.name, verdict="broken", text=" ".join(text.split()), advice=advice)]
    return [replace(finding, check=check.name) for finding in found]


def main(arguments: Sequence[str]) -> None:
    """Run the checks."""
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a temporary backend is stopped
    descriptor, setting = int(arguments[0]), msgspec.json.decode(arguments[1], type=Setting)
    for check in msgspec.json.decode(arguments[2], type=list[Check]):
        line = msgspec.json.encode(findings_of(check, setting)) + b"\n"
        while line:
            line = line[os.write(descriptor, line) :]


if __name__ == "__main__":
    main(sys.argv[1:])
