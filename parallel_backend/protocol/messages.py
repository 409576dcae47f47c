"""The messages on the socket: one frozen dataclass each, listed in ``MESSAGES``.

Named tensors follow a message (see ``frames``); its docstring lists them with their shapes.
"""

import uuid
from dataclasses import dataclass, field
from typing import Literal

from ..errors import InvalidRequest
from ..step_cache.settings import StepCache
from .hosts import JoinHost, OpenStore, StorePort
from .model_spec import Adapter, Devices, DType, ModelSpec, Overlay
from .origin import Origin
from .status import Status, StatusQuery

KEPT = "kept."
"""Prefix of the tensors of a progress that another request goes on with."""
CHANGING = ("hidden_states", "audio_hidden_states", "timestep")
"""The arguments of a branch that differ in each step: the latents and their time."""
HISTORY = "history."
"""Prefix of the tensors that a sampler remembers."""
POSITION = "position"
"""The tensor ``[2]`` int64 with the index of a ``Forward``'s step and the number of steps, where a cache needs them."""
FORECASTS = "forecasts"
"""The tensor ``[2]`` int64 with the number of model calls that were forecast, and of all calls."""


def new_id() -> str:
    """Create a random request id."""
    return uuid.uuid4().hex


MAX_ID = 64
"""Characters of a request id, which logs and the status show."""


@dataclass(frozen=True, kw_only=True)
class RankRequest:
    """Base class of the requests that the ranks run.

    A tensor of a ``Forward`` or a ``Sample`` may have a digest, and may equal an earlier one (``TensorMeta``).
    ``origin`` is the node that asks; None outside of a prompt.

    Raises:
        InvalidRequest: the id is empty, too long or not printable.
    """

    model: ModelSpec
    request_id: str = field(default_factory=new_id)
    origin: Origin | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.request_id) <= MAX_ID or not self.request_id.isprintable():
            raise InvalidRequest(f"request id {self.request_id!r}: must have 1 to {MAX_ID} printable characters")


