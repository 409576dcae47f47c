"""Generate files from others: python -m scripts.generate (in .venv).

It writes the table of environment variables into docs/reference.md, that of model files into docs/models.md, the
addresses of icon and banner into pyproject.toml, the pictures of the documentation, the example workflows in the web
page's format, and the English texts of the nodes. With ``--thumbnails`` it also runs the workflows of ``workflows/api``
in a real ComfyUI, so that the thumbnails show what a user gets. Those of workflows with model files, which are large,
show the graph. For these it needs Chromium.
"""

import argparse
import base64
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from scripts import comfy_paths, install, models_table, registry, settings_table, workflows
from scripts.comfy_api import ComfyClient
from scripts.comfy_server import ComfyServer
from scripts.docs_pictures import files as pictures

THUMBNAIL = (400, 400)
CENTRE_OURS = """() => {
    const node = window.app.graph._nodes.find((node) => node.type.startsWith('Parallel'))
    const canvas = window.app.canvas, view = canvas.ds, scale = 0.9, middle = 500 / scale
    view.scale = scale
    view.offset = [0, 1].map((i) => middle - node.pos[i] - node.size[i] / 2)
    canvas.show_info = false
    canvas.setDirty(true, true)
}"""


def thumbnail(client: ComfyClient, name: str) -> Image.Image:
    """The image that a workflow makes, or the middle frame of its video, enlarged."""
    file = client.run(workflows.api(name), deadline=300.0).files[0]
    image = Image.open(BytesIO(client.fetch(file)))
    image.seek(getattr(image, "n_frames", 1) // 2)
    return image.convert("RGB").resize(THUMBNAIL, Image.Resampling.LANCZOS)


def graph_picture(page: Any, name: str) -> Image.Image:
    """The first node of ours in a workflow with what is around it, as the web page draws it."""
    page.evaluate("async (graph) => await window.app.loadGraphData(graph, true, true)", workflows.graph(name))
    page.evaluate(CENTRE_OURS)
    page.wait_for_timeout(1000)  # the page draws with the next frame
    data = page.evaluate("window.app.canvasEl.toDataURL('image/png')")
    image = Image.open(BytesIO(base64.b64decode(data.partition(",")[2]))).convert("RGB")
    return image.resize(THUMBNAIL, Image.Resampling.LANCZOS)


@contextmanager
def web_page(server: ComfyServer) -> Iterator[Any]:
    """ComfyUI's page in a square, headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 1000})
        page.goto(server.client.url, wait_until="domcontentloaded")
        page.wait_for_function("() => window.app?.graph && window.app.vueAppReady", timeout=60_000)
        yield page
        browser.close()


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
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def list_needed_files(models: Path) -> None:
    """Create empty files, so that the page lists all files that the workflows name and marks none as missing."""
    for file in (file for name in workflows.names() for file in workflows.needed_files(name)):
        (models / file["directory"]).mkdir(parents=True, exist_ok=True)
        (models / file["directory"] / file["name"]).touch()


def write_thumbnails(server: ComfyServer) -> None:
    """Write a picture beside each workflow."""
    with web_page(server) as page:
        for name in workflows.names():
            picture = graph_picture(page, name) if workflows.needed_files(name) else thumbnail(server.client, name)
            picture.save(workflows.FOLDER / f"{name}.jpg", quality=88)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--thumbnails", action="store_true", help="also make the thumbnails, which takes minutes")
    thumbnails = parser.parse_args().thumbnails
    settings_table.write()
    models_table.write()
    registry.write()
    pictures.write()
    comfyuis = comfy_paths.candidates()
    if not comfyuis:
        raise SystemExit("No ComfyUI found: set COMFYUI_PATH to a checkout.")
    server = ComfyServer(comfyuis[0], frontend=install.frontend_folder(comfyuis[0]))
    list_needed_files(server.base / "models")
    with server:
        info = server.client.object_info()
        write(comfy_paths.ROOT / "locales" / "en" / "nodeDefs.json", english(info))
        for name in workflows.names():
            write(workflows.FOLDER / f"{name}.json", workflows.to_graph(workflows.api(name), info))
        if thumbnails:
            write_thumbnails(server)


if __name__ == "__main__":
    main()
