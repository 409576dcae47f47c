"""What the panel shows: the backend's status, and what this ComfyUI knows about its own prompt."""

from dataclasses import asdict
from typing import Any

import msgspec

from ...parallel_backend.client.status_text import fields
from ...parallel_backend.errors import BackendError, BackendUnavailable
from ...parallel_backend.protocol.status import Status
from ..backend.activity import Activity
from ..backend.session import current

OFF = "off"
"""The state of a backend that does not run."""

Json = dict[str, Any]


def snapshot() -> Json:
    """Return what the panel shows now. Blocks for as long as the backend takes to answer; never raises an error."""
    found = _backend() | _comfyui()
    return found | {"busy": found["state"] not in (OFF, "idle") or bool(found["status"] and found["status"]["running"])}


def without_clocks(shown: Json) -> Json:
    """Return what of a snapshot makes it worth sending: all but what changes while nothing happens."""
    status = shown["status"]
    if not status:
        return shown
    still = {**status, "memory": 0, "hosts": [], "spares": len(status["spares"])}
    still["work"] = {**status["work"], "seconds": 0} if status["work"] else None
    still["ranks"] = [_still(rank) for rank in status["ranks"]]
    return {**shown, "status": still}


def _still(rank: Json) -> Json:
    progress = {"phase": rank["progress"]["phase"], "step": rank["progress"]["step"]}
    rounded = {name: rank[name] >> 26 for name in ("memory", "device_used", "device_memory")}  # 64 MiB
    load = None if rank["load"] is None else round(rank["load"], 1)
    return {**rank, **rounded, "load": load, "progress": progress, "link": None}


def _backend() -> Json:
    try:
        status = current().client.status()
    except BackendUnavailable as error:
        return {"state": OFF, "status": None, "problem": str(error) if current().client.remote else ""}
    except BackendError as error:
        return {"state": "unreachable", "status": None, "problem": str(error)}
    return {"state": status.state, "status": fields(status), "problem": "", "endpoint": _place(status)}


def _place(status: Status) -> str:
    endpoint = current().client.endpoint
    return str(endpoint) if endpoint.remote else ""


def _comfyui() -> Json:
    activity = current().part(Activity)
    steps, trouble = activity.steps, activity.trouble
    return {
        "steps": msgspec.to_builtins(steps) | {"left": steps.left},
        "trouble": asdict(trouble) if trouble else None,
        "reason": activity.reason,
    }
