"""``predict``: the seconds of a prompt in a layout on some machine, and what they are made of."""

from dataclasses import dataclass
from math import inf

from ..interfaces.strategy import Strategy, Workload
from ..layout.parallel_layout import ParallelLayout
from ..layout.split import Split
from ..strategies import stage_cut
from ..strategies.batch import BatchSplit
from ..strategies.pipe import Pipe
from ..strategies.ring import Ring
from ..strategies.sequence import SequenceSplit
from ..strategies.sharded_weights import ShardedWeights
from ..strategies.tensor import TensorParallel
from .attending import attention
from .balancing import adapted
from .coding import decode_seconds
from .communication import Sent, exchanged
from .compute import interpolated, seconds
from .hardware.description import Device, Hardware
from .memory import Room, room
from .request import Prompt

_KERNELS_OF_EXCHANGE = 6
"""Operations that the host gives to a device for one exchange: packing, sending, waiting and unpacking."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One denoiser call on the slowest rank. All but ``host`` is seconds of the device, and they add up.

    Attributes:
        layers: matrix products, and what is between them.
        attention: attention that passes the seam.
        exchange: exchanges that nothing hides.
        streaming: waiting for weights from the machine's memory.
        host: what the host takes to ask for all of it, which it does meanwhile.
    """

    layers: float = 0.0
    attention: float = 0.0
    exchange: float = 0.0
    streaming: float = 0.0
    host: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the call."""
        return max(self.layers + self.attention + self.exchange + self.streaming, self.host)

    def hidden(self) -> "Step":
        """Return the same call if everything hides its exchanges that can."""
        left = max(0.0, self.exchange - self.layers - self.attention)
        return Step(
            layers=self.layers, attention=self.attention, exchange=left, streaming=self.streaming, host=self.host
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a layout would take.

    Attributes:
        layout: the layout.
        step: one call, all current.
        sampling: seconds of all calls.
        decoding: seconds of the VAE; None if it is not known.
        loading: seconds of reading the weights, once.
        sent: bytes that the busiest rank sends in a call.
        room: what it takes of memory.
    """

    layout: ParallelLayout
    step: Step
    sampling: float
    decoding: float | None
    loading: float
    sent: int
    room: Room

    @property
    def seconds(self) -> float:
        """Of a prompt whose model is loaded."""
        return self.sampling + (self.decoding or 0.0)


def predict(prompt: Prompt, layout: ParallelLayout, hardware: Hardware) -> Prediction:
    """Predict a prompt in a layout that works for it."""
    asked, layout = layout, adapted(layout, hardware)
    layers = prompt.layers(1)
    family = layers.family
    stages = stage_cut.sites(family, Split.of(layout).stages) if layout.pipe > 1 else ()
    workload = prompt.plan(layout).workload(prompt.dtype.itemsize, layers.parameters, stages)
    sent = exchanged(layout, workload, hardware)
    taken = room(prompt, layout, hardware, prompt.sizes)
    steps = [_step(prompt, layout, workload, rank, hardware, sent, taken) for rank in range(layout.ranks)]
    step = max(steps, key=lambda each: each.seconds)
    by_rank = map(sum, zip(*(each.by_rank for each in sent.values()), strict=True))
    return Prediction(
        layout=asked, step=step, sampling=_sampling(prompt, layout, step),
        decoding=decode_seconds(prompt, hardware), loading=taken.weights / hardware.files,
        sent=max(by_rank), room=taken,
    )  # fmt: skip


