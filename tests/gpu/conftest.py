"""A process that sees the GPUs. Tests that need it are skipped where there are none."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

from parallel_backend.verify.full_float32 import disable_tf32
from tests.support import gpus

TIMEOUT = 120.0

OnCard = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)
def full_float32() -> Iterator[None]:
    """Results of float32 are held to 1e-4, those of ranks that tests start included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVIDIA_TF32_OVERRIDE", "")  # put back at the end
        disable_tf32()
        yield


@pytest.fixture(scope="session")
def on_card() -> Iterator[OnCard]:
    """``on_card(function, *args)`` calls a module-level function in a process that sees the GPUs."""
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=gpus.start, initargs=(gpus.VISIBLE,)) as pool:

        def call(function: Callable[..., Any], *args: Any) -> Any:
            return pool.submit(function, *args).result(TIMEOUT)

        if not call(torch.cuda.is_available):
            pytest.skip("this machine has no GPU")
        yield call
