"""The driver, the GPUs, NCCL, and the links between GPUs."""

import os
import shutil
import subprocess
from itertools import combinations
from typing import Any

from ...client import gpus as known_gpus
from ..finding import Finding, Setting

_SMI_FIELDS = "name,driver_version,pcie.link.width.current,pcie.link.width.max"
_SMI_SECONDS = 30.0
_OLDEST_NCCL = (2, 18)
"""Older ones cannot split a communicator, so each group of ranks connects anew."""


def gpus(_: Setting) -> list[Finding]:
    """The driver, and whether torch computes on each GPU."""
    cards = _cards()
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return [Finding.not_here("CUDA_VISIBLE_DEVICES hides them: ranks run on the CPU")]
    count = known_gpus.count()
    if count:
        return [_gpu(index, cards[index] if len(cards) == count else None) for index in range(count)]
    if cards:
        return [_unseen(cards)]
    other = known_gpus.other_accelerator()
    text = f"this machine has {other}, on which ranks do not run" if other else "no GPU: ranks run on the CPU"
    return [Finding.not_here(text)]


def nccl(_: Setting) -> list[Finding]:
    """The version of NCCL."""
    count = known_gpus.count()
    if not count:
        return [Finding.not_here("no GPU, so ranks use gloo")]
    version = _nccl_version()
    if version is None:
        advice = "Install a build of torch with NCCL, or set PARALLEL_DIT_COLLECTIVES=gloo, which is slower."
        return [Finding.broken("this build of torch has no NCCL", advice)]
    text = ".".join(map(str, version))
    if version[:2] < _OLDEST_NCCL:
        return [Finding.slow(f"{text} is old", "Install a newer torch.")]
    return [Finding.fine(text)]


def links(_: Setting) -> list[Finding]:
    """Whether GPUs reach each other's memory."""
    count = known_gpus.count()
    if count < 2:
        return [Finding.not_here("there are no two GPUs")]
    missing = [pair for pair in combinations(range(count), 2) if not _linked(*pair)]
    if not missing:
        return [Finding.fine(f"all {count} GPUs reach each other's memory")]
    pairs = ", ".join(f"{one} and {other}" for one, other in missing)
    advice = (
        "NCCL exchanges through the machine's memory, which is slower. Most consumer cards have no other way; on "
        "others, turn the IOMMU and ACS off in the BIOS. /dev/shm needs 1 GB (--shm-size=1g in docker)."
    )
    return [Finding.slow(f"no peer access between GPUs {pairs}", advice)]


def _cards() -> list[list[str]]:
    """Return name, driver and PCIe lanes, now and at most, of each card that nvidia-smi lists; [] without it.

    Raises:
        RuntimeError: nvidia-smi fails.
    """
    tool = shutil.which("nvidia-smi")
    if not tool:
        return []
    command = [tool, f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())[:300]
        raise RuntimeError(f"nvidia-smi fails: {said}: install the driver again, or restart after an update of it")
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _unseen(cards: list[list[str]]) -> Finding:
    """Return why torch sees none of the cards that the driver knows."""
    version, cuda = _torch_build()
    text = f"the driver {cards[0][1]} knows {len(cards)} GPUs, and torch {version} sees none"
    if cuda is None:
        advice = "This build of torch has no CUDA: install one that has (https://pytorch.org/get-started/locally)."
    else:
        advice = f"The driver may be too old for CUDA {cuda}: update it, or install torch for an older CUDA."
    return Finding.broken(text, advice)


def _gpu(index: int, card: list[str] | None) -> Finding:
    try:
        name, free, total = _try(index)
    except RuntimeError as error:
        text = f"torch does not compute on GPU {index}: {' '.join(str(error).split())[:300]}"
        advice = "Install a build of torch for this GPU's generation; after an Xid error in dmesg, restart the machine."
        return Finding.broken(text, advice)
    text = f"{index}: {name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    text += f", driver {card[1]}" if card else ""
    if card and card[2].isdecimal() and card[3].isdecimal() and int(card[2]) < int(card[3]):
        text += f", on {card[2]} of {card[3]} PCIe lanes"
        return Finding.slow(text, "Use a slot with more lanes, or reseat the card.")
    if free < total / 2:
        return Finding.slow(text, "Other programs use this GPU: end them, or models have less room.")
    return Finding.fine(text)


def _try(index: int) -> tuple[str, int, int]:
    """Compute on a GPU; return its name, and its free and total bytes.

    Raises:
        RuntimeError: it does not compute.
    """
    import torch

    device: Any = torch.device("cuda", index)
    if (torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)).sum().item() != 512:
        raise RuntimeError("it returns a wrong product")
    return torch.cuda.get_device_name(device), *torch.cuda.mem_get_info(device)


def _torch_build() -> tuple[str, str | None]:
    import torch

    return torch.__version__, torch.version.cuda


def _nccl_version() -> tuple[int, ...] | None:
    import torch
    import torch.distributed as dist

    return tuple(torch.cuda.nccl.version()) if dist.is_available() and dist.is_nccl_available() else None


def _linked(one: int, other: int) -> bool:
    import torch

    return torch.cuda.can_device_access_peer(one, other) and torch.cuda.can_device_access_peer(other, one)
