"""The node that chooses how the ranks share the work."""

from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io
from typing_extensions import override

from ..parallel_backend.errors import InvalidRequest
from ..parallel_backend.layout.balance import parse_balance
from ..parallel_backend.layout.modes import AUTO, MODES, LayoutMode
from ..parallel_backend.layout.parallel_layout import AXES, STALE, ParallelLayout
from .bridges.given_numbers import as_int

LayoutType = io.Custom("PARALLEL_LAYOUT")
Degree = int | None
GivenLayout = ParallelLayout | LayoutMode | None
"""What a loader's input ``layout`` takes."""

MODE_TOOLTIP = (
    "What decides the layout. degrees: the inputs below, which keep their defaults in all other modes. auto: the "
    "loader, as without this node. Otherwise the ranks measure themselves for a few seconds, once for a model and a "
    "size. fastest: the fastest layout. fit memory: the least memory. fit memory over slow links: the fewest bytes "
    "between slow links. allow approximate: the fastest, approximate layouts included."
)
DEGREE_TOOLTIPS = {
    "data": "Groups of ranks that each take a share of the batch. Helps only if the batch has more than one item.",
    "cfg": "2: half of the ranks compute the positive prompt, the other half the negative one. Needs cfg other than "
    "1.0.",
    "pipe": "Ranks that each hold a range of the layers. In Parallel Sampler, patches of the image stream through "
    "them (PipeFusion), which is approximate. In other samplers the whole image passes through them one rank at a "
    "time, which is exact; only prompts and batch items overlap.",
    "ring": "Ranks that share the tokens and pass keys and values around a ring. Combines with ulysses and needs less "
    "memory.",
    "ulysses": "Ranks that share the tokens of the image and exchange attention heads. No number needs to be "
    "divisible.",
    "dsp": "Ranks that share the tokens of the image and exchange whole frames, in models whose frames attend only to "
    "themselves, such as Latte and Open-Sora 1.2. Sends half of what ulysses sends.",
    "tensor": "Ranks that each hold a part of every weight matrix. At most the model's number of attention heads.",
}
SHARD_TOOLTIP = (
    "The ranks of ring, ulysses and dsp share one copy of the weights. This fits a model larger than one GPU and costs "
    "some speed."
)
PATCHES_TOOLTIP = (
    "Patches of the image that stream through pipe. 0: twice the number of its ranks, and 1 for models of picture and "
    "sound. 1 is exact."
)
WARMUP_TOOLTIP = "Exact steps at the start, before the approximate steps of pipe or stale."
STALE_TOOLTIP = (
    "Which keys and values of the other ranks of ring a rank uses in Parallel Sampler. off: the current ones, exact. "
    "previous: those of the previous step, so that no rank waits (displaced patch). none: no others, for comparison. "
    "previous and none are approximate."
)
BALANCE_TOOLTIP = (
    "Relative speeds of the ranks that share a picture by ring, ulysses, dsp and tensor, or of those of pipe or data, "
    "for example 2:1 if the first is twice as fast. The work is divided in this ratio, exactly. 2:1/3:1 if attention "
    "is three times as fast there. Empty: equal shares; pipe and a stale ring measure."
)
OFF = "off"
DEGREES = "degrees"
"""The mode in which the other inputs are the layout. A prompt without a mode has it."""
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(AXES, 1), "shard_weights": False, "stale": OFF, "patches": 0, "warmup": 1, "balance": ""
}  # fmt: skip
"""The other inputs, as they have to be in the other modes."""


def _inputs() -> list[Any]:
    """Return the inputs. All are optional: ComfyUI's page puts optional inputs last, and the mode comes first."""
    stale = [OFF, *STALE[1:]]
    modes = [*MODES, DEGREES]
    # The oldest tested ComfyUI has no argument for advanced inputs, but its page reads it.
    shown: dict[str, Any] = {"optional": True, "extra_dict": {"advanced": True}}
    degree = {"default": 1, "min": 1, "max": 64, **shown}
    return [
        io.Combo.Input("mode", options=modes, default=AUTO, tooltip=MODE_TOOLTIP, optional=True),
        *(io.Int.Input(axis, tooltip=tooltip, **degree) for axis, tooltip in DEGREE_TOOLTIPS.items()),
        io.Boolean.Input("shard_weights", default=False, tooltip=SHARD_TOOLTIP, **shown),
        io.Combo.Input("stale", options=stale, default=OFF, tooltip=STALE_TOOLTIP, **shown),
        io.Int.Input("patches", default=0, min=0, max=4096, tooltip=PATCHES_TOOLTIP, **shown),
        io.Int.Input("warmup", default=1, min=0, max=10000, tooltip=WARMUP_TOOLTIP, **shown),
        io.String.Input("balance", default="", tooltip=BALANCE_TOOLTIP, **shown),
    ]


