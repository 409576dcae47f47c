"""The node that replaces *Load Checkpoint*."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comfy_api.latest import io
from typing_extensions import override

from ..parallel_backend import env
from ..parallel_backend.attention.kernels import AUTO, KERNELS
from ..parallel_backend.checkpoint.checkpoint import Checkpoint
from ..parallel_backend.checkpoint.opening import open_checkpoint
from ..parallel_backend.checkpoint.single_file import SingleFile
from ..parallel_backend.errors import InvalidRequest
from ..parallel_backend.layout import modes
from ..parallel_backend.layout.parallel_layout import ParallelLayout
from ..parallel_backend.layout.suggestions import check_fits
from ..parallel_backend.protocol.model_spec import Compile, Devices, DType, ModelSpec
from ..parallel_backend.vaes import vae_of
from .backend import checkpoints
from .backend.connection import Handle
from .backend.devices import content_for, expect_ranks, parse_devices
from .backend.queued_checks import refusal_by
from .bridges.announcements import Part, besides_the_model, flags_without_effect
from .bridges.bridge import BackendText, Bridge
from .bridges.compute_dtype import auto_dtype, auto_vae_dtype
from .bridges.left_over import left_over
from .families.registry import bridge_for
from .layout import GivenLayout, LayoutType
from .remote.clip import checkpoint_clip
from .remote.model import parallel_model
from .remote.patcher import remote_patcher
from .remote.preflight import VAE_OUTPUT, check_output, check_prompt
from .remote.vae import RemoteVAE

DTYPES: dict[str, DType] = {"auto": "auto", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

DEVICES_TOOLTIP = (
    "all, or a list of GPU numbers such as 0,1. Without GPUs, all starts two CPU ranks, and 0,1,2 starts three."
)
LAYOUT_TOOLTIP = (
    "How the ranks share the work, from Parallel Layout, which overrides mode. If not connected, mode decides."
)
ATTENTION_TOOLTIP = (
    "The attention kernel. auto: the fastest exact one for the GPU and the model, of the FlashAttention package if it "
    "is installed, cuDNN and torch's own. sage is faster and not exact."
)

COMPILES = ["off", "blocks"]
COMPILE_TOOLTIP = (
    "blocks: the ranks compile the model's blocks with torch.compile. The first step takes a minute or more; "
    "later ones can be faster. It needs a C++ compiler, and on GPUs Triton."
)

MODE_TOOLTIP = (
    "What decides the layout if none is connected. The ranks measure themselves for a few seconds, once for a model "
    "and a size, and predict. auto: the fastest layout, and a fixed rule for small models. fastest: the fastest of "
    "those tried in the first steps. fit memory: the least memory. fit memory over slow links: the fewest bytes "
    "between slow links. allow approximate: the fastest, approximate layouts included."
)


def open_model(
    model_name: str,
    dtype: str,
    devices: str,
    layout: GivenLayout,
    node_id: str | None = None,
    attention: str = AUTO,
    compile: Compile = "off",  # the input's name
    mode: str = modes.AUTO,
) -> Handle:
    """Check everything that can be checked without weights, and return the model's handle.

    Raises:
        InvalidRequest: the checkpoint, dtype, devices or layout cannot work; the sentence says why.
    """
    path = checkpoints.path_of(model_name)
    return handle_for(path, dtype, devices, layout, node_id, attention, compile=compile, mode=mode)


def _layout_of_mode(ranks: int) -> ParallelLayout | None:
    """Return the layout where none is connected; None lets the ranks choose."""
    share = ranks > 1 and env.MODE.get() == "memory"
    return ParallelLayout(ulysses=ranks, shard_weights=True) if share else None


def handle_for(
    path: Path,
    dtype: str,
    devices: str,
    layout: GivenLayout,
    node_id: str | None = None,
    attention: str = AUTO,
    keeps: object = None,
    compile: Compile = "off",
    mode: str = modes.AUTO,
) -> Handle:
    """Do what ``open_model`` does for a path. The handle keeps ``keeps`` alive."""
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    if isinstance(layout, modes.LayoutMode):
        mode, layout = mode if layout.name == modes.AUTO else layout.name, None
    mode = modes.LayoutMode(name=mode).name
    checkpoint = open_checkpoint(path)
    bridge = bridge_for(checkpoint)
    left_over(bridge)  # refuses what ComfyUI takes for another model
    resolved = parse_devices(devices)
    if layout is None and mode == modes.AUTO:
        layout = _layout_of_mode(len(resolved.indices))
    if layout is not None:
        check_fits(layout, len(resolved.indices))
        layout = _with_patches(layout, bridge)
    spec = ModelSpec(
        path=str(checkpoint.path),
        stamp=checkpoint.stamp(),
        dtype=auto_dtype(bridge, resolved) if dtype == AUTO else DTYPES[dtype],
        devices=resolved,
        layout=layout,
        attention=attention,
        compile=compile,
        mode="" if layout else mode,
        content=content_for(checkpoint, resolved),
    )
    return Handle(spec=spec, checkpoint=checkpoint, node_id=node_id, keeps=keeps)


def _with_patches(layout: ParallelLayout, bridge: Bridge) -> ParallelLayout:
    """Return the layout with the one patch that models of several latents take, unless it names a number of patches."""
    several = layout.pipe > 1 and len(bridge.latents) > 1
    return replace(layout, patches=layout.patches or 1) if several else layout


def open_vae(path: Path, devices: str, node_id: str, keeps: object = None) -> Handle:
    """Check a file with a VAE, and return its handle, which keeps ``keeps`` alive.

    Raises:
        InvalidRequest: the file or the devices cannot work; the sentence says why.
    """
    checkpoint = open_checkpoint(path)
    checkpoint.check_known("vae")
    if "vae" not in checkpoint.components:
        raise InvalidRequest(
            f"{checkpoint.name} holds no VAE (its parts: {', '.join(checkpoint.components)}): choose a file with one"
        )
    vae_of(checkpoint)
    _check_core_has(checkpoint)
    resolved = parse_devices(devices)
    spec = ModelSpec(
        path=str(checkpoint.path),
        stamp=checkpoint.stamp(),
        dtype=_model_dtype(checkpoint, resolved),
        devices=resolved,
        layout=None,
        content=content_for(checkpoint, resolved),
    )
    return Handle(spec=spec, checkpoint=checkpoint, node_id=node_id, keeps=keeps)


_NEWER = {"AutoencoderKLMiniMaxH3": ("comfy.ldm.minimax", "MiniMax-H3", "0.30.0")}
"""VAEs that older versions of ComfyUI lack: its package, the model, and the version that has it first."""


def _check_core_has(checkpoint: Checkpoint) -> None:
    """Refuse a VAE that this version of ComfyUI does not have.

    Raises:
        InvalidRequest: names the version that does.
    """
    package, model, version = _NEWER.get(checkpoint.components["vae"], ("comfy.sd", "", ""))
    if find_spec(package) is None:
        raise InvalidRequest(
            f"{checkpoint.name}: this version of ComfyUI has no {model}; ComfyUI {version} and newer have it"
        )


def _model_dtype(checkpoint: Checkpoint, devices: Devices) -> DType:
    """Return the dtype of the MODEL in a VAE's file, whose entry in the ranks the VAE shares."""
    try:
        return auto_dtype(bridge_for(checkpoint), devices)
    except InvalidRequest:  # no MODEL can come from this file
        return "float32"


