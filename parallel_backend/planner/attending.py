"""Seconds of the attention that passes the seam, and of the exchanges around it, on one rank of a layout."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..interfaces.geometry import AttentionKind, Extent
from ..interfaces.strategy import Workload
from ..layout.parallel_layout import ParallelLayout
from ..layout.split import Split
from ..strategies.dsp import Dsp
from ..strategies.ring import Ring
from ..strategies.sequence import site_tokens
from ..strategies.ulysses import Ulysses
from ..strategies.whole_queries import WholeQueries
from .communication import Exchanged, Sent
from .compute import attention_seconds
from .hardware.description import Device
from .work import Attended

_LEADS_IN = 0.75
"""The part of Ulysses's bytes that leads into attention: q, k and v, of which only the result leads out."""


_PACKED = 8
"""Values that are read or written for each of a token's: q, k, v and the result, from one place to another."""
_FLOAT32 = 6
"""Bytes that are read and written to turn a value of a partial result into float32."""
_MERGED = 12
"""Bytes that are read and written to merge a value of a partial result into the earlier ones."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What attention takes in a denoiser call on one rank.

    Attributes:
        seconds: of computing.
        exposed: of exchanges that nothing hides.
        exchanges: number of exchanges.
    """

    seconds: float
    exposed: float
    exchanges: int


def attention(layout: ParallelLayout, workload: Workload, rank: int, device: Device, sent: Sent) -> Attention:
    """Return what attention takes on a rank."""
    place = layout.coordinates(rank)
    local = [(samples, extent) for samples, extent in workload.local_branches(layout, place) if samples]
    calls = [call for samples, extent in local for call in _calls(layout, workload, place, samples, extent)]
    batches = max(workload.forwards(layout, place), 1)
    seconds = sum(attention_seconds(each, device) * count for each, count in calls)
    seconds += sum(_copied(layout, workload, place, *each) for each in local) / device.bandwidth
    sites = sum(count for _, count in workload.sites(layout, place)) * batches if local else 0
    whole = sum(count for site, count in workload.sites(layout, place) if site.queries) * batches if local else 0
    ring, ulysses = _ring(layout, sent[Ring], seconds, sites - whole), _ulysses(sent[Ulysses], seconds, sites - whole)
    dsp = sent[Dsp].seconds + 2 * sites * sent[Dsp].latency if layout.dsp > 1 else 0.0
    others = sent[WholeQueries].seconds + 2 * whole * sent[WholeQueries].latency if layout.sequence > 1 else 0.0
    exchanges = sites * (2 * (layout.ulysses > 1) + 2 * (layout.dsp > 1) + (layout.ring - 1) * (layout.ring > 1))
    return Attention(seconds=seconds, exposed=ring + ulysses + dsp + others, exchanges=exchanges + 2 * whole)


def _copied(layout: ParallelLayout, workload: Workload, place: dict[str, int], samples: int, extent: Extent) -> float:
    """Return the bytes that are read and written around attention of a branch.

    Ulysses packs q, k and v and places what comes back. A ring turns each partial result into float32, and merges it.
    """
    copied = 0.0
    for site, count in workload.row_sites(layout, place):
        heads = workload.heads(layout, site, place).queries
        by_ring = site_tokens(layout, workload, extent, site)
        values = count * samples * extent.rows * site.head_dim
        if layout.ulysses > 1:
            own = by_ring[place["ring"]][place["ulysses"]]
            copied += _PACKED * values * own * heads.total * workload.itemsize
        if layout.ring > 1 and not layout.stale:
            queries = sum(by_ring[place["ring"]]) * heads.sizes[place["ulysses"]]
            copied += values * queries * (layout.ring * _FLOAT32 + (layout.ring - 1) * _MERGED)
    return copied


def _ulysses(sent: Exchanged, seconds: float, sites: int) -> float:
    """Return what shows of the exchanges: all of them, or what is left where half of the heads attends meanwhile."""
    if not sent.seconds:
        return 0.0
    into, out = _LEADS_IN * sent.seconds / 2, (1 - _LEADS_IN) * sent.seconds / 2
    halved = into + max(into, seconds / 2) + max(seconds / 2, out) + out - seconds
    return min(sent.seconds + 2 * sites * sent.latency, halved + 4 * sites * sent.latency)


def _ring(layout: ParallelLayout, sent: Exchanged, seconds: float, sites: int) -> float:
    """Return what shows of the blocks that travel: each while attention to the one before computes, but the last."""
    if layout.ring == 1 or layout.stale:
        return 0.0
    hidden = seconds * (layout.ring - 1) / layout.ring
    return max(0.0, sent.seconds - hidden) + (layout.ring - 1) * sites * sent.latency


def _calls(
    layout: ParallelLayout, workload: Workload, place: dict[str, int], samples: int, extent: Extent
) -> Iterator[tuple[Attended, int]]:
    """Yield each attention of a branch on the ranks at a place, and how often it is computed."""
    for site, count in workload.sites(layout, place):
        heads = workload.heads(layout, site, place).queries.sizes[place["ulysses"]]
        if site.queries is not None:
            yield from _whole_queries(layout, workload, place, samples, extent, site, count)
            continue
        by_ring = [sum(tokens) for tokens in site_tokens(layout, workload, extent, site)]
        if layout.dsp > 1:
            rows = Split.of(layout).frames(samples * extent.rows).sizes[place["dsp"]]
            whole = sum(extent.streams[name] for name in site.streams)
            yield _attended(rows * heads, whole, whole, site), count
            continue
        for keys in by_ring:
            yield _attended(samples * extent.rows * heads, by_ring[place["ring"]], keys, site), count


def _whole_queries(
    layout: ParallelLayout, workload: Workload, place: dict[str, int], samples: int, extent: Extent,
    site: AttentionKind, count: int,
) -> Iterator[tuple[Attended, int]]:  # fmt: skip
    queries = sum(extent.streams[name] for name in site.queries or ())
    keys = sum(workload.tokens_by_rank(layout, extent, name)[place["sequence"]] for name in site.streams)
    heads = workload.heads(layout, site, place).queries.total
    yield _attended(samples * heads, queries, keys, site), count


def _attended(heads: int, queries: int, keys: int, site: AttentionKind) -> Attended:
    return Attended(heads=heads, queries=queries, keys=keys, head_dim=site.head_dim)
