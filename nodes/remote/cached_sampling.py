"""Lets one sampling have the step cache that its MODEL asks for, and says what became of it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from ..backend.connection import show_on_node
from ..backend.noted_steps import executing_origin, note_approximation
from ..picture_metadata import label_running_prompt
from .step_cache import METHOD, CacheChoice, CachedSampling, choice_of, too_few


class Cacheable(Protocol):
    """What sends the requests of a sampling."""

    cached: CachedSampling | None


@contextmanager
def step_cache(remote: Cacheable, model_options: Mapping[str, Any], sigmas: Tensor) -> Iterator[None]:
    """Cache steps inside the ``with`` block if Parallel Cache chose it.

    Raises:
        InvalidRequest: another node of the MODEL does not work with it.
    """
    choice, steps, before = choice_of(model_options), len(sigmas) - 1, remote.cached
    settings = choice.for_steps(steps) if choice and steps > 0 else None
    if choice and not settings:
        _show(choice, too_few(steps))
    remote.cached = CachedSampling(choice, settings, sigmas) if choice and settings else None
    try:
        yield
        if remote.cached:
            _tell(remote.cached)
    finally:
        remote.cached = before


def _tell(cached: CachedSampling) -> None:
    """Say what share was forecast: on the node, in the page, in the log and in saved pictures."""
    _show(cached.choice, cached.said())
    if not cached.forecasts:
        return
    note_approximation(METHOD)
    origin = executing_origin()
    if origin is not None:
        label_running_prompt(origin.node, cached.label())


def _show(choice: CacheChoice, text: str) -> None:
    logging.info("Parallel Cache: %s", text)
    if choice.node_id is not None:
        show_on_node(choice.node_id, text)
