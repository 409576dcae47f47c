"""The node that makes the MODEL of any workflow parallel."""

from typing import Any

from comfy_api.latest import io
from typing_extensions import override

from ..parallel_backend.attention.kernels import AUTO, KERNELS
from ..parallel_backend.errors import InvalidRequest
from ..parallel_backend.layout import modes
from ..parallel_backend.protocol.model_spec import Compile
from .backend.devices import expect_ranks, parse_devices
from .backend.queued_checks import refusal_by
from .bridges.announcements import flags_without_effect
from .families.registry import bridge_for
from .layout import GivenLayout, LayoutType
from .loader import (
    ATTENTION_TOOLTIP,
    COMPILE_TOOLTIP,
    COMPILES,
    DEVICES_TOOLTIP,
    LAYOUT_TOOLTIP,
    MODE_TOOLTIP,
    handle_for,
    open_model,
    told_of_file,
)
from .remote.adopt import COPY_TEXT, adopt, copy_model, fill_copy, source_file
from .remote.memory_file import MemoryFile
from .remote.model import parallel_model
from .remote.patcher import RemotePatcher, remote_patcher
from .remote.preflight import check_prompt
from .remote.upstream import (
    check_upstream,
    describe_reading,
    find_upstream,
    rebuild,
    remember_source,
    source_changes,
)


class ParallelModel(io.ComfyNode):  # type: ignore[misc]
    """Stands behind a loader, and behind nodes that patch its MODEL. Outputs the same MODEL on several ranks."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelModel",
            display_name="Parallel Model",
            category="Parallel DiT",
            description="Makes a workflow parallel: put it between the model's loader and the sampler. Bypass it to "
            "run the same workflow on one GPU.",
            inputs=[
                io.Model.Input(
                    "model",
                    lazy=True,
                    tooltip="From Load Diffusion Model or Load Checkpoint, also through ModelSampling and other nodes: "
                    "ComfyUI does not load the file if nothing else uses it. Behind other loaders, the weights are "
                    "copied into memory once.",
                ),
                io.String.Input("devices", default="all", tooltip=DEVICES_TOOLTIP),
                LayoutType.Input("layout", optional=True, tooltip=LAYOUT_TOOLTIP),
                io.Combo.Input(
                    "attention", options=[AUTO, *KERNELS], default=AUTO, optional=True, tooltip=ATTENTION_TOOLTIP
                ),
                io.Combo.Input("compile", options=COMPILES, default="off", optional=True, tooltip=COMPILE_TOOLTIP),
                io.Combo.Input("mode", options=[*modes.MODES], default=modes.AUTO, optional=True, tooltip=MODE_TOOLTIP),
            ],
            outputs=[io.Model.Output(tooltip="For KSampler and every other sampling node, and for Parallel Sampler.")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.dynprompt],
            enable_expand=True,
        )

    @classmethod
    @override
    async def validate_inputs(cls, devices: Any = "all") -> bool | str:
        """Return why the inputs cannot work, or True. ComfyUI calls this when the prompt is queued.

        A linked input is None here and is checked when the node runs.
        """
        return await refusal_by(parse_devices, devices or "all")

    @classmethod
    @override
    def fingerprint_inputs(cls, devices: Any = None, **_: Any) -> int:
        """Return how often the model's file has changed, so that the node runs again when it does."""
        expect_ranks(devices)
        return source_changes(cls.hidden.unique_id)

    @classmethod
    @override
    def check_lazy_status(cls, **_: Any) -> list[str]:
        """Ask for the MODEL only if its file does not follow from the prompt."""
        return [] if find_upstream(cls.hidden.dynprompt, cls.hidden.unique_id) else ["model"]

    @classmethod
    @override
    def execute(
        cls,
        model: Any = None,
        devices: str = "all",
        layout: GivenLayout = None,
        attention: str = AUTO,
        compile: Compile = "off",
        mode: str = modes.AUTO,
    ) -> io.NodeOutput:
        """Expand into Parallel Loader and copies of the nodes between, or take the MODEL that ComfyUI has loaded."""
        prompt, node_id = cls.hidden.dynprompt, cls.hidden.unique_id
        check_upstream(prompt, node_id)
        upstream = find_upstream(prompt, node_id)
        if upstream is None:
            remote, text = _from_loaded(model, devices, layout, attention, cls.hidden, compile, mode)
            return io.NodeOutput(remote, ui={"text": (text,)})
        name = upstream.model_name
        if name is not None:
            handle = open_model(name, "auto", devices, layout, node_id, attention, compile, mode)
            check_prompt(cls.hidden.prompt or {}, node_id, handle)
            remember_source(node_id, name)
        own = prompt.get_node(node_id)["inputs"]
        inputs = {key: own.get(key) for key in ("devices", "layout", "attention", "compile", "mode")}
        output, graph = rebuild(prompt, upstream, dtype="auto", **inputs)
        return io.NodeOutput(output, expand=graph, ui={"text": (describe_reading(prompt, upstream, node_id),)})


def _from_loaded(
    source: Any,
    devices: str,
    layout: GivenLayout,
    attention: str,
    hidden: Any,
    compile: Compile,
    mode: str,
) -> tuple[RemotePatcher, str]:
    """Return a parallel MODEL for one that ComfyUI has loaded, from its file or a copy of its weights, and a text.

    The weights are copied last, when everything else is known to work.
    """
    if isinstance(source, RemotePatcher):
        raise InvalidRequest("the model is parallel already: remove one of the two nodes")
    origin = source_file(source) or copy_model(source)
    path, name = (origin.path, COPY_TEXT) if isinstance(origin, MemoryFile) else (origin, origin.name)
    shown_on = hidden.dynprompt.get_display_node_id(hidden.unique_id)
    handle = handle_for(path, "auto", devices, layout, shown_on, attention, origin, compile, mode)
    check_prompt(hidden.prompt or {}, hidden.unique_id, handle)
    bridge = bridge_for(handle.checkpoint)
    remote = remote_patcher(parallel_model(handle, bridge))
    adopt(remote, source)
    if isinstance(origin, MemoryFile):
        fill_copy(origin)
    handle.keep_weights()
    said = [flags_without_effect("model"), told_of_file(bridge)]
    text = "; ".join(filter(None, [name, "weights load at first use", *said]))
    if source.model.model_config.optimizations.get("fp8"):  # ComfyUI would multiply matrices in fp8
        text += f"; the ranks compute in {handle.spec.dtype}, not in fp8"
    return remote, handle.describe(text)
