"""Detects that ranks make no progress on a request, and finds the likeliest cause.

Ranks wait for each other, so a hanging rank soon stops them all. They are stuck if no rank makes progress: as long as
one does, the others may be waiting for it.
"""

from collections.abc import Sequence

from ...progress import CONNECTING, IDLE, RankProgress
from ...protocol.model_spec import Devices
from ..limits import Patience
from .rank_process import RankProcess

_NCCL_ADVICE = (
    "NCCL does not connect these GPUs: try NCCL_P2P_DISABLE=1 in ComfyUI's environment, a larger /dev/shm (1 GiB is "
    "enough; --shm-size in docker), or an IOMMU that is turned off in the BIOS"
)
_GLOO_ADVICE = (
    "gloo does not connect these ranks: a firewall or sandbox has to allow them connections to each other, which go "
    "over the loopback interface lo, and to other hosts over the one that --interface names"
)


def stuck(ranks: Sequence[RankProcess], patience: Patience) -> list[RankProcess]:
    """Return the likeliest causes if all ranks that work on a request are stuck; otherwise nothing.

    These are the ranks that do not wait for others. Without any, they are the ranks that are behind in the same phase,
    or else all.
    """
    working = [rank for rank in ranks if rank.status.progress.phase != IDLE]
    newest = max((rank.last_progress for rank in ranks), default=0.0)
    if not all(_is_stuck(rank, ranks, newest, patience) for rank in working):
        return []
    computing = [rank for rank in working if not rank.status.progress.waiting]
    if computing and len(computing) < len(working):
        return computing
    if len({rank.status.progress.phase for rank in working}) == 1:
        least = min(rank.status.progress.count for rank in working)
        return [rank for rank in working if rank.status.progress.count == least]
    return working


def _is_stuck(rank: RankProcess, ranks: Sequence[RankProcess], newest: float, patience: Patience) -> bool:
    """Whether a rank has waited too long for progress. ``newest`` is the time of any rank's last progress."""
    heard, seconds = _heard(rank, ranks), limit(rank.status.progress, patience)
    quiet = heard - newest
    computes = heard - rank.last_computing <= seconds and quiet <= patience.compute
    return quiet > seconds and not computes


def _heard(rank: RankProcess, ranks: Sequence[RankProcess]) -> float:
    """Return the time up to which a rank's progress is known.

    A rank that takes part in making a group to which it does not belong may be silent: torch keeps Python waiting then
    (``perform_nocolor_split``).
    """
    connecting = rank.status.progress.phase == CONNECTING
    return max(each.last_heard for each in ranks) if connecting else rank.last_heard


def limit(progress: RankProgress, patience: Patience) -> float:
    """Return for how many seconds a rank may make no progress, given its activity."""
    if progress.phase in patience.phases:
        return patience.phases[progress.phase]
    return max(patience.progress, patience.steps * progress.longest) if progress.longest else patience.first


def describe(culprits: Sequence[RankProcess], ranks: Sequence[RankProcess], devices: Devices) -> str:
    """Return a sentence with the stuck ranks, their activity and a remedy.

    Args:
        culprits: the ranks that ``stuck`` returns.
        ranks: all ranks.
        devices: of the ranks.
    """
    parts = [
        f"{rank.name} made no progress for {_heard(rank, ranks) - rank.last_progress:.0f} s while "
        f"{rank.status.progress}"
        for rank in culprits
    ]
    text = " and ".join(parts)
    if len(culprits) < sum(rank.status.progress.phase != IDLE for rank in ranks):
        text += ", and the other ranks wait for it" if len(culprits) == 1 else ", and the other ranks wait for them"
    if all(rank.status.progress.phase == CONNECTING for rank in culprits):
        nccl = devices.kind == "cuda" and devices.collectives == "nccl"
        # A rank that is not ready connects to the others over gloo, and then over NCCL.
        both = nccl and not all(rank.ready for rank in culprits)
        text += f". Either {_NCCL_ADVICE}. Or {_GLOO_ADVICE}" if both else f". {_NCCL_ADVICE if nccl else _GLOO_ADVICE}"
    return text
