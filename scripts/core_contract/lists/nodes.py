"""Nodes of core that our workflows contain, or that our nodes know by their id."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Mentions
from scripts.core_contract.model_kinds import Node

PREFLIGHT, SAMPLER = "nodes/remote/preflight.py", "nodes/sampler.py"
WORKFLOWS = "workflows/api"

ENTRIES = (
    *core_module(
        "nodes",
        Node("CLIPTextEncode", "text clip", by=WORKFLOWS, why="prompts"),
        Node(
            "KSampler",
            "seed steps cfg sampler_name scheduler denoise model positive negative latent_image",
            by=WORKFLOWS,
            why="native sampling",
        ),
        Node(
            "KSamplerAdvanced",
            "add_noise noise_seed steps cfg sampler_name scheduler start_at_step end_at_step "
            "return_with_leftover_noise model positive negative latent_image",
            by=WORKFLOWS,
            why="one of two models",
        ),
        Node("UNETLoader", "unet_name weight_dtype", by=WORKFLOWS, why="a model's file"),
        Node("CLIPLoader", "clip_name type device", by=WORKFLOWS, why="a text encoder's file"),
        Node("DualCLIPLoader", "clip_name1 clip_name2 type device", by=WORKFLOWS, why="text encoders' files"),
        Node("VAELoader", "vae_name", by=WORKFLOWS, why="a VAE's file"),
        Node("LoraLoaderModelOnly", "model lora_name strength_model", by=WORKFLOWS, why="a LoRA for few steps"),
        Node("ConditioningZeroOut", "conditioning", by=WORKFLOWS, why="no negative prompt"),
        Node("VAEDecode", "samples vae", by=WORKFLOWS, why="native decoding"),
        Node("SaveImage", "filename_prefix images", by=WORKFLOWS, why="the image"),
        Node("CheckpointLoaderSimple", "ckpt_name", by=WORKFLOWS, why="a checkpoint's file"),
        Node("LoadImage", "image", by=WORKFLOWS, why="a picture to edit, or to begin with"),
        Node("VAEEncode", "pixels vae", by=WORKFLOWS, why="a picture to edit"),
        Mentions(
            "common_ksampler",
            "downscale_ratio_spacial downscale_ratio_temporal",
            by=SAMPLER,
            why="entries of an empty LATENT",
            since=(0, 27, 0),
        ),
        Node("KSampler", "cfg model", by=PREFLIGHT, why="its cfg of 1 leaves the negative prompt out"),
        Node("KSamplerAdvanced", "cfg model", by=PREFLIGHT, why="its cfg of 1 leaves the negative prompt out"),
    ),
    *core_module(
        "comfy_extras.nodes_hunyuan",
        Node("EmptyHunyuanLatentVideo", "width height length batch_size", by=WORKFLOWS, why="an empty latent"),
    ),
    *core_module(
        "comfy_extras.nodes_sd3",
        Node("EmptySD3LatentImage", "width height batch_size", by=WORKFLOWS, why="an empty latent"),
    ),
    *core_module(
        "comfy_extras.nodes_cond",
        Node("T5TokenizerOptions", "clip min_padding min_length", by=WORKFLOWS, why="how T5 pads a prompt"),
    ),
    *core_module(
        "comfy_extras.nodes_custom_sampler",
        Node("RandomNoise", "noise_seed", by=WORKFLOWS, why="the noise of a sampler with a guider"),
        Node("BasicGuider", "model conditioning", by=WORKFLOWS, why="one prompt"),
        Node("KSamplerSelect", "sampler_name", by=WORKFLOWS, why="a sampler for a guider"),
        Node("BasicScheduler", "model scheduler steps denoise", by=WORKFLOWS, why="the sigmas of a sampler"),
        Node("SamplerCustomAdvanced", "noise guider sampler sigmas latent_image", by=WORKFLOWS, why="runs a guider"),
        Node("CFGGuider", "model positive negative cfg", by=WORKFLOWS, why="two prompts"),
        Node("ManualSigmas", "sigmas", by=WORKFLOWS, why="the sigmas of a distilled model"),
    ),
    *core_module(
        "comfy_extras.nodes_flux",
        Node("FluxGuidance", "conditioning guidance", by=WORKFLOWS, why="the guidance of Flux"),
        Node("EmptyFlux2LatentImage", "width height batch_size", by=WORKFLOWS, why="an empty latent"),
        Node("Flux2Scheduler", "steps width height", by=WORKFLOWS, why="the sigmas of Flux.2"),
        Node("FluxKontextImageScale", "image", by=WORKFLOWS, why="a picture to edit, in a size that the model knows"),
        Node(
            "FluxKontextMultiReferenceLatentMethod",
            "conditioning reference_latents_method",
            by=WORKFLOWS,
            why="the place of a picture to edit",
        ),
    ),
    *core_module(
        "comfy_extras.nodes_edit_model",
        Node("ReferenceLatent", "conditioning latent", by=WORKFLOWS, why="a picture to edit"),
    ),
    *core_module(
        "comfy_extras.nodes_qwen",
        Node("TextEncodeQwenImageEditPlus", "clip prompt vae image1", by=WORKFLOWS, why="a picture and what to change"),
    ),
    *core_module(
        "comfy_extras.nodes_cfg",
        Node("CFGNorm", "model strength", by=WORKFLOWS, why="guidance of the length that the prompt alone has"),
    ),
    *core_module(
        "comfy_extras.nodes_wan",
        Node(
            "WanImageToVideo",
            "width height length batch_size positive negative vae start_image",
            by=WORKFLOWS,
            why="a first frame",
        ),
    ),
    *core_module(
        "comfy_extras.nodes_lt",
        Node("EmptyLTXVLatentVideo", "width height length batch_size", by=WORKFLOWS, why="an empty latent"),
        Node("LTXVConditioning", "positive negative frame_rate", by=WORKFLOWS, why="the frame rate"),
        Node("LTXVConcatAVLatent", "video_latent audio_latent", by=WORKFLOWS, why="picture and sound together"),
        Node("LTXVSeparateAVLatent", "av_latent", by=WORKFLOWS, why="picture and sound apart"),
    ),
    *core_module(
        "comfy_extras.nodes_lt_audio",
        Node(
            "LTXAVTextEncoderLoader",
            "text_encoder ckpt_name device",
            by=WORKFLOWS,
            why="a text encoder's file",
            since=(0, 27, 0),
        ),
        Node("LTXVAudioVAELoader", "ckpt_name", by=WORKFLOWS, why="the VAE of sound in a checkpoint"),
        Node("LTXVEmptyLatentAudio", "frames_number frame_rate batch_size audio_vae", by=WORKFLOWS, why="silence"),
        Node("LTXVAudioVAEDecode", "samples audio_vae", by=WORKFLOWS, why="the sound of a video"),
    ),
    *core_module(
        "comfy_extras.nodes_video",
        Node("CreateVideo", "images fps audio", by=WORKFLOWS, why="the video"),
        Node("SaveVideo", "video filename_prefix format codec", by=WORKFLOWS, why="the video"),
    ),
    *core_module(
        "comfy_extras.nodes_audio",
        Node("VAEDecodeAudio", "samples vae", by=WORKFLOWS, why="the sound of a video"),
    ),
    *core_module(
        "comfy_extras.nodes_minimax_h3",
        Node(
            "EmptyMiniMaxH3LatentAV",
            "width height length",
            by=WORKFLOWS,
            why="an empty latent of picture and sound",
            since=(0, 33, 0),
        ),
    ),
    *core_module(
        "comfy_extras.nodes_images",
        Node("SaveAnimatedWEBP", "filename_prefix fps lossless quality method images", by=WORKFLOWS, why="the video"),
    ),
    *core_module(
        "comfy_extras.nodes_custom_sampler",
        Node("SamplerCustom", "cfg model", by=PREFLIGHT, why="its cfg of 1 leaves the negative prompt out"),
        Node("CFGGuider", "cfg model", by=PREFLIGHT, why="its cfg of 1 leaves the negative prompt out"),
    ),
    *core_module(
        "comfy_extras.nodes_model_advanced",
        Node("ModelSamplingSD3", "model shift", by=WORKFLOWS, why="a schedule"),
        Node("ModelSamplingAuraFlow", "model shift", by=WORKFLOWS, why="a schedule"),
        Node("ModelSamplingSD3", "model", by=PREFLIGHT, why="passes the model on", word="ModelSampling model"),
        Node("ModelSamplingFlux", "model", by=PREFLIGHT, why="passes the model on", word="ModelSampling model"),
    ),
    *core_module(
        "comfy_extras.nodes_pag",
        Node("PerturbedAttentionGuidance", "model", by=PREFLIGHT, why="refused: it replaces layers"),
    ),
    *core_module(
        "comfy_extras.nodes_ip2p",
        Node("InstructPixToPixConditioning", by="nodes/families/cogvideox.py", why="named as what gives the image"),
    ),
    *core_module(
        "comfy_extras.nodes_hunyuan",
        Node("HunyuanImageToVideo", by="nodes/families/hunyuan_video.py", why="named as what gives the first frame"),
    ),
    *core_module(
        "comfy_extras.nodes_flux",
        Node("FluxDisableGuidance", by="nodes/bridges/bridge.py", why="named as what to remove"),
    ),
)
