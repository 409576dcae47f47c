"""Checks that end as their names say."""

import os
import signal
import sys
import time

from parallel_backend.doctor.finding import Finding, Setting
from parallel_backend.errors import InvalidRequest


def fine(setting: Setting) -> list[Finding]:
    print("said", setting.comfyui)
    return [Finding.fine(f"{os.getpid()}")]


def raises(_: Setting) -> list[Finding]:
    raise KeyError("what is missing")


def refuses(_: Setting) -> list[Finding]:
    raise InvalidRequest("a sentence for the user")


def hangs(_: Setting) -> list[Finding]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
    return []


def dies(_: Setting) -> list[Finding]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def leaves(_: Setting) -> list[Finding]:
    sys.exit(3)