def _step(
    prompt: Prompt, layout: ParallelLayout, workload: Workload, rank: int, hardware: Hardware,
    sent: Sent, taken: Room,
) -> Step:  # fmt: skip
    place, device = layout.coordinates(rank), hardware.devices[rank]
    local = [(samples, extent) for samples, extent in workload.local_branches(layout, place) if samples]
    if not local:
        return Step()
    rows = sum(samples for samples, _ in local)
    batches = 1 if layout.pipe == 1 else rows
    batch = rows // batches
    extent = local[0][1]
    tokens = {name: workload.tokens_by_rank(layout, extent, name)[place["sequence"]] for name in extent.streams}
    work = prompt.layers(batch).work(tokens)
    share = 1.0
    if layout.pipe > 1:
        share = stage_cut.shares(prompt.layers(1).family, Split.of(layout).stages)[place["pipe"]]
    faster = device.alone if layout.ranks == 1 else 1.0
    columns = Split.of(layout).cut_share(place["tensor"])  # also for heads, whose shares may differ a little
    around = seconds(work.embed, device) + seconds(work.head, device)
    plain, blocks = (
        seconds(work.blocks.cut(columns), device, compiled=compiled) * share + around
        for compiled in (False, prompt.compiled)
    )
    computing = batches * blocks
    if device.layers:  # of blocks that are not compiled
        part = columns * max(tokens.values()) / max(extent.streams.values())
        forwards = rows if layout.pipe > 1 else workload.forwards(layout, place)
        computing = share * _by_curve(device, rows, forwards, part) * blocks / plain
    attending = attention(layout, workload, rank, device, sent)
    kernels = batches * (work.embed.kernels + work.blocks.kernels * share + work.head.kernels)
    kernels += attending.exchanges * _KERNELS_OF_EXCHANGE
    layers, attends = computing / faster, attending.seconds / faster
    if layout.pipe > 1:
        bubble = (batches + layout.pipe - 1) / batches
        layers, attends = layers * bubble, attends * bubble
    hides = 0.0 if hardware.cores else computing + attending.seconds  # a core that computes gathers nothing meanwhile
    exposed = attending.exposed + _others(layout, workload, sent, hides, device.fresh or inf)
    waiting = max(0.0, taken.streams / hardware.streaming - layers - attends)
    return Step(layers=layers, attention=attends, exchange=exposed, streaming=waiting, host=kernels * hardware.launch)


def _by_curve(device: Device, rows: int, forwards: int, part: float) -> float:
    """Return the measured seconds of layers: several samples with few tokens are computed together, as one with many.

    Args:
        part: of the tokens, of each sample.
    """
    return forwards * interpolated(device.layers, rows / forwards * part)


def _others(layout: ParallelLayout, workload: Workload, sent: Sent, hides: float, fresh: float) -> float:
    """Return what shows of exchanges that are not around attention.

    Args:
        hides: seconds of what is computed while weights are gathered, or stale keys and values travel.
        fresh: bytes a second of new memory, to which gathered weights are written.
    """
    sums = sum(each.count for each in workload.geometry.all_reduces) * (layout.tensor > 1)
    total = sent[TensorParallel].seconds + 2 * (layout.tensor - 1) * sums * sent[TensorParallel].latency / layout.tensor
    gathered_once: tuple[tuple[type[Strategy], int], ...] = (
        (BatchSplit, 1), (SequenceSplit, 1), (Pipe, layout.pipe),
    )  # fmt: skip
    for strategy, exchanges in gathered_once:
        total += sent[strategy].seconds + exchanges * sent[strategy].latency
    if layout.shard_weights:
        gathers = workload.geometry.layers
        gathered = sent[ShardedWeights].seconds
        total += max(gathered / gathers, gathered - hides) + gathers * sent[ShardedWeights].latency
        total += sent[ShardedWeights].nbytes * layout.sequence / (layout.sequence - 1) / fresh
    if layout.stale == "previous":
        total += max(0.0, sent[Ring].seconds - hides)
    return total


def _sampling(prompt: Prompt, layout: ParallelLayout, step: Step) -> float:
    """Return the seconds of all calls. After warm-up an approximate layout hides its exchanges, or fills its stages."""
    if not layout.approximation:
        return prompt.steps * step.seconds
    warm = min(layout.warmup, prompt.steps)
    if layout.pipe == 1:
        return warm * step.seconds + (prompt.steps - warm) * step.hidden().seconds
    stages, patches = layout.pipe, layout.patches or 2 * layout.pipe
    whole = step.seconds
    rows = max(prompt.samples * prompt.branches // (layout.data * layout.cfg), 1)
    full = whole * rows / (rows + stages - 1)
    return warm * whole + (prompt.steps - warm) * full + (stages - 1) * full / patches
