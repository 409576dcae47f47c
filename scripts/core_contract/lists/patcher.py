"""ModelPatcher, and ComfyUI's memory: models whose weights lie elsewhere, and room for the ranks."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, Overrides, Passes

PATCHER, MEMORY = "nodes/remote/patcher.py", "nodes/backend/comfyui_models.py"
SAMPLER, REFUSALS = "nodes/sampler.py", "nodes/bridges/refusals.py"
LOOP, WEIGHTLESS = "nodes/remote/loop_choice.py", "nodes/remote/weightless_patcher.py"
STEP, PREVIEWS, DTYPE = "nodes/remote/record_replay.py", "nodes/remote/previews.py", "nodes/bridges/compute_dtype.py"

ENTRIES = (
    *core_module(
        "comfy.model_patcher",
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
        Calls("ModelPatcher.get_nested_additional_models()", by=PATCHER, why="models that come along"),
        Calls("ModelPatcher.get_model_object(name)", by=LOOP, why="a patched model_sampling"),
        Has("ModelPatcher", "load_device", by=f"{SAMPLER} {PREVIEWS}", why="where latents are"),
        Mentions("ModelPatcher.set_model_rope_options", "rope_options", by=REFUSALS, why="refused"),
        Mentions("set_model_options_patch_replace", "patches_replace", by=REFUSALS, why="refused"),
        Mentions("ModelPatcher.set_model_patch", "patches", by=REFUSALS, why="refused"),
        Overrides("ModelPatcher.get_all_callbacks(call_type)", by=PATCHER, why="left out of the recorded pass"),
        Mentions(
            "ModelPatcher.set_model_unet_function_wrapper",
            "model_function_wrapper",
            by=STEP,
            why="left out of the recorded pass",
        ),
    ),
    *core_module(
        "comfy.supported_models_base",
        Has("BASE", "supported_inference_dtypes", by=DTYPE, why="the dtype of auto"),
    ),
    *core_module(
        "comfy.model_management",
        Calls("free_memory(memory_required, device, keep_loaded)", by=MEMORY, why="room for the ranks"),
        Has("LoadedModel", "model model_finalizer", by=PATCHER, why="replaces the entry of a clone"),
        Has("LoadedModel", "device model", by=MEMORY, why="which GPUs ComfyUI uses"),
        Calls("unet_manual_cast(weight_dtype, inference_device, supported_dtypes)", by=DTYPE, why="the dtype of auto"),
        Calls("vae_dtype(device, allowed_dtypes)", by=DTYPE, why="the dtype of a VAE"),
        Calls("intermediate_dtype()", by="nodes/remote/vae.py", why="the dtype of images", optional=True),
    ),
    *core_module(
        "comfy.cli_args",
        Mentions(
            "",
            "--fp16-vae --bf16-vae --fp32-vae --cpu-vae",
            by=DTYPE,
            why="the dtype of a VAE",
            word="fp16_vae bf16_vae fp32_vae cpu_vae",
        ),
        Mentions(
            "",
            "--fp64-unet --fp32-unet --bf16-unet --fp16-unet --fp8_e4m3fn-unet --fp8_e5m2-unet --fp8_e8m0fnu-unet",
            by=DTYPE,
            why="the dtype of auto on GPUs that ComfyUI does not see",
            word="fp64_unet fp32_unet bf16_unet fp16_unet fp8_e4m3fn_unet fp8_e5m2_unet fp8_e8m0fnu_unet",
        ),
        Mentions(
            "",
            "--listen --multi-user",
            by="nodes/panel/guard.py",
            why="whether other machines reach ComfyUI, and whether it knows its users",
            word="listen multi_user",
        ),
    ),
)
