"""ModelPatcher, and ComfyUI's memory: models whose weights lie elsewhere, and room for the ranks."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, Overrides, Passes

PATCHER, MEMORY, CONNECTION = (
    "nodes/remote/patcher.py",
    "nodes/backend/comfyui_models.py",
    "nodes/backend/connection.py",
)
SAMPLER, TEXT, REFUSALS = "nodes/sampler.py", "nodes/remote/text_encoder.py", "nodes/bridges/refusals.py"
LOOP, WEIGHTLESS = "nodes/remote/loop_choice.py", "nodes/remote/weightless_patcher.py"
STEP, ADDED = "nodes/remote/recorded_step.py", "nodes/remote/added_to_steps.py"
VAE, PREVIEWS, DTYPE = "nodes/remote/vae.py", "nodes/remote/previews.py", "nodes/bridges/compute_dtype.py"

ENTRIES = (
    *core_module(
        "comfy.model_patcher",
        Calls(
            "ModelPatcher(model, *, load_device, offload_device)",
            by=PATCHER,
            why="the MODEL",
            word="RemotePatcher load_device offload_device",
        ),
        Overrides("ModelPatcher.model_size()", by=WEIGHTLESS, why="nothing lies on ComfyUI's device"),
        Overrides("ModelPatcher.loaded_size()", by=WEIGHTLESS, why="nothing lies on ComfyUI's device"),
        Calls("ModelPatcher.loaded_size()", by=MEMORY, why="which models are ours"),
        Overrides("ModelPatcher.memory_required(input_shape)", by=WEIGHTLESS, why="no step runs there"),
        Overrides("ModelPatcher.get_key_patches(filter_prefix)", by=WEIGHTLESS, why="merging is refused"),
        Overrides(
            "ModelPatcher.deepclone_multigpu(*args, **kwargs)",
            by=WEIGHTLESS,
            why="core's own use of several GPUs is refused",
            optional=True,
        ),
        Calls("ModelPatcher.add_wrapper_with_key(wrapper_type, key, wrapper)", by=PATCHER, why="our wrappers"),
        Calls("ModelPatcher.add_callback_with_key(call_type, key, callback)", by=PATCHER, why="unloading"),
        Passes(
            "ModelPatcher.detach",
            "callback(self, unpatch_all)",
            by=PATCHER,
            why="how ON_DETACH is called",
            word="ON_DETACH unpatch_all",
        ),
        Calls("ModelPatcher.detach(*, unpatch_all)", by=PATCHER, why="the model that a clone replaces"),
        Calls("ModelPatcher.is_clone(other)", by=PATCHER, why="one entry for a model and its clones"),
        Calls("ModelPatcher.get_nested_additional_models()", by=PATCHER, why="models that come along"),
        Calls("ModelPatcher.get_model_object(name)", by=LOOP, why="a patched model_sampling"),
        Has("ModelPatcher", "model", by=f"{PATCHER} {SAMPLER} {PREVIEWS}", why="the model inside"),
        Has("ModelPatcher", "load_device", by=f"{SAMPLER} {PREVIEWS}", why="where latents are"),
        Has("ModelPatcher", "model_options wrappers callbacks object_patches", by=ADDED, why="what other nodes added"),
        Has("ModelPatcher", "hook_mode is_clip", by=TEXT, why="what CLIP sets on its patcher"),
        Mentions("ModelPatcher.set_model_rope_options", "rope_options", by=REFUSALS, why="refused"),
        Mentions("set_model_options_patch_replace", "patches_replace", by=REFUSALS, why="refused"),
        Mentions("ModelPatcher.set_model_patch", "patches", by=REFUSALS, why="refused"),
        Has("ModelPatcher", "object_patches weight_wrapper_patches", by=REFUSALS, why="refused"),
        Has("ModelPatcher", "callbacks", by=PATCHER, why="those of other nodes are announced"),
        Overrides("ModelPatcher.get_all_callbacks(call_type)", by=PATCHER, why="left out of the recorded pass"),
        Overrides("ModelPatcher._load_list(*args, **kwargs)", by=PATCHER, why="no layer has weights to load"),
        Mentions(
            "ModelPatcher.set_model_unet_function_wrapper",
            "model_function_wrapper",
            by=STEP,
            why="left out of the recorded pass",
        ),
    ),
    *core_module(
        "comfy.cli_args",
        Has("", "args", by="nodes/bridges/announcements.py", why="flags that the ranks do not have are announced"),
    ),
    *core_module(
        "comfy.supported_models_base",
        Has("BASE", "supported_inference_dtypes", by=DTYPE, why="the dtype of auto"),
    ),
    *core_module(
        "comfy.model_management",
        Calls("get_torch_device()", by=f"{PATCHER} {MEMORY}", why="ComfyUI's device"),
        Calls("free_memory(memory_required, device, keep_loaded)", by=MEMORY, why="room for the ranks"),
        Calls("soft_empty_cache()", by=MEMORY, why="room for the ranks"),
        Calls("load_models_gpu(models)", by=PATCHER, why="models that conditioning brings along"),
        Has("", "current_loaded_models", plain=True, by=f"{PATCHER} {MEMORY}", why="unloading reaches the ranks"),
        Calls("LoadedModel(model)", by=PATCHER, why="an entry for our model"),
        Calls("LoadedModel.model_load()", by=PATCHER, why="object patches, such as a new shift"),
        Has("LoadedModel", "model model_finalizer", by=PATCHER, why="replaces the entry of a clone"),
        Has("LoadedModel", "device model", by=MEMORY, why="which GPUs ComfyUI uses"),
        Calls("unet_dtype(*, device, model_params, supported_dtypes, weight_dtype)", by=DTYPE, why="the dtype of auto"),
        Calls("unet_manual_cast(weight_dtype, inference_device, supported_dtypes)", by=DTYPE, why="the dtype of auto"),
        Calls("cpu_mode()", by=DTYPE, why="the dtype of auto"),
        Calls("processing_interrupted()", by=CONNECTION, why="the user's interruption"),
        Calls("throw_exception_if_processing_interrupted()", by=CONNECTION, why="core's own exception"),
        Has("", "OOM_EXCEPTION", by=f"{CONNECTION} {VAE} {REFUSALS}", why="core's handling of too little memory"),
        Has("", "InterruptProcessingException", by=REFUSALS, why="an interruption is no node's fault"),
    ),
    *core_module(
        "comfy.hooks",
        Has("EnumHookMode", "MinVram", by=TEXT, why="what CLIP sets on its patcher"),
    ),
)
