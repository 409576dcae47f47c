"""What mkdocs does besides: a hook of ``mkdocs.yml``.

The nodes' help pages lie in ``web/docs``, where ComfyUI looks for them, and contributors' pages where GitHub does. The
site has them too, from the same files. A link of any page that leads out of the site leads to the repository, whose
address is ``Repository`` in ``pyproject.toml``. A link to a file that does not exist ends the build.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    **{f"web/docs/{file.name}": f"node/{file.name}" for file in sorted((ROOT / "web" / "docs").glob("*.md"))},
    "CHANGELOG.md": "project/CHANGELOG.md",
    "CONTRIBUTING.md": "project/CONTRIBUTING.md",
    "SECURITY.md": "project/SECURITY.md",
    "tests/README.md": "project/tests.md",
}
"""Pages of the site that are not in ``docs/``, by their path in the repository."""
_SOURCES = {site: source for source, site in ELSEWHERE.items()}
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_FENCE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def project_text(name: str) -> str:
    """Return a text of ``pyproject.toml`` by its key; Python 3.10 has no reader of such files."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'^{name} = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise PluginError(f"pyproject.toml has no {name}")
    return found[1]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give the site the version, and headings the anchors that GitHub gives them."""
    config.site_description = project_text("description")
    config.copyright = f"Parallel DiT {project_text('version')}, Apache-2.0"
    config.mdx_configs["toc"] = {"permalink": True, "slugify": slugify(case="lower")}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere."""
    for source, site in ELSEWHERE.items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links between files of the repository into links of the site."""
    site = page.file.src_uri
    parts = _FENCE.split(markdown)  # code is at odd places
    parts[::2] = [_LINK.sub(lambda link: link[1] + target(site, link[2]) + link[3], part) for part in parts[::2]]
    return "".join(parts)


def target(site: str, link: str) -> str:
    """Return where a link leads that stands on a page of the site, as its file in the repository writes it.

    Raises:
        PluginError: there is no such file.
    """
    path, hash_sign, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", path):
        return link
    source = PurePosixPath(_SOURCES.get(site, f"docs/{site}"))
    file = os.path.normpath(source.parent / path)
    if not (ROOT / file).exists():
        raise PluginError(f"{source} links to {link}, which does not exist")
    return (_inside(site, file) or _outside(file)) + hash_sign + anchor


def _inside(site: str, file: str) -> str | None:
    """Return a link to a file of the site, or None for one that the site lacks."""
    there = ELSEWHERE.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
    return there and os.path.relpath(there, PurePosixPath(site).parent)


def _outside(file: str) -> str:
    kind = "tree" if (ROOT / file).is_dir() else "blob"
    return f"{project_text('Repository')}/{kind}/main/{quote(file)}"