def told_of_file(bridge: Bridge) -> str:
    """Return what a node says about a file that holds more than its model, or less than its name says."""
    checkpoint = bridge.checkpoint
    missing = checkpoint.missing_part if isinstance(checkpoint, SingleFile) else None
    return besides_the_model(checkpoint.name, left_over(bridge), missing.name if missing else "")


def _run_by_ranks(bridge: Bridge) -> list[Part]:
    """Return the outputs of Parallel Loader that the ranks run."""
    vae: list[Part] = ["vae"] if bridge.vae else []
    encodes = isinstance(bridge.text, BackendText) and "text_encoder" in bridge.checkpoint.components
    text: list[Part] = ["text encoder"] if encodes else []
    return ["model", *vae, *text]


def _inputs() -> list[Any]:
    return [
        io.Combo.Input(
            "model_name",
            options=checkpoints.listed_names(),
            tooltip="The shipped checkpoint, a folder in diffusers layout under models/diffusers, or a safetensors or "
            "GGUF file under models/diffusion_models or models/checkpoints.",
        ),
        io.Combo.Input(
            "dtype",
            options=list(DTYPES),
            default="auto",
            tooltip="Data type of the weights. auto: the one that ComfyUI itself would compute in. The VAE has the one "
            "that ComfyUI's own VAE would have.",
        ),
        io.String.Input("devices", default="all", tooltip=DEVICES_TOOLTIP),
        LayoutType.Input("layout", optional=True, tooltip=LAYOUT_TOOLTIP),
        io.Combo.Input("attention", options=[AUTO, *KERNELS], default=AUTO, optional=True, tooltip=ATTENTION_TOOLTIP),
        io.Combo.Input("compile", options=COMPILES, default="off", optional=True, tooltip=COMPILE_TOOLTIP),
        io.Combo.Input("mode", options=[*modes.MODES], default=modes.AUTO, optional=True, tooltip=MODE_TOOLTIP),
    ]


