"""All checks, in the order in which they run."""

from .finding import Check

_CHECKS = "parallel_backend.doctor.checks"

CHECKS: tuple[Check, ...] = (
    Check(name="packages", target=f"{_CHECKS}.versions:packages", seconds=240.0),
    Check(name="other packages", target=f"{_CHECKS}.versions:other_packages", seconds=500.0),
    Check(name="GPUs", target=f"{_CHECKS}.gpus:gpus", seconds=120.0),
    Check(name="NCCL", target=f"{_CHECKS}.gpus:nccl", seconds=60.0),
    Check(name="links between GPUs", target=f"{_CHECKS}.gpus:links", seconds=60.0),
    Check(name="attention kernels", target=f"{_CHECKS}.versions:kernels", seconds=120.0),
    Check(name="/dev/shm", target=f"{_CHECKS}.machine:shared_memory", seconds=60.0),
    Check(name="limits", target=f"{_CHECKS}.machine:limits", seconds=10.0),
    Check(name="memory", target=f"{_CHECKS}.machine:memory", seconds=10.0),
    Check(name="runtime folder", target=f"{_CHECKS}.running:runtime_folder", seconds=20.0),
    Check(name="backend", target=f"{_CHECKS}.running:backend", seconds=40.0),
    Check(name="ComfyUI", target=f"{_CHECKS}.comfyui:comfyui", seconds=150.0),
    Check(name="exchange", target=f"{_CHECKS}.trial:exchange", seconds=240.0),
    Check(name="forward", target=f"{_CHECKS}.trial:forward", seconds=240.0),
)
