"""The peers of our layouts in a benchmark: one process, and the parallelism of diffusers and other projects.

Each peer has its own rank processes, which make a stock diffusers module parallel. Other projects are optional: only
these processes import them.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from parallel_backend.attention.kernels import KERNELS
from parallel_backend.protocol.model_spec import Devices


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A contestant whose processes call the stock forward.

    Attributes:
        name: its name in tables.
        ranks: number of processes.
        threads: of each process.
        packages: packages that it needs, by their name on PyPI.
        prepare: makes the diffusers module parallel; called on each rank once the process group exists.
    """

    name: str
    ranks: int
    threads: int = 1
    packages: tuple[str, ...] = ()
    prepare: Callable[[Any], Any] | None = None

    def obstacle(self, devices: Devices) -> str | None:
        """Why it cannot run on these devices, and how to install what is missing; None if it can."""
        if self.threads > 1 and devices.kind == "cuda":
            return "threads of the CPU do not matter on a GPU"
        missing = [name for name in self.packages if importlib.util.find_spec(name.replace("-", "_")) is None]
        return f"not installed: pip install {' '.join(missing)}" if missing else None


def _diffusers(module: Any, **degrees: int) -> Any:
    import torch
    from diffusers import ContextParallelConfig

    if not torch.accelerator.is_available():
        torch.accelerator.device_count = lambda: 1  # the CPU; diffusers takes the rank modulo this
    module.enable_parallelism(config=ContextParallelConfig(**degrees))
    return module


def _diffusers_ring(module: Any, degree: int) -> Any:
    """Replace diffusers' kernel by ours: its own returns no log-sum-exp, which its ring attention needs."""
    from diffusers.models import attention_dispatch

    attention_dispatch._native_attention_forward_op = _with_lse
    return _diffusers(module, ring_degree=degree)


def _with_lse(
    _ctx: Any, query: Any, key: Any, value: Any, _mask: Any, _dropout: Any, _causal: Any, scale: Any, *_: Any, **__: Any
) -> Any:
    """Return the attention output ``[B, tokens, heads, head_dim]`` and the log-sum-exp ``[B, tokens, heads]``."""
    q, k, v = (part.transpose(1, 2) for part in (query, key, value))
    out, lse = KERNELS["sdpa"].with_lse(q, k, v, scale)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _cache_dit(module: Any, **sizes: int) -> Any:
    import cache_dit
    from cache_dit.distributed import enable_parallelism

    enable_parallelism(module, cache_dit.ParallelismConfig(**sizes))
    return module


def _xfuser(module: Any, **degrees: int) -> Any:
    from .xfuser_peer import prepare

    return prepare(module, **degrees)


ONE_PROCESS = Peer(name="one process", ranks=1)
"""The baseline of all ratios."""

PEERS: tuple[Peer, ...] = (
    Peer(name="one process, two threads", ranks=1, threads=2),
    Peer(name="diffusers ulysses=2", ranks=2, prepare=partial(_diffusers, ulysses_degree=2)),
    Peer(name="diffusers ring=2", ranks=2, prepare=partial(_diffusers_ring, degree=2)),
    Peer(name="cache-dit ulysses=2", ranks=2, packages=("cache-dit",), prepare=partial(_cache_dit, ulysses_size=2)),
    Peer(
        name="xfuser ulysses=2",
        ranks=2,
        packages=("xfuser", "yunchang", "triton"),  # it imports triton even on a CPU
        prepare=partial(_xfuser, ulysses_degree=2),
    ),
)


def chosen_peers(*, everyone: bool) -> Sequence[Peer]:
    """Return all peers, or only the peer without another project's parallelism."""
    return PEERS if everyone else PEERS[:1]


BY_NAME: dict[str, Peer] = {peer.name: peer for peer in (ONE_PROCESS, *PEERS)}