Measure = Literal["", "seconds", "bytes"]
"""What a reply says of its work: nothing, its seconds, or also the bytes that it sent."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRequest(RankRequest):
    """Base class of the requests whose work can be measured, if they ask for it.

    Tensors out, besides its own: unless ``measure`` is empty, ``seconds`` ``[1]``, the ranks' computing time without
    loading. With ``"bytes"``, which makes it slower, also ``sent_bytes`` ``[ranks of the layout]`` int64: what each
    rank sent to others.
    """

    measure: Measure = ""


@dataclass(frozen=True, kw_only=True)
class Forward(MeasuredRequest):
    """One denoiser call for all branches (cond, uncond, ...), split over ``data`` and ``cfg``.

    Tensors in: ``{i}.{name}`` for branch ``i``, with the argument names of the family's diffusers class, batch
    first (Wan: ``hidden_states`` ``[B, C, T, H, W]``, ``timestep`` ``[B]``, ``encoder_hidden_states`` ``[B, L, D]``).
    Branches may differ in every shape. ``adapters`` has the LoRAs of each branch, and is empty if there are none.
    ``skipped`` holds, for each branch, the numbers of the blocks that it leaves out, counted over the blocks that have
    weights. It is empty if all branches run all blocks.
    Tensors out: ``{i}`` ``[B, C, T, H, W]``, the raw prediction of branch ``i`` in the model's dtype. Of a family that
    predicts several latents it is ``[B, 1, values]``: all of them, flat, one after another.
    Without ``adapt``, a device without room for the weights is a ``NoRoom``. With it, layout ``auto`` lets the ranks
    share them then, and blocks stream from the machine's memory if that is not enough.
    With ``steps``, rank 0 may leave the connection open after its reply, for a ``Step``.
    With ``cache``, the ranks may forecast the predictions from those of earlier requests that differ in latents, times
    and ``POSITION``, which is then one of the tensors in, and have the same ``sampling``, which tells samplings with a
    cache apart. ``FORECASTS`` is one of the tensors out, of this request.
    """

    branches: int
    steps: bool = False
    cache: StepCache | None = None
    sampling: str = ""
    skipped: tuple[tuple[int, ...], ...] = ()
    adapters: tuple[tuple[Adapter, ...], ...] = ()
    overlay: Overlay | None = None
    adapt: bool = True


@dataclass(frozen=True, kw_only=True)
class Step:
    """To rank 0, on a connection that it has left open: the same ``Forward`` with other latents and times.

    Tensors in: those of the ``Forward`` whose arguments are ``CHANGING``, and ``POSITION`` if it has one. Their bytes
    follow the header at once.
    """


@dataclass(frozen=True, kw_only=True)
class Sample(MeasuredRequest):
    """A whole step loop, on sigmas, noise and conditioning from ComfyUI's own functions.

    Tensors in: ``x`` ``[B, C, T, H, W]`` float32, the noised start; ``sigmas`` ``[steps + 1]`` float32;
    ``{i}.{name}`` as in ``Forward``, without the latent and the timestep.
    For inpainting also ``mask`` and ``latent``, broadcastable with ``x``, and ``noise`` if the preserved region is
    noised like the rest (``scale_latent_inpaint`` of most models).
    Branch 0 is conditional. Branch 1 is unconditional and absent with ``cfg=1``.
    A flow model (``prediction="flow"``) gets a sigma as the timestep ``sigma * timestep_scale`` (ComfyUI's
    ``ModelSamplingDiscreteFlow.timestep``). An ``"eps"`` or ``"v"`` model gets its position in ``log_sigmas`` ``[N]``,
    an extra tensor (``ModelSamplingDiscrete.timestep``), so a sampler may also use sigmas between those of ``sigmas``.
    Samplers that draw noise seed it with ``seed`` and scale it by ``noise_scale``. ``noise_device`` is the kind of
    device on which ComfyUI would draw: the same seed gives other numbers on the CPU than on a GPU. ``first_sigma``
    replaces a first sigma of 1 of a flow model where a sampler needs its signal-to-noise ratio (ComfyUI's
    ``offset_first_sigma_for_snr``).
    With ``keep``, progress of each step but the last carries the tensors with which another request can continue. Their
    names are the other request's names with the prefix ``kept.``. In that request ``first_step`` is the progress's
    ``value``, ``x`` is the noised latent with which that step begins, and ``history.{n}`` is what the sampler
    remembers. Without ``history.{n}``, multistep samplers begin anew. Pipelines keep no history. Nothing is kept where
    ``data`` exceeds B.
    With ``previews``, progress carries ``preview`` ``[1, C, 1, H, W]``, or ``[1, C, H, W]`` for an image: the predicted
    x0 of the first item's first frame. ``adapters`` has the LoRAs of all branches. For ``adapt`` see ``Forward``.
    A family that predicts several latents gets ``x``, ``mask``, ``latent`` and ``noise`` packed, ``[B, 1, values]``.
    ``latent_shapes`` then has their shapes without B, and the preview is the first one's.
    With ``cache``, the ranks forecast some predictions from earlier ones, and ``FORECASTS`` is one of the tensors out.
    A loop that begins later than with its first step has none of these at first.
    Tensors out: ``samples`` ``[B, C, T, H, W]`` float32, as the last step leaves them (the caller applies ComfyUI's
    ``inverse_noise_scaling``).
    """

    branches: int
    sampler: str
    cfg: float
    prediction: Literal["flow", "eps", "v"] = "flow"
    timestep_scale: float = 1000.0
    seed: int = 0
    noise_scale: float = 1.0
    noise_device: Literal["cpu", "cuda"] = "cpu"
    first_sigma: float = 1.0
    first_step: int = 0
    keep: bool = False
    previews: bool = False
    cache: StepCache | None = None
    latent_shapes: tuple[tuple[int, ...], ...] = ()
    adapters: tuple[Adapter, ...] = ()
    overlay: Overlay | None = None
    adapt: bool = True


@dataclass(frozen=True, kw_only=True)
class EncodeText(RankRequest):
    """Run the text encoder.

    ``layer`` counts from the end like ComfyUI's CLIPSetLastLayer: -1 is the last layer, and a layer that does not
    exist also means the last one. The output of any layer is normalised like the last layer's.
    Tensors in: ``ids`` ``[N, L]`` int64 and ``lengths`` ``[N]`` int64 (ids beyond a length are ignored).
    ``adapters`` and ``overlay`` change its weights.
    Tensors out: ``embeds`` ``[N, L, D]`` float32, zero beyond each length.
    """

    layer: int = -1
    adapters: tuple[Adapter, ...] = ()
    overlay: Overlay | None = None


@dataclass(frozen=True, kw_only=True)
class Decode(MeasuredRequest):
    """Run the VAE's decoder on all devices of the model together.

    ``tile`` is the height and width, in pixels, of tiles that single ranks decode separately and that are then blended,
    which is approximate; 0 decodes the whole latent exactly. The VAE's ``dtype`` does not depend on the model's.
    Tensors in: ``latent`` ``[B, C, T, H, W]``, or ``[B, C, H, W]`` for images.
    Tensors out: ``pixels`` ``[B, T, H, W, 3]``, or ``[B, H, W, 3]``, float32 in 0..1.
    """

    tile: int = 0
    dtype: DType = "auto"


@dataclass(frozen=True, kw_only=True)
class Encode(MeasuredRequest):
    """Run the VAE's encoder on all devices of the model together.

    ``tile`` and ``dtype`` have the same meaning as in ``Decode``.
    Tensors in: ``pixels`` ``[B, T, H, W, 3]``, or ``[B, H, W, 3]`` for images, in 0..1.
    Tensors out: ``latent`` ``[B, C, T, H, W]``, or ``[B, C, H, W]``, float32.
    """

    tile: int = 0
    dtype: DType = "auto"


@dataclass(frozen=True, kw_only=True)
class ReadWeights(RankRequest):
    """Read weights as the model's files hold them, decoded, for ComfyUI's own functions that change weights.

    ``component`` is a transformer or the text encoder, and ``names`` are ComfyUI's names of weights.
    Tensors in: ``shapes`` ``[bytes]`` uint8, the JSON of the shapes of all of its weights by ComfyUI's names.
    Tensors out: ``{i}``, weight ``i``, in its stored dtype if that is float32, float16 or bfloat16, and otherwise in
    float32. ``dtype`` ``[0]`` has the dtype in which the ranks hold weights.
    """

    component: str
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Unload(RankRequest):
    """Free the model's weights in its dtype, on all ranks. Never starts ranks.

    With ``only_cache``, keep the weights, and free only device memory that the ranks cache for later requests.
    """

    only_cache: bool = False


@dataclass(frozen=True, kw_only=True)
class Trial(RankRequest):
    """Try the connection from the client to the ranks, or the links between ranks, without a model.

    Ranks know the trial ``exchange``: each rank sends ``amount`` bytes to every other rank. Tensors out: ``latency``
    ``[1]``, seconds of an exchange of one number, and ``seconds`` ``[1]``, of a whole one. They also know ``probe``
    (``planner/probe.py``), and ranks of a lab know more.
    """

    name: str
    amount: int = 0


@dataclass(frozen=True, kw_only=True)
class Expect:
    """Prepare spare ranks at once, for a request on these devices that comes soon."""

    devices: Devices


@dataclass(frozen=True, kw_only=True)
class Cancel:
    """Remove a request from the queue, or end it at its next step if it runs."""

    request_id: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Ask how a request whose connection broke ended. The answer is ``Error`` or ``Done``."""

    request_id: str


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop the ranks and the supervisor."""


@dataclass(frozen=True, kw_only=True)
class Continue:
    """To a client: rank 0 has the connection, and is ready to receive the bytes of the request's tensors.

    If ``missing`` lists ids, rank 0 first needs ``Files`` with these files. ``kept`` lists the tensors that the ranks
    have from an earlier request, by their digests. The client leaves them out.
    """

    missing: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Files:
    """To rank 0: the files that ``Continue`` asks for (``request_files``). Tensors in: ``{id}`` ``[bytes]`` uint8."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A request succeeded; the tensors of its reply follow.

    If the connection stays ``open``, rank 0 waits for a ``Step``, until another request needs the ranks.
    """

    open: bool = False


@dataclass(frozen=True, kw_only=True)
class Progress:
    """``value`` of ``total`` steps of the phase ``phase`` are done.

    The supervisor reports ``accepted`` or ``queued`` (``total`` requests are ahead) at once. Until the ranks run the
    request, it repeats ``queued`` or ``start`` (the ranks are starting) as a keepalive. ``loading`` means that
    rank 0 loads weights, and with a ``value`` of 1 that it has loaded them.
    ``note`` tells the user about anything unexpected in how the phase is done.
    """

    phase: str
    value: int
    total: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Error:
    """An error of ``errors``, by its code. For ``not_started`` see ``RankFailed``."""

    code: str
    message: str
    not_started: tuple[int, ...] = ()


MESSAGES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        Forward, Sample, EncodeText, Decode, Encode, ReadWeights, Unload, Trial,
        Step, Expect, Cancel, Outcome, StatusQuery, Stop, Continue, Done, Progress, Error, Status, Files,
        JoinHost, OpenStore, StorePort,
    )
}  # fmt: skip
"""Every message by its name on the wire."""
