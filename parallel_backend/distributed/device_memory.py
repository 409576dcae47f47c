"""A full device: the errors that mean it, and returning torch's cached memory."""

from collections.abc import Iterable

import torch

from ..error_texts import Cause, cause


def ran_out(error: BaseException) -> bool:
    """Whether an error says that this rank's own device is full.

    torch raises an error of its own only for its own allocator. NCCL, cuBLAS and CUDA itself allocate outside of it,
    and their errors differ by their text alone.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and cause(str(error)) is Cause.FULL


def release_cache(device: torch.device) -> None:
    """Return the cached memory of torch's allocator to the device, where NCCL can allocate it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU's memory; from a GPU to pinned memory, which is several times as fast."""
    pinned = tensor.is_cuda and torch.cuda.is_available()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor) if pinned else tensor.cpu()


def in_use(gpus: Iterable[int]) -> int:
    """Return the bytes that all processes together use on these GPUs. Counts each GPU once."""
    measured = [torch.cuda.mem_get_info(index) for index in dict.fromkeys(gpus)]
    return sum(total - free for free, total in measured)
