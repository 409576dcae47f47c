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
"""A workflow in API format: by node id, ``class_type`` and ``inputs``."""


class PromptRejected(Exception):
    """ComfyUI refused a prompt; the text holds its node errors."""


class ExecutionFailed(Exception):
    """A node raised, or the prompt was interrupted.

    ``exception_type`` is the exception's name; the text has the failing node's class and the message as well.
    """

    def __init__(self, *, node_type: str, exception_type: str, message: str) -> None:
        super().__init__(f"{node_type}: {exception_type}: {message}")
        self.exception_type = exception_type


@dataclass(frozen=True, kw_only=True)
class File:
    """A file that a node wrote."""

    filename: str
    subfolder: str
    type: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished prompt: ``seconds`` on ComfyUI's own clock, and what each output node reported."""

    prompt_id: str
    seconds: float
    outputs: dict[str, dict[str, Any]]

    @property
    def files(self) -> list[File]:
        """Every image file, in the order of the nodes."""
        entries = [entry for output in self.outputs.values() for entry in output.get("images", [])]
        return [File(filename=e["filename"], subfolder=e["subfolder"], type=e["type"]) for e in entries]


class ComfyClient:
    """One ComfyUI at ``url``. Every call has a deadline in seconds."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client_id = uuid.uuid4().hex

    def request(self, path: str, body: Any = None, *, deadline: float = 30.0) -> bytes:
        """GET, or POST of ``body`` as JSON.

        Raises:
            urllib.error.HTTPError: the status is no success.
            OSError: there is no answer in time.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=deadline) as response:
            content: bytes = response.read()
        return content

    def get(self, path: str, *, deadline: float = 30.0) -> Any:
        """GET a JSON value."""
        return json.loads(self.request(path, deadline=deadline))

    def object_info(self) -> dict[str, Any]:
        """Every node class with its inputs and outputs."""
        info: dict[str, Any] = self.get("/object_info", deadline=120.0)
        return info

    def submit(self, prompt: Prompt, *, extra_data: dict[str, Any] | None = None) -> str:
        """Queue a prompt and return its id.

        Raises:
            PromptRejected: ComfyUI's validation refused it.
        """
        body = {"prompt": prompt, "client_id": self.client_id, "extra_data": extra_data or {}}
        try:
            answer = json.loads(self.request("/prompt", body))
        except urllib.error.HTTPError as error:
            raise PromptRejected(error.read().decode(errors="replace")) from error
        if answer.get("node_errors"):
            raise PromptRejected(json.dumps(answer["node_errors"]))
        return str(answer["prompt_id"])

    def wait(self, prompt_id: str, *, deadline: float = 120.0) -> Result:
        """Wait for a prompt's end.

        Raises:
            ExecutionFailed: a node raised, or the prompt was interrupted.
            TimeoutError: it did not end within ``deadline`` seconds.
        """
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry and entry["status"]["status_str"]:
                return _read_history(prompt_id, entry)
            time.sleep(0.05)
        raise TimeoutError(f"prompt {prompt_id} did not finish within {deadline:g} s")

    def run(self, prompt: Prompt, *, deadline: float = 120.0) -> Result:
        """``submit`` and ``wait``."""
        return self.wait(self.submit(prompt), deadline=deadline)

    def fetch(self, file: File) -> bytes:
        """The bytes of a file that a node wrote."""
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
