"""Core's model classes and conditioning: what a MODEL is made of, and what it reads from our stand-in."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, Passes, ReadsOnly

BRIDGE, CUSTOM_MODEL, REFUSALS = "nodes/bridges/bridge.py", "nodes/bridges/custom_model.py", "nodes/bridges/refusals.py"
MODEL, CORE_MODEL, PATCHER = "nodes/remote/transformer.py", "nodes/remote/model.py", "nodes/remote/patcher.py"
SAMPLER = "nodes/remote/backend_sampler.py"

ENTRIES = (
    *core_module(
        "comfy.model_base",
        Mentions(
            "BaseModel.extra_conds", "c_concat c_crossattn cross_attn", by=CUSTOM_MODEL, why="arguments of a call"
        ),
        Has("BaseModel", "diffusion_model latent_format", by=CORE_MODEL, why="where our stand-in goes"),
        Has("BaseModel", "diffusion_model", by=f"{PATCHER} {SAMPLER}", why="finds our stand-in"),
        Has("BaseModel", "model_sampling", by=SAMPLER, why="noise and timesteps"),
        Has(
            "BaseModel",
            "memory_usage_factor state_dict_for_saving",
            by=PATCHER,
            why="weighs nothing, saving is refused",
        ),
        Calls("BaseModel.scale_latent_inpaint(*, sigma, noise, latent_image, x)", by=SAMPLER, why="what a mask keeps"),
        Mentions(
            "BaseModel.__init__", "disable_unet_model_creation", by=f"{BRIDGE} {CUSTOM_MODEL}", why="no weights here"
        ),
        Has("BaseModel", "_apply_model", by="nodes/remote/record_replay.py", why="runs past wrappers"),
        Passes(
            "BaseModel._apply_model",
            "self.diffusion_model(xc, t, context=context, control=control, transformer_options=transformer_options, "
            "**extra_conds)",
            by=MODEL,
            why="how the stand-in is called",
            word="forward transformer_options",
        ),
        ReadsOnly(
            "BaseModel",
            "self.diffusion_model",
            "dtype eval to load_state_dict requires_grad_ state_dict",
            by=MODEL,
            why="the stand-in has these",
            word="dtype state_dict",
        ),
        Mentions(
            "",
            "concat_latent_image concat_mask concat_image noise_concat clip_vision_output reference_latents "
            "vace_frames time_dim_concat camera_conditions audio_embed reference_motion control_video "
            "face_video_pixels pose_video_latent unclip_conditioning ref_latent",
            by=REFUSALS,
            why="conditioning that models without an input for it refuse",
        ),
        Mentions(
            "",
            "clip_vision_outputs reference_latents_text_embeds context_latents",
            by=REFUSALS,
            why="conditioning that is refused",
            since=(0, 27, 0),
        ),
        Mentions("BaseModel.extra_conds", "crossattn_controlnet", by=MODEL, why="only ControlNets use it"),
    ),
)
