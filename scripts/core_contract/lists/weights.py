"""Changes of weights: LoRAs, hooks, and ComfyUI's own functions for everything else."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Overrides

CHANGING, FILES, PATCHES = (f"nodes/remote/{name}.py" for name in ("changing_patcher", "lora_files", "weight_patches"))
OVERLAYS, EXECUTING = "nodes/remote/overlays.py", "nodes/backend/executing.py"
BYPASSED, STEP = "nodes/remote/bypassed_loras.py", "nodes/remote/recorded_step.py"

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
        Calls("ModelPatcher.get_combined_hook_patches(hooks)", by=CHANGING, why="what hooks change, with strengths"),
        Has("ModelPatcher", "patches hook_patches patches_uuid current_hooks", by=CHANGING, why="what nodes change"),
        Has("ModelPatcher", "injections", by=CHANGING, why="LoraLoaderBypass"),
        Calls("ModelPatcher.patch_hooks(hooks)", by=STEP, why="hooks count as applied anew"),
        Has("ModelPatcher", "current_hooks", by=STEP, why="hooks count as applied anew"),
    ),
    *core_module(
        "comfy.weight_adapter",
        Has("", "WeightAdapterBase", by=FILES, why="changes that come with one another"),
        Has("", "LoRAAdapter", by=PATCHES, why="a LoRA's factors"),
        Has("", "LoRAAdapter LoHaAdapter LoKrAdapter", by=BYPASSED, why="what LoraLoaderBypass injects"),
        Has("", "BypassInjectionManager", by=BYPASSED, why="what LoraLoaderBypass injects", optional=True),
    ),
    *core_module("comfy.weight_adapter.base", Has("WeightAdapterBase", "weights", by=PATCHES, why="a LoRA's factors")),
    *core_module(
        "comfy.lora",
        Calls("calculate_weight(patches, weight, key, *, original_weights)", by=OVERLAYS, why="changed weights"),
    ),
    *core_module("comfy.hooks", Has("Hook", "hook_ref strength", by=CHANGING, why="which hooks are in force")),
    *core_module(
        "comfy_execution.utils",
        Calls("get_executing_context()", by=EXECUTING, why="the name of a LoRA's file"),
        Has("ExecutionContext", "prompt_id node_id", by=EXECUTING, why="the name of a LoRA's file"),
    ),
    *core_module(
        "execution", Has("PromptQueue", "currently_running", plain=True, by=EXECUTING, why="the name of a LoRA's file")
    ),
)
