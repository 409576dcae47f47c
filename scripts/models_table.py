"""The table of model files in docs/models.md, made from the workflows of ``workflows/api``."""

from scripts import workflows
from scripts.comfy_paths import ROOT

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- made by python -m scripts.generate -->\n", "<!-- end -->\n"


def table() -> str:
    """Return the lines of the table: a row for each file and folder of each template that needs some."""
    rows = []
    for name in workflows.names():
        comfyui = workflows.needed_comfyui(name)
        shown = f"{name} (ComfyUI {comfyui} or newer)" if comfyui else name
        for file in workflows.needed_files(name):
            place = f"`models/{file['directory']}/{file['name']}`"
            rows.append(f"| {shown} | {place} | [{_repository(file['url'])}]({file['url']}) |")
            shown = ""
        for folder in workflows.needed_folders(name):
            place = f"the folder `models/{folder['directory']}/{folder['name']}`"
            source = f"[{folder['repository']}](https://huggingface.co/{folder['repository']})"
            rows.append(f"| {shown} | {place} | {source} |")
    return "\n".join(["| template | file | from |", "|---|---|---|", *rows]) + "\n"


def _repository(url: str) -> str:
    """Return the owner and the name in an address such as https://huggingface.co/OWNER/NAME/resolve/main/FILE."""
    return "/".join(url.split("/")[3:5])


def page(text: str) -> str:
    """Return the page with the table in its place."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


def write() -> None:
    """Write the table into the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
