"""Made-up states of the backend, as the server pushes them to the page."""

from typing import Any

GPU = "NVIDIA H100 80GB HBM3"
LONG = (
    "rank 5 (pid 4711 on a-host-with-a-very-long-name-in-another-room) was killed by SIGKILL while sampling (step 12): "
    + "CUDA error: an illegal memory access was encountered at /a/very/long/path/without/any/space/in/it/" + "x" * 160
)  # fmt: skip


def rank(number: int, **changes: Any) -> dict[str, Any]:
    """A rank that samples."""
    model = {
        "path": "/models/diffusion_models/wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", "stamp": "",
        "layout": None, "dtype": "bfloat16", "parts": ["transformer", "transformer_2", "vae"], "loads": 1, "note": "",
    }  # fmt: skip
    progress = {
        "phase": "sampling",
        "step": 11,
        "steps": 50,
        "count": 9,
        "quiet": 0.1,
        "longest": 1.0,
        "waiting": False,
    }
    return {
        "rank": number, "pid": 100 + number, "device": f"cuda:{number}", "memory": 3 << 30, "device_memory": 41 << 30,
        "device_name": GPU, "device_used": 60 << 30, "device_total": 80 << 30, "load": 0.97 - number / 50,
        "models": [model], "steps": 12, "progress": progress, "host": "", "link": None, **changes,
    }  # fmt: skip


def shown(ranks: list[dict[str, Any]], *, trouble: str = "", **changes: Any) -> dict[str, Any]:
    """What the server pushes while these ranks sample."""
    origin = {"prompt": "p", "node": "3"}
    layout = {
        "data": 1, "cfg": 2, "pipe": 1, "ring": 1, "ulysses": max(1, len(ranks) // 2), "dsp": 1, "tensor": 1,
        "shard_weights": True,
    }  # fmt: skip
    status = {
        "pid": 1, "protocol": 4, "generation": 2, "state": "busy", "running": "a", "queued": ["b", "c"],
        "layout": layout, "approximation": "", "idle_timeout": 600.0, "memory": 9, "ranks": ranks, "spares": [],
        "hosts": [],
        "work": {"kind": "Forward", "origin": origin, "model": "/m", "automatic": True, "seconds": 75.0},
    }  # fmt: skip
    times = [1.9 + (step % 7) / 10 for step in range(40)]
    return {
        "state": "busy", "status": status, "problem": "", "endpoint": "", "busy": True,
        "steps": {"origin": origin, "done": 12, "total": 50, "seconds": times, "left": 87.0},
        "trouble": {"text": trouble, "code": "rank_failed", "origin": origin, "at": 1.8e9} if trouble else None,
        **changes,
    }  # fmt: skip


OFF: dict[str, Any] = {
    "state": "off", "status": None, "problem": "", "busy": False, "trouble": None,
    "steps": {"origin": None, "done": 0, "total": 0, "seconds": [], "left": None},
}  # fmt: skip
