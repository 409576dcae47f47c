"""Changes of weights: LoRAs, hooks, and ComfyUI's own functions for everything else."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Overrides

OVERLAYS, EXECUTING, FIT = "nodes/remote/overlays.py", "nodes/backend/executing.py", "nodes/remote/weight_fit.py"
BYPASS, CHANGING, PATCHER = (f"nodes/remote/{name}.py" for name in ("bypassed_loras", "changing_patcher", "patcher"))
STEP = "nodes/remote/record_replay.py"

ENTRIES = (
    *core_module(
        "comfy.model_patcher",
        Overrides("ModelPatcher.add_patches(patches, strength_patch, strength_model)", by=CHANGING, why="LoRAs"),
        Overrides(
            "ModelPatcher.add_hook_patches(hook, patches, strength_patch, strength_model)",
            by=CHANGING,
            why="LoRA hooks",
        ),
        Overrides("ModelPatcher.patch_hooks(hooks)", by=CHANGING, why="the hooks that are in force"),
        Has("ModelPatcher", "current_hooks", by=CHANGING, why="what nodes change"),
        Has("ModelPatcher", "current_hooks", by=STEP, why="hooks count as applied anew"),
    ),
    *core_module(
        "comfy.weight_adapter",
        Has("", "BypassInjectionManager", by=BYPASS, why="what LoraLoaderBypass adds to outputs", optional=True),
    ),
    *core_module(
        "comfy.lora",
        Calls("calculate_weight(patches, weight, key, *, original_weights)", by=FIT, why="changed weights"),
    ),
    *core_module(
        "comfy.hooks", Has("WeightHook", "weights _strength_model", by=PATCHER, why="a LoRA for the text encoder alone")
    ),
    *core_module("execution", Has("PromptQueue", "currently_running", by=EXECUTING, why="the name of a LoRA's file")),
)
