"""Makes a workflow of the page parallel, with a look at the files that its loaders name."""

from pathlib import Path
from typing import Any

from ...parallel_backend.checkpoint.opening import open_checkpoint
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.make_parallel.report import SENTENCES, Added, Kept, Kind
from ...parallel_backend.make_parallel.workflow import make_parallel
from ...parallel_backend.vaes import vae_of
from ..backend import checkpoints
from ..families.registry import bridge_for


def made_parallel(workflow: Any) -> dict[str, Any]:
    """Return the parallel workflow, what was put in, and what stays as it is.

    Raises:
        InvalidRequest: it is no workflow.
    """
    made = make_parallel(workflow, readable=reason_of_file)
    return {
        "workflow": made.workflow,
        "added": [_added(each) for each in made.added],
        "kept": [_kept(each) for each in made.kept],
    }


def reason_of_file(loader: str, file: str, kind: Kind) -> str:
    """Return why a file cannot be parallel, by its header; "" if it can, or is not here or still empty."""
    path = _path(loader, file)
    if path is None or not path.is_file() or not path.stat().st_size:
        return ""
    try:
        checkpoint = open_checkpoint(path)
        if kind == "MODEL":
            bridge_for(checkpoint)
        elif "vae" in checkpoint.components:
            vae_of(checkpoint)
        else:
            return f"{path.name} has no VAE that ranks can run"
    except InvalidRequest as error:
        return str(error)
    return ""


def _path(loader: str, file: str) -> Path | None:
    folders = {"UNETLoader": "diffusion_models", "VAELoader": checkpoints.VAE_KIND}
    kind = folders.get(loader, "diffusion_models" if loader.startswith("UnetLoaderGGUF") else "checkpoints")
    try:
        return checkpoints.path_of(f"{kind}/{file}")
    except InvalidRequest:
        return None


def _added(added: Added) -> dict[str, str]:
    return {"node": added.node, "kind": added.kind, "loader": added.loader.title, "text": str(added)}


def _kept(kept: Kept) -> dict[str, str]:
    sentence = SENTENCES[kept.reason].format(detail=kept.detail)
    ids = {"node": kept.loader.node, "loader": kept.loader.title, "kind": kept.kind}
    return {**ids, "reason": kept.reason, "detail": kept.detail, "sentence": sentence}
