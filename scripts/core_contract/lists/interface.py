"""How ComfyUI finds and shows the nodes: its V3 schema, folders, progress, previews, the web server."""

from scripts.core_contract.entry import core_module
from scripts.core_contract.kinds import Calls, Has, Mentions, Overrides, Passes

LOADER, SAMPLER, LAYOUT, VAE = "nodes/loader.py", "nodes/sampler.py", "nodes/layout.py", "nodes/vae.py"
CACHE = "nodes/cache.py"
CLASS_LABEL, CONNECTION, PREVIEWS = "nodes/class_label.py", "nodes/backend/connection.py", "nodes/remote/previews.py"
PREFLIGHT, CHECKPOINTS = "nodes/remote/preflight.py", "nodes/backend/checkpoints.py"
OPEN_SORA2 = " ".join(f"nodes/open_sora2/{name}.py" for name in ("guider", "prompt", "times", "video"))
OPEN_SORA1 = " ".join(f"nodes/open_sora1/{name}.py" for name in ("prompt", "video"))
NODES = f"{LOADER} {SAMPLER} {LAYOUT} {VAE} {CLASS_LABEL} {CACHE} {OPEN_SORA1} {OPEN_SORA2}"
CHECKED = f"{LOADER} nodes/model.py {VAE}"
PACKS = "nodes/backend/packs.py"
ROUTES, PAGE, GUARD = "nodes/panel/routes.py", "nodes/backend/page.py", "nodes/panel/guard.py"
STEPS = "nodes/backend/noted_steps.py"

ENTRIES = (
    *core_module(
        "comfy_api.latest.io",
        Has(
            "HiddenHolder",
            "unique_id prompt extra_pnginfo",
            by=f"{LOADER} nodes/picture_metadata.py",
            why="values of hidden inputs",
        ),
        Overrides("ComfyNode.define_schema()", by=NODES, why="every node has a schema"),
        Overrides("ComfyNode.execute(**kwargs)", by=NODES, why="every node's work"),
        Overrides("ComfyNode.validate_inputs(**kwargs)", by=f"{LOADER} {LAYOUT}", why="refusals when queued"),
        Overrides("ComfyNode.fingerprint_inputs(**kwargs)", by=LOADER, why="files of a model that change"),
    ),
    *core_module(
        "execution",
        Mentions("execute", "extra_data", by="nodes/picture_metadata.py", why="the metadata of the running prompt"),
        Mentions("", "extra_pnginfo", by="nodes/picture_metadata.py", why="where it is in there"),
    ),
    *core_module(
        "folder_paths",
        Mentions("", "custom_nodes", by=PACKS, why="the folder of packs"),
        Mentions("", "diffusers embeddings", by=f"{CHECKPOINTS} nodes/remote/clip.py", why="names of the folders"),
    ),
    *core_module(
        "comfy.utils",
        Calls(
            "ProgressBar.update_absolute(value, total, preview)", by=f"{CONNECTION} {PREVIEWS}", why="steps, previews"
        ),
        Calls(
            "repeat_to_batch_size(tensor, batch_size)", by="nodes/remote/record_replay.py", why="inputs of one sample"
        ),
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
        Has(
            "PromptServer",
            "instance routes user_manager client_id",
            by=f"{ROUTES} {PAGE}",
            why="the panel's routes, and what the page is told",
        ),
        Calls("PromptServer.send_sync(event, data, sid)", by=f"{ROUTES} {PAGE}", why="what the page is told"),
        Calls("PromptServer.send_progress_text(text, node_id)", by=CONNECTION, why="the text on a node"),
    ),
    *core_module(
        "app.user_manager",
        Mentions("UserManager", "users", by=GUARD, why="who may change something where other machines reach ComfyUI"),
        Mentions("UserManager.get_request_user_id", "comfy-user", by=GUARD, why="how a page says who uses it"),
    ),
    *core_module(
        "comfy_execution.progress",
        Calls("get_progress_state()", by=STEPS, why="steps of the running node"),
        Has("ProgressRegistry", "nodes dynprompt", by=STEPS, why="the running node"),
        Has("NodeProgressState", "value max", by=STEPS, why="steps of the running node"),
    ),
    *core_module(
        "nodes",
        Mentions("common_ksampler", "samples batch_index noise_mask", by=SAMPLER, why="keys of LATENT"),
        Mentions(
            "load_custom_node", "comfy_entrypoint WEB_DIRECTORY", by="__init__.py", why="how the extension is found"
        ),
    ),
    *core_module(
        "comfy_api.internal",
        Passes(
            "make_locked_method_func",
            "asyncio.iscoroutinefunction(method)",
            by=CHECKED,
            why="a check may be a coroutine",
            word="validate_inputs",
        ),
    ),
    *core_module(
        "execution",
        Passes(
            "validate_inputs",
            "resolve_map_node_over_list_results(ret)",
            by=CHECKED,
            why="checks of a queued prompt are awaited",
            word="validate_inputs",
        ),
        Mentions("", "OUTPUT_NODE", by=PREFLIGHT, why="which nodes of a prompt run"),
    ),
)
