"""xfuser (xDiT) as a peer: its own transformer over the stock module's weights.

On a CPU it refuses already to be imported: it is told that gloo is the backend and that its sequence parallel kit is
there, which it is. What is timed is all its own.
"""

import importlib.util
import inspect
import logging
import sys
from types import ModuleType
from typing import Any

_CLASSES = {
    "FluxTransformer2DModel": ("transformer_flux", "xFuserFlux1Transformer2DWrapper"),
    "WanTransformer3DModel": ("transformer_wan", "xFuserWanTransformer3DWrapper"),
}
"""Module and class of xfuser by the class of diffusers."""


def prepare(module: Any, **degrees: int) -> Any:
    """xfuser's version of a diffusers transformer, with the same weights; the process group stands by then."""
    _import()
    _set_up(degrees)
    file, name = _CLASSES[type(module).__name__]
    wrapper = getattr(importlib.import_module(f"xfuser.model_executor.models.transformers.{file}"), name)
    known = inspect.signature(wrapper.__init__).parameters
    own = wrapper(**{key: value for key, value in module.config.items() if key in known}).eval()
    own.load_state_dict(module.state_dict())
    return own


def _import() -> None:
    """Import xfuser, of which ``envs`` comes first: the rest asks it for a GPU while it is imported."""
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
    """Make its groups, and its state for a transformer without one of its pipelines."""
    import torch.distributed as dist
    import yunchang.globals
    from xfuser import xFuserArgs
    from xfuser.core.distributed import init_distributed_environment, initialize_model_parallel, runtime_state
    from xfuser.model_executor.layers import usp

    usp.PROCESS_GROUP = yunchang.globals.PROCESS_GROUP
    rank, ranks = dist.get_rank(), dist.get_world_size()
    init_distributed_environment(world_size=ranks, rank=rank, local_rank=rank, backend="gloo")
    initialize_model_parallel(sequence_parallel_degree=ranks, backend="gloo", **degrees)
    config, _ = xFuserArgs(attention_backend="SDPA", **degrees).create_config()
    state = runtime_state.RuntimeState(config)
    # What its pipelines add, which is not used here.
    state.max_condition_sequence_length, state.increment_step_counter = 0, lambda: None
    runtime_state._RUNTIME = state
