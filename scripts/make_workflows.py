"""Write the example workflows' page format and thumbnails: python -m scripts.make_workflows (in .venv).

Runs every workflow of ``workflows/api`` in a real ComfyUI, so the thumbnails are what a user will get.
"""

import json
from io import BytesIO

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


def main() -> None:
    found = comfy_paths.candidates()
    if not found:
        raise SystemExit("No ComfyUI found: set COMFYUI_PATH.")
    with ComfyServer(found[0]) as server:
        info = server.client.object_info()
        for name in workflows.names():
            content = json.dumps(workflows.to_graph(workflows.api(name), info), indent=1)
            (workflows.FOLDER / f"{name}.json").write_text(content + "\n", encoding="utf-8")
            thumbnail(server.client, name).save(workflows.FOLDER / f"{name}.jpg", quality=88)
            print(name)


if __name__ == "__main__":
    main()
