"""Tells the page whose prompt runs what happens in it: steps and their times, failures, approximate results."""

import logging
import sys
import time
from typing import Any

from .session import current

STEPS, NOTICE = "parallel_dit.steps", "parallel_dit.notice"
"""Names of the messages."""
PAUSE = 0.5
"""Least seconds between two messages about steps."""


class _Told:
    """When a page was last told about steps, and what of it is not repeated."""

    def __init__(self) -> None:
        self.at = 0.0
        self.noticed: set[tuple[Any, ...]] = set()


def tell_steps(node: str, *, done: float, total: float, seconds: float, left: float | None) -> None:
    """Tell the page how long steps take, but not more often than it can be read. The last one is always told."""
    told = current().part(_Told)
    now = time.monotonic()
    if now - told.at >= PAUSE or done >= total:
        told.at = now
        _send(STEPS, {"node": node, "done": done, "total": total, "seconds": seconds, "left": left})


def notice(kind: str, text: str, *, code: str = "", prompt: str = "", node: str = "") -> None:
    """Show a notice once for each prompt.

    Args:
        kind: ``failed``, ``recovered`` or ``approximate``.
        text: a sentence, or the name of the method.
        code: of a failure.
        prompt: the prompt's id.
        node: the node's.
    """
    told, key = current().part(_Told), (prompt, kind, text)
    if key not in told.noticed:
        told.noticed = {each for each in told.noticed if each[0] == prompt} | {key}
        _send(NOTICE, {"kind": kind, "text": text, "code": code, "node": node})


def _send(event: str, data: dict[str, Any]) -> None:
    """Send a message to the page that queued the running prompt, if ComfyUI's server runs. Never raises an error."""
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if server is not None and server.client_id is not None:
        try:
            server.send_sync(event, data, server.client_id)
        except Exception:
            logging.exception("Parallel DiT: the page cannot be told")
