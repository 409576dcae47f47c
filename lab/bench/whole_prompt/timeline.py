"""Where the time of a prompt goes: by node, as ComfyUI's websocket says, and by phase of the backend's requests."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_backend.protocol import request_log
from parallel_backend.protocol.request_log import RequestLine
from scripts.comfy_api import ComfyClient, Prompt
from scripts.comfy_events import Event, Events

QUEUE = "before the first node"
ENDS = ("execution_success", "execution_error", "execution_interrupted")
TOTALS = ("queued", "starting", "running")
"""Phases of a request that add up to all of its time in the backend. The others are parts of the last one."""
_SETTLED, _PATIENCE, _POLL = 0.3, 5.0, 0.05
"""Seconds without a new line after which a log counts as written, at most, and between two looks."""


@dataclass(frozen=True, kw_only=True)
class Requests:
    """The requests of one kind.

    Attributes:
        count: how many.
        seconds: by phase, of all together, see ``RequestLine``.
    """

    count: int
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds in the backend."""
        return sum(self.seconds.get(phase, 0.0) for phase in TOTALS)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One prompt.

    Attributes:
        seconds: from the POST to the saved file.
        nodes: seconds by class of node, in the order in which they ran.
        requests: by kind of message.
    """

    seconds: float
    nodes: Mapping[str, float]
    requests: Mapping[str, Requests]

    @property
    def outside(self) -> float:
        """Seconds in which no request was in the backend: ComfyUI, our nodes, and the way between."""
        return self.seconds - sum(each.total for each in self.requests.values())

    def describe(self) -> str:
        """Return a line for each node and each kind of request."""
        nodes = [f"    {seconds:8.3f}  {name}" for name, seconds in self.nodes.items()]
        return "\n".join([*nodes, *(_described(kind, each) for kind, each in self.requests.items()),
                          f"    {self.outside:8.3f}  outside of requests"])  # fmt: skip


def _described(kind: str, requests: Requests) -> str:
    parts = [f"{phase} {seconds:.3f}" for phase, seconds in requests.seconds.items() if seconds >= 5e-4]
    return f"    {requests.total:8.3f}  {requests.count} x {kind}: {', '.join(parts)}"


class RequestLog:
    """Reads what a backend's log of requests has got since the last time."""

    def __init__(self, path: Path) -> None:
        self._path, self._known = path, set[str]()

    def new(self) -> list[RequestLine]:
        """Return the new lines, once no more come: a line is written after its request's reply."""
        end, found, since = time.monotonic() + _PATIENCE, list[RequestLine](), time.monotonic()
        while time.monotonic() < min(end, since + _SETTLED):
            time.sleep(_POLL)
            more = [line for line in request_log.read(self._path) if line.id not in self._known]
            self._known |= {line.id for line in more}
            found, since = found + more, time.monotonic() if more else since
        return found


def timed(client: ComfyClient, events: Events, log: RequestLog, prompt: Prompt, *, deadline: float) -> Timed:
    """Run a prompt.

    Raises:
        ExecutionFailed: a node raises an exception.
        TimeoutError: it does not end within ``deadline`` seconds.
    """
    begun, seen = time.monotonic(), len(events.seen)
    prompt_id = client.submit(prompt)
    events.wait(lambda event: event.kind in ENDS and event.data["prompt_id"] == prompt_id, deadline)
    client.wait(prompt_id)
    of_prompt = [each for each in events.seen[seen:] if each.kind in ("executing", *ENDS)]
    nodes = by_node(of_prompt, prompt, prompt_id, begun)
    return Timed(seconds=sum(nodes.values()), nodes=nodes, requests=by_kind(log.new()))


def by_node(events: Sequence[Event], prompt: Prompt, prompt_id: str, begun: float) -> dict[str, float]:
    """Return seconds by class of node.

    Args:
        events: ``executing`` of each node, and the prompt's end.
        prompt: the prompt.
        prompt_id: events of others are left out.
        begun: when the prompt was sent.
    """
    seconds, before, name = dict[str, float](), begun, QUEUE
    for event in events:
        if event.data["prompt_id"] != prompt_id:
            continue
        seconds[name] = seconds.get(name, 0.0) + event.at - before
        if event.kind in ENDS:
            break
        node = event.data.get("display_node") or event.data["node"]
        before, name = event.at, prompt[node]["class_type"] if node in prompt else name
    return seconds


def by_kind(lines: Sequence[RequestLine]) -> dict[str, Requests]:
    """Return requests added up by kind of message."""
    found: dict[str, Requests] = {}
    for line in lines:
        before = found.get(line.kind, Requests(count=0, seconds={}))
        phases = {name: before.seconds.get(name, 0.0) + line.seconds.get(name, 0.0)
                  for name in (*before.seconds, *line.seconds)}  # fmt: skip
        found[line.kind] = Requests(count=before.count + 1, seconds=phases)
    return found
