"""What is said over the socket: one frozen dataclass a message, listed in ``MESSAGES``.

Tensors travel beside a message by name (see ``wire``); each docstring lists them with their shapes.
"""

import uuid
from dataclasses import dataclass, field
from typing import Literal

from ..layout.parallel_layout import ParallelLayout

DType = Literal["auto", "float32", "bfloat16", "float16"]
Collectives = Literal["nccl", "gloo"]


def new_id() -> str:
    """A fresh request id."""
    return uuid.uuid4().hex


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Which devices hold ranks: GPU indices, or for ``cpu`` simply how many ranks there are.

    ``visible`` is the ``CUDA_VISIBLE_DEVICES`` that the indices count in, where it is set. ``collectives`` is what
    ranks on GPUs talk through; those on the CPU always do through gloo.
    """

    kind: Literal["cuda", "cpu"]
    indices: tuple[int, ...]
    visible: str | None = None
    collectives: Collectives = "nccl"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that identifies a loaded model. It is the handle: a backend that lost the model reloads it.

    ``layout=None`` is ``auto``. Weights are shared between layouts that keep them whole. ``stamp`` is
    ``Checkpoint.stamp``: with other files in the folder it is another model. ``attention`` is a name in
    ``kernels.KERNELS``, or ``auto``.
    """

    path: str
    stamp: str = ""
    dtype: DType = "auto"
    devices: Devices
    layout: ParallelLayout | None = None
    attention: str = "auto"


@dataclass(frozen=True, kw_only=True)
class RankRequest:
    """Base of the requests that ranks carry out."""

    model: ModelSpec
    request_id: str = field(default_factory=new_id)


@dataclass(frozen=True, kw_only=True)
class Forward(RankRequest):
    """One denoiser call for all branches (cond, uncond, ...), split over ``data`` and ``cfg``.

    Tensors in: ``{i}.{name}`` for branch ``i``, with the argument names of the family's diffusers class, batch
    first (Wan: ``hidden_states`` ``[B, C, T, H, W]``, ``timestep`` ``[B]``, ``encoder_hidden_states`` ``[B, L, D]``).
    Branches may differ in every shape.
    Tensors out: ``{i}`` ``[B, C, T, H, W]``, the raw prediction of branch ``i`` in the model's dtype; with
    ``measure`` also ``sent_bytes`` ``[ranks of the layout]`` int64, what each rank sent to others for it; with
    either also ``seconds`` ``[1]``, what it took the ranks, to which counting adds where ``measure`` is set.
    """

    branches: int
    measure: bool = False
    timed: bool = False


@dataclass(frozen=True, kw_only=True)
class Sample(RankRequest):
    """A whole step loop, on sigmas, noise and conditioning that come from ComfyUI's own functions.

    Tensors in: ``x`` ``[B, C, T, H, W]`` float32, the noised start; ``sigmas`` ``[steps + 1]`` float32;
    ``{i}.{name}`` as in ``Forward`` without the latent and the timestep.
    For inpainting also ``mask`` and ``latent``, shaped to broadcast with ``x``, and ``noise`` where what is kept is
    noised as the rest (``scale_latent_inpaint`` of most models).
    Branch 0 is the conditional one, branch 1 the unconditional one, which ``cfg=1`` leaves out.
    A flow model (``prediction="flow"``) sees a sigma as the timestep ``sigma * timestep_scale`` (ComfyUI's
    ``ModelSamplingDiscreteFlow.timestep``), one of ``"eps"`` or ``"v"`` as its place in ``log_sigmas`` ``[N]``, a
    tensor that it needs (``ModelSamplingDiscrete.timestep``); so a sampler may ask for sigmas between those given.
    Progress carries ``preview`` ``[1, C, 1, H, W]`` (the predicted x0 of the first item's first frame; of an image
    ``[1, C, H, W]``) if asked for.
    Tensors out: ``samples`` ``[B, C, T, H, W]`` float32, as the last step leaves them (ComfyUI's
    ``inverse_noise_scaling`` is the caller's); with ``measure`` or ``timed`` also what ``Forward`` says of them, over
    the whole loop.
    """

    branches: int
    sampler: str
    cfg: float
    prediction: Literal["flow", "eps", "v"] = "flow"
    timestep_scale: float = 1000.0
    previews: bool = False
    measure: bool = False
    timed: bool = False


