"""While the backend does not answer what the checks of a queued prompt ask, ComfyUI's event loop goes on."""

import asyncio
import threading
from typing import Any

import execution
import pytest
from any_folder_name.nodes.backend import session
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.nodes.model import ParallelModel
from any_folder_name.nodes.vae import ParallelVAE
from any_folder_name.parallel_backend.errors import BackendError, BackendUnavailable
from helpers.executor import Executor, Prompt
from helpers.inside_fixtures import Loaded

PATIENCE = 10.0
PROMPT: Prompt = {
    "1": {"class_type": "ParallelLoader", "inputs": {"model_name": "tiny", "dtype": "fp32", "devices": "0,1"}},
    "2": {"class_type": "ParallelModel", "inputs": {"model": ["1", 0], "devices": "0,1"}},
    "3": {"class_type": "ParallelVAE", "inputs": {"vae": ["1", 2], "devices": "0,1"}},
    "4": {"class_type": "Shown", "inputs": {"model": ["2", 0], "vae": ["3", 0]}},
}


class Shown:
    """A node at the end of a prompt."""

    INPUT_TYPES = staticmethod(lambda: {"required": {"model": ("MODEL",), "vae": ("VAE",)}})
    RETURN_TYPES: tuple[str, ...] = ()
    FUNCTION = "show"
    OUTPUT_NODE = True


class LateClient:
    """A client whose backend says nothing about its hosts until it is let go, and an error then if there is one."""

    def __init__(self, error: BackendError | None) -> None:
        self.remote, self.error = error is not None, error
        self.go_on, self.asked = threading.Event(), 0

    def hosts(self) -> tuple[Any, ...]:
        self.asked += 1
        if not self.go_on.wait(PATIENCE):
            raise TimeoutError
        if self.error:
            raise self.error
        return ()


async def queue(client: LateClient) -> tuple[bool, Any]:
    """Validate the prompt as ComfyUI's server does. Return whether the event loop went on meanwhile, and the result."""
    validating = asyncio.create_task(execution.validate_prompt("id", PROMPT, None))
    while not client.asked and not validating.done():
        await asyncio.sleep(0.005)
    went_on = not validating.done()
    client.go_on.set()
    return went_on, await validating


@pytest.mark.parametrize("error", [None, BackendUnavailable("no backend answers at 10.0.0.1:7400")])
def test_the_event_loop_goes_on_and_the_backend_is_asked_once(loaded: Loaded, error: BackendError | None) -> None:
    Executor(ParallelLoader, ParallelModel, ParallelVAE, Shown)
    client = LateClient(error)
    session.use(session.Session(client))
    went_on, (valid, _, _, refused) = asyncio.run(queue(client))
    assert went_on
    assert client.asked == 1
    assert valid is (error is None)
    said = {node: [each["details"].partition(" - ")[2] for each in found["errors"]] for node, found in refused.items()}
    assert {node: set(sentences) for node, sentences in said.items()} == (
        {node: {str(error)} for node in ("1", "2", "3")} if error else {}
    )
