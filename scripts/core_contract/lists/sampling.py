"""What happens around a step: samplers, guiders, wrappers, schedules, and conditioning that is refused."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, Overrides, Passes

NODE, SAMPLER, LOOP = "nodes/sampler.py", "nodes/remote/backend_sampler.py", "nodes/remote/loop_choice.py"
PATCHER, MODEL, STEP, ADDED = (
    f"nodes/remote/{name}.py" for name in ("patcher", "transformer", "record_replay", "added_to_steps")
)
CACHE = "nodes/remote/step_cache.py"
REFUSALS, CUSTOM_MODEL, CHOICE = (
    f"nodes/bridges/{name}.py" for name in ("refusals", "custom_model", "attention_choice")
)

ENTRIES = (
    *core_module(
        "comfy.sample",
        Calls("fix_empty_latent_channels(model, latent_image)", by=NODE, why="empty latents of another family"),
        Calls(
            "fix_empty_latent_channels(model, latent_image, *, downscale_ratio_spacial, downscale_ratio_temporal)",
            by=NODE,
            why="empty latents of another size",
            since=(0, 27, 0),
        ),
        Calls("prepare_noise(latent_image, seed, noise_inds)", by=NODE, why="native noise"),
        Calls(
            "sample_custom(model, noise, cfg, sampler, sigmas, positive, negative, latent_image, *, noise_mask, "
            "callback, disable_pbar, seed)",
            by=NODE,
            why="all of sampling but the step loop",
        ),
    ),
    *core_module(
        "comfy.samplers",
        Calls("KSampler(model, steps, device, sampler, scheduler, denoise)", by=NODE, why="the schedule"),
        Calls("Sampler.max_denoise(model_wrap, sigmas)", by=SAMPLER, why="whether noise is all there is"),
        Has("KSAMPLER", "sampler_function", by=PATCHER, why="a sampler's name"),
        Overrides(
            "KSAMPLER.sample(model_wrap, sigmas, extra_args, callback, noise, latent_image, denoise_mask, "
            "disable_pbar)",
            by=SAMPLER,
            why="the sampler that hands the loop over",
        ),
        Passes(
            "CFGGuider.inner_sample",
            "executor.execute(self, sigmas, extra_args, callback, noise, latent_image, denoise_mask, disable_pbar)",
            by=SAMPLER,
            why="how that sampler is called",
            word="Sampler extra_args",
        ),
        Mentions("CFGGuider.inner_sample", "model_options seed", by=SAMPLER, why="keys of extra_args"),
        Passes(
            "KSamplerX0Inpaint.__call__",
            "self.inner_model(x, sigma, model_options=model_options, seed=seed)",
            by=SAMPLER,
            why="asks the guider as native samplers do",
            word="model_options seed",
        ),
        Calls(
            "CFGGuider.outer_predict_noise(x, timestep, *, model_options, seed)",
            by=SAMPLER,
            why="asks the guider as native samplers do",
            word="model_options seed",
        ),
        Passes(
            "KSAMPLER.sample",
            "callback(x['i'], x['denoised'], x['x'], total_steps)",
            by=f"{SAMPLER} nodes/remote/previews.py",
            why="reports a step as native samplers do",
        ),
        Has("CFGGuider", "inner_model", by=SAMPLER, why="the model that a sampler is called with"),
        Has("CFGGuider", "cfg conds model_options model_patcher", by=PATCHER, why="checks before sampling begins"),
        Overrides(
            "CFGGuider.outer_sample(noise, latent_image, sampler, sigmas, denoise_mask, *args, **kwargs)",
            by=PATCHER,
            why="wrapped by the checks before sampling",
            word="OUTER_SAMPLE",
        ),
        Passes(
            "CFGGuider.sample",
            "executor.execute(noise, latent_image, sampler, sigmas, denoise_mask, callback, disable_pbar, seed, "
            "latent_shapes=latent_shapes)",
            by=PATCHER,
            why="how that wrapper is called",
            word="OUTER_SAMPLE latent_shapes",
        ),
        Overrides(
            "_calc_cond_batch(model, conds, x_in, timestep, model_options)",
            by=PATCHER,
            why="wrapped, to take all branches at once",
            word="CALC_COND_BATCH",
        ),
        Passes(
            "_calc_cond_batch_outer",
            "executor.execute(model, conds, x_in, timestep, model_options)",
            by=PATCHER,
            why="how that wrapper is called",
            word="CALC_COND_BATCH",
        ),
        Passes(
            "_calc_cond_batch",
            "model.apply_model(input_x, timestep_, **c)",
            by=f"{STEP} {MODEL}",
            why="runs the branches",
            word="apply_model cond_or_uncond",
        ),
        Mentions(
            "_calc_cond_batch",
            "model_function_wrapper",
            by=STEP,
            why="left out of the recorded pass",
        ),
        Mentions("_calc_cond_batch", "sigmas", by=CACHE, why="the time of a call"),
        Mentions(
            "",
            "context_handler model_function_wrapper sampler_calc_cond_batch_function",
            by=CACHE,
            why="nodes that call the model for parts of the latent",
        ),
        Mentions("_calc_cond_batch", "cond_or_uncond", by=MODEL, why="which branches a call batches"),
        Mentions("sampling_function", "disable_cfg1_optimization", by=f"{PATCHER} {ADDED}", why="prompts at cfg 1"),
        Mentions("get_area_and_mult", "area mask hooks", by=REFUSALS, why="conditioning that changes over the picture"),
        Mentions("get_area_and_mult", "strength", by=LOOP, why="a weaker prompt"),
        Mentions(
            "",
            "start_percent end_percent clip_start_percent clip_end_percent default gligen control",
            by=REFUSALS,
            why="conditioning that changes over the steps",
        ),
        Mentions("cast_to_load_options", "to_load_options", by=ADDED, why="an option that core itself leaves"),
        Mentions("encode_model_conds", "noise", by="nodes/families/cogvideox.py", why="an argument of extra_conds"),
    ),
    *core_module(
        "comfy.k_diffusion.sampling",
        Has("", "sample_euler_cfg_pp", by=PATCHER, why="names of CFG++ samplers", word="cfg_pp"),
    ),
    *core_module(
        "comfy_extras.nodes_advanced_samplers",
        Has("", "sample_euler_pp", by=PATCHER, why="names of CFG++ samplers", word="euler_pp"),
    ),
    *core_module(
        "comfy_extras.nodes_easycache",
        Mentions("", "easycache", by=CACHE, why="core's own step caches"),
    ),
    *core_module(
        "comfy.sampler_helpers",
        Calls("get_models_from_cond(cond, model_type)", by=PATCHER, why="models that conditioning brings along"),
        Mentions("get_additional_models", "additional_models", by=PATCHER, why="their key"),
        Overrides(
            "_prepare_sampling(model, noise_shape, conds, model_options, **kwargs)",
            by=PATCHER,
            why="replaced, to load nothing on ComfyUI's device",
            word="PREPARE_SAMPLING",
        ),
        Passes(
            "prepare_sampling",
            "executor.execute(model, noise_shape, conds, **kwargs)",
            by=PATCHER,
            why="how that wrapper is called",
            word="PREPARE_SAMPLING",
        ),
        Mentions("prepare_model_patcher", "wrappers", by=MODEL, why="where wrappers are in transformer_options"),
        Mentions("convert_cond", "cross_attn", by=CUSTOM_MODEL, why="a prompt's name in extra_conds"),
    ),
    *core_module(
        "comfy.patcher_extension",
        Calls("get_all_wrappers(wrapper_type, transformer_options)", by=CUSTOM_MODEL, why="other nodes' wrappers"),
        Calls("WrapperExecutor.new_class_executor(original, class_obj, wrappers)", by=CUSTOM_MODEL, why="runs them"),
        Calls("WrapperExecutor.execute(*args, **kwargs)", by=CUSTOM_MODEL, why="runs them"),
        Has("WrapperExecutor", "class_obj", by=PATCHER, why="the guider"),
        Has("WrapperExecutor", "original", by=f"{PATCHER} {STEP}", why="core's own function"),
        Passes(
            "WrapperExecutor.execute",
            "self.wrappers[self.idx](self, *args, **kwargs)",
            by=f"{PATCHER} {STEP}",
            why="a wrapper gets the executor first",
            word="class_obj original",
        ),
    ),
    *core_module(
        "comfy.model_sampling",
        Has("", "V_PREDICTION_DDPM", by=LOOP, why="refused: made for VOIDSampler", optional=True),
        Has("CONST", "calculate_input calculate_denoised noise_scaling", by=SAMPLER, why="tells predictions apart"),
        Has("EPS", "calculate_input calculate_denoised noise_scaling", by=SAMPLER, why="tells predictions apart"),
        Has("V_PREDICTION", "calculate_input calculate_denoised", by=SAMPLER, why="tells predictions apart"),
        Calls("CONST.noise_scaling(sigma, noise, latent_image, max_denoise)", by=SAMPLER, why="the first latent"),
        Calls("EPS.noise_scaling(sigma, noise, latent_image, max_denoise)", by=SAMPLER, why="the first latent"),
        Calls("CONST.inverse_noise_scaling(sigma, latent)", by=SAMPLER, why="the last latent"),
        Calls("EPS.inverse_noise_scaling(sigma, latent)", by=SAMPLER, why="the last latent"),
        Calls("ModelSamplingDiscreteFlow.timestep(sigma)", by=SAMPLER, why="timesteps of flow models"),
        Calls("ModelSamplingFlux.timestep(sigma)", by=SAMPLER, why="timesteps of flow models"),
        Calls("ModelSamplingDiscreteFlow.percent_to_sigma(percent)", by=SAMPLER, why="the first sigma of SDE samplers"),
        Calls("ModelSamplingFlux.percent_to_sigma(percent)", by=SAMPLER, why="the first sigma of SDE samplers"),
        Has("ModelSamplingDiscreteFlow", "noise_scale", by=SAMPLER, why="ModelNoiseScale", optional=True),
        Calls("ModelSamplingDiscrete.timestep(sigma)", by=SAMPLER, why="timesteps of other models"),
        Has("ModelSamplingDiscrete", "log_sigmas sigma_data", by=SAMPLER, why="timesteps of other models"),
        Calls("ModelSamplingDiscrete.set_sigmas(sigmas)", by=CUSTOM_MODEL, why="schedules of custom models"),
        Mentions(
            "ModelSamplingDiscrete.__init__",
            "beta_schedule linear_start linear_end timesteps zsnr",
            by=CUSTOM_MODEL,
            why="keys of sampling_settings",
        ),
    ),
    *core_module(
        "comfy.ldm.modules.diffusionmodules.util",
        Calls(
            "make_beta_schedule(schedule, n_timestep, *, linear_start, linear_end)",
            by=CUSTOM_MODEL,
            why="schedules of custom models",
        ),
        Mentions("make_beta_schedule", "linear sqrt_linear", by=CUSTOM_MODEL, why="names of schedules"),
    ),
    *core_module(
        "comfy.nested_tensor",
        Has("NestedTensor", "is_nested", by=REFUSALS, why="latents of several tensors are refused"),
    ),
    *core_module(
        "comfy.ldm.modules.attention",
        Mentions("wrap_attn", "optimized_attention_override", by=CHOICE, why="refused: attention runs in the ranks"),
        Has("", "attention_pytorch", by=CHOICE, why="a kernel of a node's choice, left to the ranks"),
        Has("", "attention_comfy_kitchen_int8", by=CHOICE, why="the other kernel of that node", since=(0, 33, 0)),
    ),
    *core_module(
        "comfy_api.torch_helpers.torch_compile",
        Mentions("", "torch_compile_kwargs", by=REFUSALS, why="refused: layers run in the ranks"),
    ),
)
