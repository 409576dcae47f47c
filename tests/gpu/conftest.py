"""A process that sees the GPUs. Where there are none, what asks for it is skipped."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from tests.support import gpus

TIMEOUT = 120.0

OnCard = Callable[..., Any]


@pytest.fixture(scope="session")
def on_card() -> Iterator[OnCard]:
    """``on_card(function, *args)`` calls a module-level function in a process that may use the GPUs."""
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=gpus.show, initargs=(gpus.VISIBLE,)) as pool:

        def call(function: Callable[..., Any], *args: Any) -> Any:
            return pool.submit(function, *args).result(TIMEOUT)

        if not call(torch.cuda.is_available):
            pytest.skip("there is no GPU here")
        yield call
