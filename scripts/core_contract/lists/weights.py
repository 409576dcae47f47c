"""Changes of weights: LoRAs, hooks, and ComfyUI's own functions for everything else."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Overrides

CHANGING, FILES, PATCHES = (f"nodes/remote/{name}.py" for name in ("changing_patcher", "lora_files", "weight_patches"))
OVERLAYS, EXECUTING, FIT = "nodes/remote/overlays.py", "nodes/backend/executing.py", "nodes/remote/weight_fit.py"
BYPASS, TEXT, PATCHER = (f"nodes/remote/{name}.py" for name in ("bypassed_loras", "text_encoder", "patcher"))
STEP = "nodes/remote/recorded_step.py"

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
        Has("ModelPatcher", "patches injections current_hooks", by=CHANGING, why="what nodes change"),
        Calls("ModelPatcher.patch_hooks(hooks)", by=STEP, why="hooks count as applied anew"),
        Has("ModelPatcher", "current_hooks", by=STEP, why="hooks count as applied anew"),
        Calls("ModelPatcher._load_list()", by="nodes/bridges/bridge.py", why="which weights ComfyUI changes"),
        Overrides("ModelPatcher.patch_model(*args, **kwargs)", by=TEXT, why="a CLIP's changes are checked before it"),
        Has("ModelPatcher", "object_patches weight_wrapper_patches", by=TEXT, why="refused"),
    ),
    *core_module(
        "comfy.weight_adapter",
        Has("", "WeightAdapterBase", by=f"{FILES} {FIT}", why="changes that come with one another"),
        Has("", "LoRAAdapter", by=f"{PATCHES} {FIT}", why="a LoRA's factors"),
        Has("", "LoHaAdapter LoKrAdapter", by=BYPASS, why="what LoraLoaderBypass adds to outputs"),
        Has("", "BypassInjectionManager", by=BYPASS, why="what LoraLoaderBypass adds to outputs", optional=True),
    ),
    *core_module("comfy.weight_adapter.base", Has("WeightAdapterBase", "weights", by=PATCHES, why="a LoRA's factors")),
    *core_module(
        "comfy.lora",
        Calls("calculate_weight(patches, weight, key, *, original_weights)", by=FIT, why="changed weights"),
    ),
    *core_module(
        "comfy.hooks", Has("WeightHook", "weights _strength_model", by=PATCHER, why="a LoRA for the text encoder alone")
    ),
    *core_module(
        "comfy_execution.utils",
        Calls("get_executing_context()", by=EXECUTING, why="the name of a LoRA's file"),
        Has("ExecutionContext", "prompt_id node_id", by=EXECUTING, why="the name of a LoRA's file"),
    ),
    *core_module(
        "execution", Has("PromptQueue", "currently_running", plain=True, by=EXECUTING, why="the name of a LoRA's file")
    ),
)