class ParallelLoader(io.ComfyNode):  # type: ignore[misc]
    """Outputs a MODEL, a CLIP and a VAE that run on several ranks. Weights load at their first use."""

    @classmethod
    @override
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelLoader",
            display_name="Parallel Loader",
            category="Parallel DiT",
            description="Loads a diffusion transformer on several GPUs. Its outputs work with ComfyUI's sampling, text "
            "and VAE nodes.",
            inputs=_inputs(),
            outputs=[
                io.Model.Output(tooltip="For KSampler and every other sampling node, and for Parallel Sampler."),
                io.Clip.Output(tooltip="For CLIPTextEncode."),
                io.Vae.Output(tooltip="For VAEDecode, VAEEncode, Parallel VAE Decode and Parallel VAE Encode."),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.dynprompt],
        )

    @classmethod
    @override
    async def validate_inputs(cls, model_name: Any = None, dtype: Any = "auto", devices: Any = "all") -> bool | str:
        """Return why the inputs cannot work, or True.

        ComfyUI calls this when the prompt is queued, before any node runs. It checks linked inputs when
        the node runs.
        """
        if model_name is None:
            return True
        return await refusal_by(open_model, model_name, dtype or "auto", devices or "all", None)

    @classmethod
    @override
    def fingerprint_inputs(cls, model_name: Any = None, devices: Any = None, **_: Any) -> str:
        """Return a stamp of the model's files, so that the node runs again when they change."""
        expect_ranks(devices)
        return checkpoints.stamp(model_name) if model_name else ""

    @classmethod
    @override
    def execute(
        cls,
        model_name: str,
        dtype: str,
        devices: str,
        layout: GivenLayout = None,
        attention: str = AUTO,
        compile: Compile = "off",
        mode: str = modes.AUTO,
    ) -> io.NodeOutput:
        """Check everything that can be checked without weights, and return the three outputs."""
        shown_on = cls.hidden.dynprompt.get_display_node_id(cls.hidden.unique_id)
        handle = open_model(model_name, dtype, devices, layout, shown_on, attention, compile, mode)
        check_prompt(cls.hidden.prompt or {}, cls.hidden.unique_id, handle)
        handle.keep_weights()
        bridge = bridge_for(handle.checkpoint)
        said = [flags_without_effect(*_run_by_ranks(bridge)), told_of_file(bridge)]
        state = "; ".join(filter(None, ["weights load at first use", *said]))
        handle.show(state)
        model = remote_patcher(parallel_model(handle, bridge))
        vae_dtype: DType = auto_vae_dtype(bridge.vae, handle.spec.devices) if bridge.vae else "auto"
        check_vae = partial(check_output, handle.checkpoint, VAE_OUTPUT)
        return io.NodeOutput(
            model,
            checkpoint_clip(handle, bridge.text, model),
            RemoteVAE(handle, bridge.latent_scale(), model, vae_dtype, check_vae),
            ui={"text": (handle.describe(state),)},
        )
