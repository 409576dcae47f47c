"""The prompt's graph: ComfyUI's loaders that our nodes replace, expansion into other nodes, and lazy inputs."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, Overrides
from scripts.core_contract.model_kinds import Node

UPSTREAM, LOADER, MODEL, VAE = "nodes/remote/upstream.py", "nodes/loader.py", "nodes/model.py", "nodes/vae.py"
ADOPT, MEMORY_FILE = "nodes/remote/adopt.py", "nodes/remote/memory_file.py"
SAMPLER = "nodes/sampler.py"

ENTRIES = (
    *core_module(
        "comfy_execution.graph",
        Calls("DynamicPrompt.get_display_node_id(node_id)", by=f"{LOADER} {SAMPLER} {VAE}", why="where a text shows"),
    ),
    *core_module(
        "comfy_execution.graph_utils",
        Calls("Node.set_input(key, value)", by=UPSTREAM, why="inputs of a copied node"),
        Calls("Node.out(index)", by=UPSTREAM, why="an expansion"),
    ),
    *core_module(
        "comfy_api.latest.io",
        Has("HiddenHolder", "dynprompt", by=f"{LOADER} {MODEL} {SAMPLER} {VAE}", why="the prompt with expanded nodes"),
        Overrides("ComfyNode.check_lazy_status(**kwargs)", by=f"{MODEL} {VAE}", why="whether a loader has to run"),
    ),
    *core_module(
        "nodes",
        Node("UNETLoader", "unet_name weight_dtype", by=UPSTREAM, why="Load Diffusion Model"),
        Node("CheckpointLoaderSimple", "ckpt_name", by=UPSTREAM, why="Load Checkpoint"),
        Node("VAELoader", "vae_name", by=UPSTREAM, why="Load VAE"),
        Mentions("UNETLoader", "default diffusion_models", by=UPSTREAM, why="the file is loaded as it is"),
    ),
    *core_module(
        "comfy_extras.nodes_string",
        Node("StringConcatenate", "string_a string_b delimiter", by=UPSTREAM, why="the kind before a linked file name"),
    ),
    *core_module(
        "comfy.ldm.lightricks.vae.causal_video_autoencoder",
        Has("VideoVAE", "encoder decoder", by=ADOPT, why="an LTX VAE's settings"),
        Has("Encoder", "blocks_desc", by=ADOPT, why="an LTX VAE's settings"),
        Has("Decoder", "blocks_desc causal conv_in", by=ADOPT, why="an LTX VAE's settings"),
        Has("VideoVAE", "decode_noise_scale decode_timestep", by=ADOPT, why="how it decodes", since=(0, 27, 0)),
    ),
    *core_module(
        "folder_paths",
        Calls("get_full_path(folder_name, filename)", by="nodes/backend/checkpoints.py", why="a listed file"),
        Calls("get_full_path(folder_name, filename)", by="nodes/remote/unknown_lora.py", why="a LoRA's file"),
    ),
    *core_module(
        "comfy.sd",
        Calls("load_diffusion_model(unet_path, *, model_options)", by=ADOPT, why="the file of a loaded MODEL"),
        Calls("load_vae_patcher(vae_path)", by=ADOPT, why="the file of a loaded VAE", since=(0, 27, 0)),
        Calls(
            "load_checkpoint_vae_patcher(ckpt_path, *, model_options)",
            by=ADOPT,
            why="the file of a loaded VAE",
            since=(0, 27, 0),
        ),
    ),
    *core_module(
        "comfy.lora",
        Calls("calculate_weight(patches, weight, key)", by=MEMORY_FILE, why="merged and patched weights"),
    ),
    *core_module(
        "comfy.float",
        Calls("stochastic_rounding(value, dtype, *, seed)", by=MEMORY_FILE, why="patched weights in fp8"),
    ),
    *core_module(
        "comfy.model_patcher",
        Calls("get_key_weight(model, key)", by=MEMORY_FILE, why="weights, and how compressed ones are decoded"),
        Calls("ModelPatcher.model_state_dict(filter_prefix)", by=MEMORY_FILE, why="names of weights"),
        Has("ModelPatcher", "backup hook_backup", by=MEMORY_FILE, why="weights and their patches"),
        Has(
            "ModelPatcher",
            "cached_patcher_init",
            by=ADOPT,
            why="the file of a loaded MODEL",
            since=(0, 27, 0),
        ),
    ),
)
