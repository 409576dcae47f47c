"""The step cache of a MODEL: what Parallel Cache chose, and how it goes in one sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.protocol.messages import FORECASTS, POSITION, new_id
from ...parallel_backend.step_cache.schedule import position_of
from ...parallel_backend.step_cache.settings import StepCache, preset

OPTION = "parallel_dit_step_cache"
"""The key of ``transformer_options`` with a MODEL's ``CacheChoice``."""
METHOD = "step cache"
"""The name of the approximation."""
_CORES_OWN = "easycache"
"""The key of ``transformer_options`` with the cache of EasyCache or LazyCache."""
_SEVERAL_LATENTS = {
    "context_handler": "computes parts of the latent in turn, as Context Windows does",
    "model_function_wrapper": "calls the model itself, in tiles for example",
    "sampler_calc_cond_batch_function": "calls the model itself",
}
"""Keys of ``model_options`` of nodes whose calls at one time are of several latents, and what the nodes do."""


@dataclass(frozen=True, kw_only=True)
class CacheChoice:
    """What Parallel Cache chose.

    Attributes:
        mode: a name of ``PRESETS``, or ``custom``.
        settings: those of ``custom``.
        node_id: the node, whose text says what happens.
    """

    mode: str
    settings: StepCache | None = None
    node_id: str | None = None

    def for_steps(self, steps: int) -> StepCache | None:
        """Return the settings for a number of steps; None if all of them are computed."""
        return self.settings or preset(self.mode, steps)


class CachedSampling:
    """The step cache in one sampling.

    Args:
        sigmas: of all steps.

    Attributes:
        id: no other sampling has it.
        sigma: of the current call.
        forecasts: predictions that were forecast.
        calls: all predictions.
    """

    def __init__(self, choice: CacheChoice, settings: StepCache, sigmas: Tensor) -> None:
        self.id, self.choice, self.settings = new_id(), choice, settings
        self._sigmas: Sequence[float] = sigmas.tolist()
        self.sigma = self._sigmas[0]
        self.forecasts = self.calls = 0

    def position(self) -> dict[str, Tensor]:
        """Return the tensor that a ``Forward`` with a cache needs."""
        return {POSITION: torch.tensor([position_of(self.sigma, self._sigmas), float(len(self._sigmas) - 1)])}

    def note_sigma(self, options: Mapping[str, Any]) -> None:
        """Note the time of a call, by its ``transformer_options``."""
        self.sigma = float(options["sigmas"].max())

    def count(self, results: Mapping[str, Tensor]) -> None:
        """Count the predictions of a reply."""
        forecasts, calls = results[FORECASTS].tolist()
        self.forecasts, self.calls = self.forecasts + forecasts, self.calls + calls

    @property
    def share(self) -> float:
        """The share of the predictions that were forecast."""
        return self.forecasts / max(1, self.calls)

    def said(self) -> str:
        """What happened, for the user."""
        return (
            f"{self.forecasts} of {self.calls} model calls were forecast ({100 * self.share:.0f} %): "
            "the result is approximate"
        )

    def label(self) -> dict[str, Any]:
        """What saved images say about it."""
        return {
            "approximate": METHOD, "cache": self.choice.mode, "forecast": round(self.share, 3), **asdict(self.settings),
        }  # fmt: skip


def choice_of(model_options: Mapping[str, Any]) -> CacheChoice | None:
    """Return what Parallel Cache chose for a MODEL; None if there is no such node.

    Raises:
        InvalidRequest: another node of the MODEL does not work with it.
    """
    options = model_options.get("transformer_options", {})
    choice: CacheChoice | None = options.get(OPTION)
    if choice is None:
        return None
    if options.get(_CORES_OWN) is not None:
        name = getattr(options[_CORES_OWN], "name", "EasyCache")
        raise InvalidRequest(f"{name} and Parallel Cache would both skip steps of this MODEL: remove one of the two")
    for key, action in _SEVERAL_LATENTS.items():
        if model_options.get(key) is not None:
            raise InvalidRequest(
                f"Parallel Cache cannot tell the calls of a node apart that {action} ({key}): remove one of the two"
            )
    return choice


def too_few(steps: int) -> str:
    """Return why all steps of a short sampling are computed."""
    return (
        f"all {steps} steps are computed: so few, as of a distilled model, are too far from one another to forecast "
        "any; a cache helps from 12 steps on"
    )
