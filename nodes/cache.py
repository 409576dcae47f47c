"""The node that lets the ranks forecast some steps of a sampling instead of computing them."""

from typing import Any

from comfy_api.latest import io
from typing_extensions import override

from ..parallel_backend.errors import InvalidRequest
from ..parallel_backend.step_cache.settings import LIMITS, MAX_THRESHOLD, METHODS, PRESETS, StepCache
from .backend.connection import show_on_node
from .bridges.given_numbers import as_float, as_int
from .remote.patcher import RemotePatcher
from .remote.step_cache import OPTION, CacheChoice, choice_of

OFF, CUSTOM = "off", "custom"
ADVANCED = {"advanced": True}
"""What newer versions of ComfyUI's page hide until they are asked for it."""
MODE_TOOLTIP = (
    "off: all steps are computed. safe: hardly a visible difference; from 12 steps on it computes every second, from "
    "40 on every third. fast: with a visible difference; from 20 steps on every third, from 40 on every fourth. "
    "custom: the inputs below. Distilled models with 4 to 8 steps gain nothing."
)
METHOD_TOOLTIP = (
    "With custom, which steps are forecast. schedule: by their number alone. residual: those where what the first "
    "block adds has changed less than threshold since the last computed step. change: those until the changes of its "
    "input add up to threshold."
)
THRESHOLD_TOOLTIP = "With custom and residual or change: the relative change below which a step is forecast."
NUMBERS = {
    "interval": (
        2,
        "With custom: of so many steps one is computed, and the others are forecast. With residual and change, at "
        "least one.",
    ),
    "order": (
        1,
        "With custom: what a forecast is. 0 repeats the last computed prediction, 1 continues a line through the last "
        "two, 2 a parabola through the last three.",
    ),
    "warmup": (
        1,
        "With custom: steps that are computed at the start, and again after a switch of transformers or a recovery.",
    ),
    "first": (0, "With custom: the first step that may be forecast, counted from 0."),
    "final": (1, "With custom: steps at the end that are always computed."),
}
"""Default and tooltip of each number."""


class ParallelCache(io.ComfyNode):  # type: ignore[misc]
    """A step cache for the MODEL of a parallel loader."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelCache",
            display_name="Parallel Cache",
            category="Parallel DiT",
            description="Computes only some steps of a sampling and forecasts the others from them. Approximate: the "
            "picture differs a little. For models that take 12 steps or more, with any sampler and any exact layout.",
            inputs=[
                io.Model.Input("model", tooltip="The MODEL of Parallel Loader or Parallel Model."),
                io.Combo.Input("mode", options=[OFF, *PRESETS, CUSTOM], default=PRESETS[0], tooltip=MODE_TOOLTIP),
                io.Combo.Input(
                    "method", options=[str(each) for each in METHODS], default=METHODS[0], tooltip=METHOD_TOOLTIP,
                    optional=True, extra_dict=ADVANCED,
                ),
                io.Float.Input(
                    "threshold", default=0.1, min=0.0, max=MAX_THRESHOLD, step=0.01, tooltip=THRESHOLD_TOOLTIP,
                    optional=True, extra_dict=ADVANCED,
                ),
                *(
                    io.Int.Input(
                        name, default=default, min=LIMITS[name][0], max=LIMITS[name][1], tooltip=tooltip, optional=True,
                        extra_dict=ADVANCED,
                    )
                    for name, (default, tooltip) in NUMBERS.items()
                ),
            ],
            outputs=[io.Model.Output(tooltip="For KSampler and other sampling nodes, and for Parallel Sampler.")],
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        )  # fmt: skip

    @classmethod
    @override
    def execute(
        cls, model: Any, mode: str = PRESETS[0], method: Any = METHODS[0], threshold: float = 0.1, interval: int = 2,
        order: int = 1, warmup: int = 1, first: int = 0, final: int = 1,
    ) -> io.NodeOutput:  # fmt: skip
        """Return the MODEL with the choice among its options."""
        if not isinstance(model, RemotePatcher):
            raise InvalidRequest(
                "Parallel Cache needs the MODEL of Parallel Loader or Parallel Model; for any other, use EasyCache"
            )
        if mode not in (OFF, *PRESETS, CUSTOM):
            raise InvalidRequest(f"mode {mode!r} does not exist: {', '.join((OFF, *PRESETS, CUSTOM))} do")
        given = {"interval": interval, "order": order, "warmup": warmup, "first": first, "final": final}
        numbers = {name: as_int(value, f"step cache {name}") for name, value in given.items()}
        threshold = as_float(threshold, "step cache threshold")
        settings = StepCache(**numbers, method=method, threshold=threshold) if mode == CUSTOM else None
        chosen = model.clone()
        options = chosen.model_options.setdefault("transformer_options", {})
        options.pop(OPTION, None)
        if mode != OFF:
            options[OPTION] = CacheChoice(mode=mode, settings=settings, node_id=_shown_on(cls.hidden))
            choice_of(chosen.model_options)
        return io.NodeOutput(chosen)


def _shown_on(hidden: Any) -> str | None:
    """Return the node that the user sees; None if no workflow runs."""
    if hidden is None or hidden.dynprompt is None:
        return None
    shown: str = hidden.dynprompt.get_display_node_id(hidden.unique_id)
    show_on_node(shown, "the result is approximate")
    return shown
