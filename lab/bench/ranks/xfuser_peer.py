"""xfuser (xDiT) as a peer: its own transformer with the stock module's weights.

xfuser refuses to be imported without a GPU. There, its checks are replaced so that it uses gloo and finds its sequence
parallel library, which is installed. The code that is timed is unchanged.
"""

import importlib.util
import inspect
import logging
import os
import sys
from types import ModuleType
from typing import Any

_CLASSES = {
    "FluxTransformer2DModel": ("transformer_flux", "xFuserFlux1Transformer2DWrapper"),
    "WanTransformer3DModel": ("transformer_wan", "xFuserWanTransformer3DWrapper"),
}
"""xfuser's module and class, by the class of diffusers."""


def prepare(module: Any, **degrees: int) -> Any:
    """Return xfuser's version of a diffusers transformer, with the same weights. Needs the process group."""
    if module.device.type == "cpu":
        _import()
    _set_up(degrees)
    file, name = _CLASSES[type(module).__name__]
    wrapper = getattr(importlib.import_module(f"xfuser.model_executor.models.transformers.{file}"), name)
    known = inspect.signature(wrapper.__init__).parameters
    transformer = wrapper(**{key: value for key, value in module.config.items() if key in known}).eval()
    transformer = transformer.to(module.device, module.dtype)
    transformer.load_state_dict(module.state_dict())
    return transformer


def _import() -> None:
    """Import xfuser, and first its module ``envs``, which the others ask for a GPU while they are imported."""
    spec = importlib.util.find_spec("xfuser")
    assert spec is not None
    sys.modules["xfuser"] = importlib.util.module_from_spec(spec)
    envs: ModuleType = importlib.import_module("xfuser.envs")
    envs.get_torch_distributed_backend = lambda: "gloo"  # type: ignore[attr-defined]
    envs.get_device_version = lambda: "0.0"  # type: ignore[attr-defined]
    envs.PACKAGES_CHECKER.packages_info["has_long_ctx_attn"] = True
    del sys.modules["xfuser"]
    importlib.import_module("xfuser")
    logging.getLogger("xfuser").setLevel(logging.ERROR)


def _set_up(degrees: dict[str, int]) -> None:
    """Create xfuser's process groups, and the runtime state that normally one of its pipelines creates."""
    import torch.distributed as dist
    import yunchang.globals
    from xfuser import xFuserArgs
    from xfuser.core.distributed import init_distributed_environment, initialize_model_parallel, runtime_state
    from xfuser.model_executor.layers import usp

    usp.PROCESS_GROUP = yunchang.globals.PROCESS_GROUP
    rank, ranks, backend = dist.get_rank(), dist.get_world_size(), "nccl" if "nccl" in dist.get_backend() else "gloo"
    local_rank = int(os.environ["LOCAL_RANK"])
    init_distributed_environment(world_size=ranks, rank=rank, local_rank=local_rank, backend=backend)
    initialize_model_parallel(sequence_parallel_degree=ranks, backend=backend, **degrees)
    state = runtime_state.RuntimeState(xFuserArgs(attention_backend="SDPA", **degrees).create_config()[0])
    # Its pipelines set these; their values are not used here.
    state.max_condition_sequence_length, state.increment_step_counter = 0, lambda: None
    runtime_state._RUNTIME = state