@dataclass(frozen=True, kw_only=True)
class EncodeText(RankRequest):
    """Run the text encoder.

    ``layer`` counts back from the end as ComfyUI's CLIPSetLastLayer does: -1 is the last layer; a layer that is not
    there means the last one, too. The output of any layer is normalised as the last one's.
    Tensors in: ``ids`` ``[N, L]`` int64 and ``lengths`` ``[N]`` int64 (ids beyond a length are ignored).
    Tensors out: ``embeds`` ``[N, L, D]`` float32, zero beyond each length.
    """

    layer: int = -1


@dataclass(frozen=True, kw_only=True)
class Decode(RankRequest):
    """Run the VAE's decoder, on all devices of the model together.

    ``tile`` is the height and width in pixels of tiles that are decoded by themselves, each on one rank, and blended,
    which is approximate; 0 decodes the whole, exactly. ``clamp=False`` leaves pixels as the VAE gives them, around
    -1..1.
    Tensors in: ``latent`` ``[B, C, T, H, W]``, or ``[B, C, H, W]`` of pictures.
    Tensors out: ``pixels`` ``[B, T, H, W, 3]``, or ``[B, H, W, 3]``, float32 in 0..1; with ``measure`` also
    ``sent_bytes`` and ``grown_bytes`` ``[ranks]`` int64, what each rank sent to others, and what it held at most beyond
    what it had held before; with either also ``seconds`` ``[1]``, as ``Forward`` has them.
    """

    tile: int = 0
    clamp: bool = True
    measure: bool = False
    timed: bool = False


@dataclass(frozen=True, kw_only=True)
class Encode(RankRequest):
    """Run the VAE's encoder, on all devices of the model together.

    ``tile`` is as ``Decode`` has it.
    Tensors in: ``pixels`` ``[B, T, H, W, 3]``, or ``[B, H, W, 3]`` of pictures, in 0..1.
    Tensors out: ``latent`` ``[B, C, T, H, W]``, or ``[B, C, H, W]``, float32; with ``measure`` or ``timed`` also what
    ``Decode`` says of them.
    """

    tile: int = 0
    measure: bool = False
    timed: bool = False


@dataclass(frozen=True, kw_only=True)
class Unload(RankRequest):
    """Free the weights that the model has in its dtype, on all ranks. Starts no rank for it."""


@dataclass(frozen=True, kw_only=True)
class Echo(RankRequest):
    """The wire's self test: passes every rank as any request does, and touches no model.

    Tensors in: any. Tensors out: the same, and ``made`` ``[make]`` float32 where ``make`` is above 0.
    ``Progress("reply", 0, 1)`` comes just before the tensors do.
    """

    make: int = 0


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Take a queued request back, or end a running one at its next step."""

    request_id: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Ask what became of a request whose connection broke. Answered with ``Error`` or ``Done``."""

    request_id: str


@dataclass(frozen=True, kw_only=True)
class StatusQuery:
    """Ask for a ``Status``."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """End the ranks and the supervisor."""


@dataclass(frozen=True, kw_only=True)
class Continue:
    """Rank 0 holds the connection now, and takes the bytes of the tensors that the request announced."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A request finished; its tensors follow."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """``value`` of ``total`` steps are done; ``phase`` says what is being done.

    Before the ranks take a request up, the supervisor reports ``accepted`` or ``queued`` (``total`` requests
    are ahead) at once, then ``queued`` or ``start`` (the ranks are being started) again and again as a sign of
    life. ``loading`` says that rank 0 loads weights, and with a ``value`` of 1 that it has loaded them.
    ``note`` is for the user: how it is done, where that is other than one would expect.
    """

    phase: str
    value: int
    total: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Error:
    """A typed error; see ``errors``."""

    code: str
    message: str


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model whose weights a rank holds. ``parts`` are component names, ``loads`` counts weight loads, ``note`` says
    what is other than one would expect."""

    path: str
    dtype: str
    parts: tuple[str, ...]
    loads: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank as the process table and the rank itself see it. Memory in bytes."""

    rank: int
    pid: int
    device: str
    memory: int
    device_memory: int = 0
    models: tuple[LoadedModel, ...] = ()
    steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Status:
    """The backend at one moment. ``layout`` is that of the running or the last request."""

    pid: int
    protocol: int
    generation: int
    state: Literal["idle", "starting", "busy", "stopping"]
    running: str | None
    queued: tuple[str, ...]
    layout: ParallelLayout | None
    idle_timeout: float
    memory: int
    ranks: tuple[RankStatus, ...]


MESSAGES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        Forward, Sample, EncodeText, Decode, Encode, Unload, Echo,
        Cancel, Outcome, StatusQuery, Stop, Continue, Done, Progress, Error, Status,
    )
}  # fmt: skip
"""Every message by the name it has on the wire."""
