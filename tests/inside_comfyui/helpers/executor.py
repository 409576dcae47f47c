"""ComfyUI's own executor in this process: whole prompts, without a server."""

import uuid
from types import SimpleNamespace
from typing import Any

import execution
from comfy_extras import nodes_model_advanced, nodes_string

import nodes as core_nodes

Prompt = dict[str, dict[str, Any]]


class Recorder:
    """A node that keeps what arrives. An output node, so that the executor runs it."""

    INPUT_TYPES = staticmethod(lambda: {"required": {"value": ("*",)}})
    RETURN_TYPES: tuple[str, ...] = ()
    FUNCTION = "keep"
    OUTPUT_NODE = True
    kept: list[Any] = []  # noqa: RUF012 one list for all instances, which the executor creates

    def keep(self, value: Any) -> dict[str, Any]:
        """Keep a value."""
        self.kept.append(value)
        return {"ui": {}}


class Given:
    """A node that outputs what a test puts into ``values``."""

    INPUT_TYPES = staticmethod(lambda: {"required": {"key": ("STRING", {})}})
    RETURN_TYPES = ("*",)
    FUNCTION = "give"
    values: dict[str, Any] = {}  # noqa: RUF012 see Recorder

    def give(self, key: str) -> tuple[Any]:
        """Return the value of a key."""
        return (self.values[key],)


class NodeFailed(RuntimeError):
    """A node failed. The text is the node's.

    Attributes:
        kind: the name of the error's class.
    """

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class Executor:
    """Runs prompts one after the other with one cache, as a ComfyUI server does.

    Attributes:
        executed: the nodes that ran in the last prompt, in order. Cached ones are not among them.
        texts: what the nodes of the last prompt show.
    """

    def __init__(self, *node_classes: Any) -> None:
        core_nodes.NODE_CLASS_MAPPINGS.update(nodes_model_advanced.NODE_CLASS_MAPPINGS)
        for cls in (Recorder, Given, nodes_string.StringConcatenate, *node_classes):
            name = cls.GET_SCHEMA().node_id if hasattr(cls, "GET_SCHEMA") else cls.__name__
            core_nodes.NODE_CLASS_MAPPINGS[name] = cls
        self.executed: list[str] = []
        self.texts: dict[str, Any] = {}
        server = SimpleNamespace(client_id="test", last_node_id=None, send_sync=self._sent, last_prompt_id=None)
        self._executor = execution.PromptExecutor(server, cache_args={"ram": 0.0, "ram_inactive": 0.0, "lru": 0})

    def run(self, prompt: Prompt, *others: str) -> list[Any]:
        """Run a prompt and return what its ``Recorder`` nodes got.

        Args:
            prompt: what runs.
            *others: output nodes that run, too.

        Raises:
            NodeFailed: a node failed.
        """
        Recorder.kept, self.executed, self.texts = [], [], {}
        outputs = [node_id for node_id, node in prompt.items() if node["class_type"] == "Recorder"]
        self._executor.execute(prompt, uuid.uuid4().hex, {"client_id": "test"}, [*outputs, *others])
        failed = [data for event, data in self._executor.status_messages if event == "execution_error"]
        if failed:
            raise NodeFailed(failed[0]["exception_message"], failed[0]["exception_type"])
        return Recorder.kept

    def _sent(self, event: Any, data: Any, sid: Any = None) -> None:
        if event == "executing" and data.get("node"):
            self.executed.append(data["node"])
        if event == "executed" and data.get("output"):
            self.texts[data["node"]] = data["output"].get("text")
