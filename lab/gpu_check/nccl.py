"""NCCL with one rank: exchanges with itself, its groups' memory, and its error when the card is full.

Without a GPU the same code runs over gloo as far as gloo can: it does not send to itself.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from lab.gpu_check.timing import device
from parallel_backend.distributed.process_group import waiting_options

GROUPS = 4
FREE = 300_000_000
"""Bytes that are free while a group is made on a full card."""


LEFT_OUT = "left out: needs a GPU"


def main() -> int:
    """Print what works as JSON, and fail if an exchange does not."""
    where = device()
    on_card = where.type == "cuda"
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        _join(where, Path(folder))
        steps = _STEPS | (_ON_CARD if on_card else {})
        found: dict[str, object] = {name: _outcome(partial(step, where)) for name, step in steps.items()}
        failed = any(outcome != "right" for outcome in found.values())
        found |= {} if on_card else dict.fromkeys(_ON_CARD, LEFT_OUT)
        found["MB of each new group"] = _group_memory(where) if on_card else LEFT_OUT
        found["MB of each group whose receives wait"] = _group_memory(where, waits=True) if on_card else LEFT_OUT
        found["a group on a full card"] = _on_a_full_card(where) if on_card else LEFT_OUT
        dist.destroy_process_group()
    print(json.dumps(found))
    return int(failed)


def _join(where: torch.device, folder: Path) -> None:
    """Make a group of this rank alone."""
    store, minute = FileStore(str(folder / "store"), 1), timedelta(seconds=60)
    if where.type == "cuda":
        torch.cuda.set_device(where)
        os.environ.setdefault("TORCH_NCCL_USE_COMM_NONBLOCKING", "0")  # see ``process_group.join``
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, timeout=minute, device_id=where
        )
    else:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=minute)


def _outcome(step: Callable[[], bool]) -> str:
    try:
        return "right" if step() else "wrong"
    except Exception as error:  # the error is the finding
        return f"{type(error).__name__}: {str(error)[:300]}"


def _exchange(where: torch.device, dtype: torch.dtype) -> bool:
    """Send a tensor to this rank itself."""
    sent = torch.arange(100, device=where).to(dtype)
    received = torch.zeros_like(sent)
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 0), dist.P2POp(dist.irecv, received, 0)])
    for work in works:
        work.wait()
    return torch.equal(sent, received)


def _broadcast(where: torch.device) -> bool:
    tensor = torch.arange(200, dtype=torch.uint8, device=where)
    dist.broadcast(tensor, 0)
    return torch.equal(tensor.cpu(), torch.arange(200, dtype=torch.uint8))


def _flag(where: torch.device) -> bool:
    """Reduce a number in the host's memory through the same group as a tensor on the card."""
    flag, tensor = torch.tensor([3]), torch.ones(1, device=where)
    dist.all_reduce(tensor)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return int(flag) == 3 and float(tensor) == 1.0


def _new_group(where: torch.device, *, waits: bool = False) -> bool:
    """Make a group, with few channels if its receives wait, and return whether it works."""
    minute = timedelta(seconds=60)
    group = dist.new_group([0], timeout=minute, pg_options=waiting_options() if waits else None)
    one = torch.ones(1, device=where)
    dist.all_reduce(one, group=group)
    return float(one) == 1.0


_STEPS: dict[str, Callable[[torch.device], bool]] = {
    "broadcast of uint8": _broadcast,
    "a number on the CPU": _flag,
    "a new group": _new_group,
}
_ON_CARD: dict[str, Callable[[torch.device], bool]] = {
    "float32 to itself": lambda where: _exchange(where, torch.float32),
    "bfloat16 to itself": lambda where: _exchange(where, torch.bfloat16),
    "uint8 to itself": lambda where: _exchange(where, torch.uint8),
    "a group whose receives wait": partial(_new_group, waits=True),
}


def _group_memory(where: torch.device, *, waits: bool = False) -> list[float]:
    """Return the megabytes that each of some new groups takes outside of torch's cache."""
    taken, before = [], torch.cuda.mem_get_info(where)[0]
    for _ in range(GROUPS):
        _new_group(where, waits=waits)
        after = torch.cuda.mem_get_info(where)[0]
        taken.append((before - after) / 1e6)
        before = after
    return taken


def _on_a_full_card(where: torch.device) -> dict[str, str]:
    """Say what a new group does on a card that torch's cache fills, and after the cache is given back."""
    cached = _fill(where)
    del cached  # into torch's cache
    full = _outcome(partial(_new_group, where))
    torch.cuda.empty_cache()
    return {"cache full": full, "cache given back": _outcome(partial(_new_group, where))}


def _fill(where: torch.device) -> Tensor:
    free = torch.cuda.mem_get_info(where)[0]
    return torch.empty(max(0, free - FREE), dtype=torch.uint8, device=where)


if __name__ == "__main__":
    sys.exit(main())
