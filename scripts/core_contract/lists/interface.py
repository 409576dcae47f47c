"""How ComfyUI finds and shows the nodes: its V3 schema, folders, progress, previews, the web server."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, Overrides

LOADER, SAMPLER, LAYOUT, VAE = "nodes/loader.py", "nodes/sampler.py", "nodes/layout.py", "nodes/vae.py"
CLASS_LABEL, CONNECTION, PREVIEWS = "nodes/class_label.py", "nodes/backend/connection.py", "nodes/remote/previews.py"
PREFLIGHT, CHECKPOINTS = "nodes/remote/preflight.py", "nodes/backend/checkpoints.py"
NODES = f"{LOADER} {SAMPLER} {LAYOUT} {VAE} {CLASS_LABEL}"
PACKS = "nodes/backend/packs.py"

ENTRIES = (
    *core_module(
        "comfy_api.latest",
        Has("", "ComfyExtension io", by="nodes/__init__.py", why="the V3 node interface"),
        Overrides("ComfyExtension.get_node_list()", by="nodes/__init__.py", why="lists our nodes"),
    ),
    *core_module(
        "comfy_api.latest.io",
        Has("", "ComfyNode NodeOutput Schema Hidden", by=NODES, why="what nodes are made of"),
        Has("", "Int Combo Conditioning Latent", by=f"{SAMPLER} {LAYOUT} {CLASS_LABEL}", why="types of inputs"),
        Has("", "Custom", by=LAYOUT, why="the layout's type"),
        Calls(
            "Schema(*, node_id, display_name, category, description, inputs, outputs, hidden)",
            by=f"{LOADER} {SAMPLER} {VAE}",
            why="a node's schema",
        ),
        Calls("NodeOutput(*args, ui)", by=f"{LOADER} {SAMPLER}", why="the outputs, and the text on the node"),
        Calls(
            "Combo.Input(id, *, options, default, optional, tooltip)",
            by=f"{LOADER} {LAYOUT}",
            why="lists to choose from",
        ),
        Calls("Int.Input(id, *, default, min, max, step, optional, tooltip)", by=f"{VAE} {LAYOUT}", why="numbers"),
        Calls("Float.Input(id, *, default, min, max, step, tooltip)", by=SAMPLER, why="cfg and denoise"),
        Calls("String.Input(id, *, default, optional, tooltip)", by=f"{LOADER} {LAYOUT}", why="devices and balance"),
        Calls("Boolean.Input(id, *, default, optional, tooltip)", by=LAYOUT, why="shard_weights"),
        Calls("Custom(io_type)", by=LAYOUT, why="the layout's type"),
        Calls(
            "ComfyTypeIO.Input(id, *, optional, tooltip)",
            by=f"{LOADER} {LAYOUT}",
            why="the layout's input",
            word="Custom Input",
        ),
        Calls(
            "ComfyTypeIO.Output(*, display_name, tooltip)", by=LAYOUT, why="the layout's output", word="Custom Output"
        ),
        Calls("Model.Input(id, *, tooltip)", by=SAMPLER, why="its MODEL"),
        Calls("Vae.Input(id, *, tooltip)", by=VAE, why="its VAE"),
        Calls("Latent.Input(id, *, tooltip)", by=f"{SAMPLER} {VAE}", why="its LATENT"),
        Calls("Image.Input(id, *, tooltip)", by=VAE, why="its IMAGE"),
        Calls("Conditioning.Input(id, *, tooltip)", by=SAMPLER, why="its prompts"),
        Calls("Model.Output(*, tooltip)", by=LOADER, why="its MODEL"),
        Calls("Clip.Output(*, tooltip)", by=LOADER, why="its CLIP"),
        Calls("Vae.Output(*, tooltip)", by=LOADER, why="its VAE"),
        Calls("Latent.Output(*, tooltip)", by=f"{SAMPLER} {VAE}", why="its LATENT"),
        Calls("Image.Output(*, tooltip)", by=VAE, why="its IMAGE"),
        Calls("Conditioning.Output(*, display_name, tooltip)", by=CLASS_LABEL, why="a class instead of a prompt"),
        Has("Hidden", "unique_id prompt extra_pnginfo", by=f"{LOADER} {SAMPLER}", why="hidden inputs"),
        Has(
            "HiddenHolder",
            "unique_id prompt extra_pnginfo",
            by=f"{LOADER} nodes/picture_metadata.py",
            why="values of hidden inputs",
        ),
        Has("ComfyNode", "hidden", by=f"{LOADER} {SAMPLER} {VAE}", why="values of hidden inputs"),
        Overrides("ComfyNode.define_schema()", by=NODES, why="every node has a schema"),
        Overrides("ComfyNode.execute(**kwargs)", by=NODES, why="every node's work"),
        Overrides("ComfyNode.validate_inputs(**kwargs)", by=f"{LOADER} {LAYOUT}", why="refusals when queued"),
        Overrides("ComfyNode.fingerprint_inputs(**kwargs)", by=LOADER, why="files of a model that change"),
    ),
    *core_module(
        "folder_paths",
        Calls(
            "get_folder_paths(folder_name)",
            by=f"{CHECKPOINTS} {PACKS} nodes/remote/clip.py",
            why="models/diffusers, embeddings, packs",
        ),
        Calls("recursive_search(directory, *, excluded_dir_names)", by=CHECKPOINTS, why="GGUF files"),
        Has("", "folder_names_and_paths", by=CHECKPOINTS, why="whether ComfyUI-GGUF has folders of its own"),
        Has("", "base_path", by=PACKS, why="which code is ComfyUI's"),
        Mentions("", "custom_nodes", by=PACKS, why="the folder of packs"),
        Mentions("", "diffusers embeddings", by=f"{CHECKPOINTS} nodes/remote/clip.py", why="names of the folders"),
    ),
    *core_module(
        "comfy.utils",
        Calls("ProgressBar(total)", by=f"{CONNECTION} {PREVIEWS}", why="the node's progress bar"),
        Calls(
            "ProgressBar.update_absolute(value, total, preview)", by=f"{CONNECTION} {PREVIEWS}", why="steps, previews"
        ),
        Has("", "PROGRESS_BAR_ENABLED", by=SAMPLER, why="whether the terminal shows progress"),
        Calls("repeat_to_batch_size(tensor, batch_size)", by="nodes/remote/transformer.py", why="inputs of one sample"),
        Calls("load_torch_file(ckpt, *, safe_load)", by="nodes/remote/clip.py", why="text encoders that ComfyUI runs"),
        Calls(
            "state_dict_prefix_replace(state_dict, replace_prefix)", by="nodes/remote/clip.py", why="names of weights"
        ),
    ),
    *core_module(
        "latent_preview",
        Calls("get_previewer(device, latent_format)", by=PREVIEWS, why="the user's choice of previews"),
        Calls("LatentPreviewer.decode_latent_to_preview_image(preview_format, x0)", by=PREVIEWS, why="a preview"),
    ),
    *core_module(
        "server",
        Has("PromptServer", "instance send_progress_text", by=CONNECTION, why="the text on a node"),
        Calls("PromptServer.send_progress_text(text, node_id)", by=CONNECTION, why="the text on a node"),
    ),
    *core_module(
        "nodes",
        Mentions("common_ksampler", "samples batch_index noise_mask", by=SAMPLER, why="keys of LATENT"),
        Has("", "NODE_CLASS_MAPPINGS", plain=True, by=f"{PREFLIGHT} {PACKS}", why="classes of nodes"),
        Mentions(
            "load_custom_node", "comfy_entrypoint WEB_DIRECTORY", by="__init__.py", why="how the extension is found"
        ),
    ),
    *core_module(
        "execution",
        Mentions("", "OUTPUT_NODE", by=PREFLIGHT, why="which nodes of a prompt run"),
    ),
)