class ParallelLayoutNode(io.ComfyNode):  # type: ignore[misc]
    """A mode, or one degree per axis, whose product is the number of ranks used."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelLayout",
            display_name="Parallel Layout",
            category="Parallel DiT",
            description="Chooses how the ranks share the work: by a mode, or by degrees, whose product is the number "
            "of ranks used.",
            inputs=_inputs(),
            outputs=[LayoutType.Output(display_name="layout", tooltip="For the layout input of Parallel Loader.")],
        )

    @classmethod
    @override
    def validate_inputs(
        cls, mode: str | None = DEGREES, data: Degree = 1, cfg: Degree = 1, pipe: Degree = 1, ring: Degree = 1,
        ulysses: Degree = 1, dsp: Degree = 1, tensor: Degree = 1, shard_weights: bool | None = False,
        stale: str | None = OFF, patches: int | None = 0, warmup: int | None = 1, balance: str | None = "",
    ) -> bool | str:  # fmt: skip
        """Return why the layout cannot work, or True. ComfyUI calls this when the prompt is queued.

        Because the inputs are named here, ComfyUI leaves their check to this method and shows its sentence. A linked
        input is None here and is checked when the node runs.
        """
        degrees = dict(zip(AXES, (data, cfg, pipe, ring, ulysses, dsp, tensor), strict=True))
        options = {
            "shard_weights": shard_weights, "stale": stale, "patches": patches, "warmup": warmup, "balance": balance
        }  # fmt: skip
        try:
            _check(mode, degrees | options)
        except InvalidRequest as error:
            return str(error)
        return True

    @classmethod
    @override
    def execute(
        cls, mode: str | None = DEGREES, data: int = 1, cfg: int = 1, pipe: int = 1, ring: int = 1, ulysses: int = 1,
        dsp: int = 1, tensor: int = 1, shard_weights: bool = False, stale: str = OFF, patches: int = 0,
        warmup: int = 1, balance: str = "",
    ) -> io.NodeOutput:  # fmt: skip
        """Return the mode, or the validated layout."""
        inputs = dict(zip(AXES, (data, cfg, pipe, ring, ulysses, dsp, tensor), strict=True))
        degrees = {axis: as_int(degree, f"layout {axis}") for axis, degree in inputs.items()}
        options: dict[str, Any] = {
            "shard_weights": bool(as_int(shard_weights, "layout shard_weights")),
            "stale": stale,
            "patches": as_int(patches, "layout patches"),
            "warmup": as_int(warmup, "layout warmup"),
            "balance": balance,
        }
        if mode not in (None, DEGREES):
            return io.NodeOutput(_mode(mode, degrees | options))
        return io.NodeOutput(_layout(degrees, **options))


def _check(mode: str | None, given: Mapping[str, Any]) -> None:
    """Check the inputs as far as they are known: a linked one is None.

    Raises:
        InvalidRequest: they contradict each other or are out of range.
    """
    degrees = {axis: given[axis] for axis in AXES if given[axis] is not None}
    if mode not in (None, DEGREES):
        _mode(mode, given)
    elif mode and None not in given.values():
        _layout(degrees, **{name: value for name, value in given.items() if name not in AXES})
    elif mode:
        _layout(degrees)


def _mode(name: Any, given: Mapping[str, Any]) -> LayoutMode:
    """Return what stands for a layout.

    Raises:
        InvalidRequest: there is no such mode, or another input would have no effect.
    """
    if name not in MODES:
        raise InvalidRequest(f"layout mode {name!r}: choose one of {', '.join([*MODES, DEGREES])}")
    for each, value in given.items():
        if value != DEFAULTS[each]:
            state = "linked" if value is None else value
            raise InvalidRequest(
                f"layout {each} is {state}, and mode {name!r} chooses it: set mode to {DEGREES!r}, or {each} to "
                f"{DEFAULTS[each] or repr(DEFAULTS[each])}"
            )
    return LayoutMode(name=name)


def _layout(
    degrees: dict[str, Any], shard_weights: bool = False, stale: str = OFF, patches: int = 0, warmup: int = 1,
    balance: str = "",
) -> ParallelLayout:  # fmt: skip
    """Return the layout of the node's inputs.

    Raises:
        InvalidRequest: the inputs contradict each other or are out of range.
    """
    speeds, attention = parse_balance(balance)
    return ParallelLayout(
        **degrees, shard_weights=shard_weights, stale="" if stale == OFF else stale, patches=patches, warmup=warmup,
        balance=speeds, attention_balance=attention,
    )  # fmt: skip
