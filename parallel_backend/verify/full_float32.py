"""Full float32 for comparisons that are held to less than what TensorFloat-32 rounds off."""

import os

import torch


def disable_tf32() -> None:
    """Make NVIDIA's libraries compute float32 in full, in this process and in those that it starts, such as ranks.

    TensorFloat-32 rounds inputs to three digits, in ways that differ between kernels; torch allows it in convolutions
    by default. The variable holds for all libraries of a process that starts with it. The flags hold at once.
    """
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
