"""A blocking client of ComfyUI's HTTP API. Standard library only."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from dataclasses import dataclass
from typing import Any

Prompt = dict[str, dict[str, Any]]
"""A workflow in API format: ``class_type`` and ``inputs`` by node id."""


class PromptRejected(Exception):
    """ComfyUI rejected a prompt. The text has its node errors."""


class ExecutionFailed(Exception):
    """A node raised an exception, or the prompt was interrupted.

    The text has the node's class, the exception's type and its message.

    Attributes:
        exception_type: the type's name; ``"Interrupted"`` for an interrupted prompt.
    """

    def __init__(self, *, node_type: str, exception_type: str, message: str) -> None:
        super().__init__(f"{node_type}: {exception_type}: {message}")
        self.exception_type = exception_type


@dataclass(frozen=True, kw_only=True)
class File:
    """A file that a node wrote, as ComfyUI's ``/view`` asks for it."""

    filename: str
    subfolder: str
    type: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished prompt.

    Attributes:
        prompt_id: its id.
        seconds: how long it ran, by ComfyUI's clock.
        outputs: what each output node reported, by node id.
    """

    prompt_id: str
    seconds: float
    outputs: dict[str, dict[str, Any]]

    @property
    def files(self) -> list[File]:
        """All image files, in the order of the nodes."""
        entries = [entry for output in self.outputs.values() for entry in output.get("images", [])]
        return [File(filename=e["filename"], subfolder=e["subfolder"], type=e["type"]) for e in entries]


class ComfyClient:
    """The API of one ComfyUI. Every call has a deadline in seconds.

    Attributes:
        url: the server's address, such as ``http://127.0.0.1:8188``.
        client_id: this client's id, which progress messages are addressed to.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.client_id = uuid.uuid4().hex

    def request(self, path: str, body: Any = None, *, deadline: float = 30.0) -> bytes:
        """Send a GET request, or a POST request with ``body`` as JSON, and return the response's content.

        Raises:
            urllib.error.HTTPError: the status is an error.
            OSError: the server does not answer in time.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=deadline) as response:
            content: bytes = response.read()
        return content

    def get(self, path: str, *, deadline: float = 30.0) -> Any:
        """The JSON value at ``path``."""
        return json.loads(self.request(path, deadline=deadline))

    def object_info(self) -> dict[str, Any]:
        """All node classes with their inputs and outputs."""
        info: dict[str, Any] = self.get("/object_info", deadline=120.0)
        return info

    def submit(self, prompt: Prompt, *, extra_data: dict[str, Any] | None = None) -> str:
        """Queue a prompt and return its id.

        Raises:
            PromptRejected: ComfyUI's validation rejects it.
        """
        body = {"prompt": prompt, "client_id": self.client_id, "extra_data": extra_data or {}}
        try:
            reply = json.loads(self.request("/prompt", body))
        except urllib.error.HTTPError as error:
            raise PromptRejected(error.read().decode(errors="replace")) from error
        if reply.get("node_errors"):
            raise PromptRejected(json.dumps(reply["node_errors"]))
        return str(reply["prompt_id"])

    def wait(self, prompt_id: str, *, deadline: float = 120.0) -> Result:
        """Wait until a prompt has finished.

        Raises:
            ExecutionFailed: a node raised an exception, or the prompt was interrupted.
            TimeoutError: it has not finished after ``deadline`` seconds.
        """
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry and entry["status"]["status_str"]:
                return _read_history(prompt_id, entry)
            time.sleep(0.05)
        raise TimeoutError(f"prompt {prompt_id} did not finish within {deadline:g} s")

    def run(self, prompt: Prompt, *, deadline: float = 120.0) -> Result:
        """Queue a prompt and wait until it has finished; see ``submit`` and ``wait``."""
        return self.wait(self.submit(prompt), deadline=deadline)

    def fetch(self, file: File) -> bytes:
        """The content of a file that a node wrote."""
        query = urllib.parse.urlencode({"filename": file.filename, "subfolder": file.subfolder, "type": file.type})
        return self.request(f"/view?{query}")

    def interrupt(self) -> None:
        """Interrupt the running prompt."""
        self.request("/interrupt", {})


def _read_history(prompt_id: str, entry: dict[str, Any]) -> Result:
    messages = dict(entry["status"]["messages"])
    if failure := messages.get("execution_error"):
        raise ExecutionFailed(
            node_type=failure["node_type"],
            exception_type=failure["exception_type"],
            message=failure["exception_message"].strip(),
        )
    if interrupted := messages.get("execution_interrupted"):
        raise ExecutionFailed(
            node_type=interrupted["node_type"], exception_type="Interrupted", message="the prompt was interrupted"
        )
    milliseconds = messages["execution_success"]["timestamp"] - messages["execution_start"]["timestamp"]
    return Result(prompt_id=prompt_id, seconds=milliseconds / 1000, outputs=entry["outputs"])
