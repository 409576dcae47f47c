"""Whether GPUs compute in bfloat16. GPUs older than Ampere do not, and torch emulates it there, slowly."""

import torch
import torch.distributed as dist


def native(device: torch.device) -> bool:
    """Whether this rank's device needs no emulation. CPUs count as such."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def native_everywhere(device: torch.device, world_size: int) -> bool:
    """Whether no rank's device needs emulation. Collective over the world, for ranks on GPUs."""
    flag = torch.tensor([int(native(device))])
    if device.type == "cuda" and world_size > 1:
        dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())
