"""Write what follows from other files: python -m scripts.generate (in .venv).

The example workflows' page format, the English texts of the nodes, and with ``--thumbnails`` the pictures, which
runs every workflow of ``workflows/api`` in a real ComfyUI, so the thumbnails are what a user will get.
"""

import argparse
import json
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from scripts import comfy_paths, workflows
from scripts.comfy_api import ComfyClient
from scripts.comfy_server import ComfyServer

THUMBNAIL = (400, 400)


def thumbnail(client: ComfyClient, name: str) -> Image.Image:
    """The picture that a workflow makes (of a video, the middle frame), enlarged."""
    file = client.run(workflows.api(name), deadline=300.0).files[0]
    image = Image.open(BytesIO(client.fetch(file)))
    image.seek(getattr(image, "n_frames", 1) // 2)
    return image.convert("RGB").resize(THUMBNAIL, Image.Resampling.LANCZOS)


def english(object_info: dict[str, Any]) -> dict[str, Any]:
    """The nodes' own texts as a locale file, so that the other languages have a pattern to follow."""
    own = {key: info for key, info in object_info.items() if info["category"] == "Parallel DiT"}
    return {key: _texts(own[key]) for key in sorted(own)}


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
    """Write JSON."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--thumbnails", action="store_true", help="also make the pictures (takes minutes)")
    thumbnails = parser.parse_args().thumbnails
    found = comfy_paths.candidates()
    if not found:
        raise SystemExit("No ComfyUI found: set COMFYUI_PATH.")
    with ComfyServer(found[0]) as server:
        info = server.client.object_info()
        write(comfy_paths.ROOT / "locales" / "en" / "nodeDefs.json", english(info))
        for name in workflows.names():
            write(workflows.FOLDER / f"{name}.json", workflows.to_graph(workflows.api(name), info))
            if thumbnails:
                thumbnail(server.client, name).save(workflows.FOLDER / f"{name}.jpg", quality=88)


if __name__ == "__main__":
    main()
