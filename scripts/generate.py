"""Generate files from others: python -m scripts.generate (in .venv).

It writes the table of environment variables into docs/reference.md, that of model files into docs/models.md, the
addresses of icon and banner into pyproject.toml, the page of measured steps, the pictures of the documentation, the
example workflows in the web page's format with drawings of those whose models are not included, and the English texts
of the nodes. With ``--thumbnails`` it also runs the other ones in a real ComfyUI, so that their thumbnails show what a
user gets.
"""

import argparse
import json
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from scripts import (
    blueprint,
    comfy_paths,
    models_table,
    registry,
    settings_table,
    workflow_thumbnail,
    workflows,
)
from scripts.comfy_api import ComfyClient
from scripts.comfy_server import ComfyServer
from scripts.docs_pictures import files as pictures
from scripts.docs_pictures import measured

THUMBNAIL = (400, 400)


def thumbnail(client: ComfyClient, name: str) -> Image.Image:
    """The image that a workflow makes, or the middle frame of its video, enlarged."""
    file = client.run(workflows.api(name), deadline=300.0).files[0]
    image = Image.open(BytesIO(client.fetch(file)))
    image.seek(getattr(image, "n_frames", 1) // 2)
    return image.convert("RGB").resize(THUMBNAIL, Image.Resampling.LANCZOS)


def english(object_info: dict[str, Any]) -> dict[str, Any]:
    """The texts of our nodes as a locale file, the pattern for the other languages."""
    ours = {key: info for key, info in object_info.items() if info["category"] == "Parallel DiT"}
    return {key: _texts(ours[key]) for key in sorted(ours)}


def _texts(info: dict[str, Any]) -> dict[str, Any]:
    inputs = {name: options["tooltip"] for name, (_, options) in workflows.declared_inputs(info).items()}
    outputs = zip(info["output_name"], info["output_tooltips"], strict=True)
    return {
        "display_name": info["display_name"],
        "description": info["description"],
        "inputs": {name: {"name": name, "tooltip": text} for name, text in inputs.items()},
        "outputs": {str(i): {"name": name, "tooltip": text} for i, (name, text) in enumerate(outputs)},
    }


def write(path: Path, content: object) -> None:
    """Write a JSON file."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_drawings() -> None:
    """Write a drawing beside each workflow whose model is not included."""
    for name in filter(workflows.needs_download, workflows.names()):
        _save(workflow_thumbnail.draw(name, workflows.graph(name)), name)


def write_thumbnails(server: ComfyServer) -> None:
    """Write what each of the other workflows makes beside it."""
    for name in workflows.names():
        if not workflows.needs_download(name):
            _save(thumbnail(server.client, name), name)


def _save(picture: Image.Image, name: str) -> None:
    picture.save(workflows.FOLDER / f"{name}.jpg", quality=88)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--thumbnails", action="store_true", help="also run the workflows that need no download")
    thumbnails = parser.parse_args().thumbnails
    settings_table.write()
    models_table.write()
    registry.write()
    measured.write()
    pictures.write()
    comfyuis = comfy_paths.candidates()
    if not comfyuis:
        raise SystemExit("No ComfyUI found: set COMFYUI_PATH to a checkout.")
    server = ComfyServer(comfyuis[0])
    with server:
        info = server.client.object_info()
        write(comfy_paths.ROOT / "locales" / "en" / "nodeDefs.json", english(info))
        for name in workflows.names():
            write(workflows.FOLDER / f"{name}.json", workflows.to_graph(name, workflows.api(name), info))
        write(blueprint.FILE, blueprint.graph(info))
        write_drawings()
        if thumbnails:
            write_thumbnails(server)


if __name__ == "__main__":
    main()
