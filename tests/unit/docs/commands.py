"""Every command between lines of ``` in the documentation, and what runs it.

A command is one line, without its comment; a line that ends with a backslash goes on. Blocks of other languages (JSON,
YAML, Python, Mermaid) have other tests.
"""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("web/docs/*.md"), *ROOT.glob("tests/*.md")])
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)

RUN = (
    "python -m parallel_backend --version",
    "python -m parallel_backend certificates --hosts gpu.example,10.0.0.1",
    "python -m parallel_backend certificates --hosts 10.0.0.1",
    "python -m parallel_backend serve --detach",
    "python -m parallel_backend status",
    "python -m parallel_backend status --json",
    "python -m parallel_backend logs",
    "python -m parallel_backend logs --last 5",
    "python -m parallel_backend stop",
    "python -m parallel_backend serve --forwarded --detach",
)
"""``test_commands.py`` runs these as they are, in this order, with a stop after the last."""

BLOCKS = {"docs/api.md": "tests/comfyui/test_docs_api.py"}
"""Pages whose blocks of bash a test runs whole."""

ELSEWHERE = {
    r"bash scripts/quickstart\.sh": "tests/comfyui/test_quickstart.py",
    r"python main\.py --listen 127\.0\.0\.1 --port 8188": "scripts/comfy_server.py",
    r"PARALLEL_DIT_PYTHON=\S+ python main\.py": "tests/faults/test_environment.py",
    r"PARALLEL_DIT_BACKEND=unix:\S+ python main\.py --cpu": "tests/faults/test_tunnel.py",
    r"PARALLEL_DIT_BACKEND=10\.0\.0\.1:7400 python main\.py --cpu": "tests/machines/test_comfyui.py",
    r"(mkdir -m 700 ~/backend|ssh -N .*-L ~/backend/socket:SOCKET USER@MACHINE)": "tests/faults/test_tunnel.py",
    r"python -m parallel_backend serve --listen 10\.0\.0\.1:7400 --detach": "tests/machines/test_comfyui.py",
    r"python -m parallel_backend serve --nnodes 2 --interface enp5s0": "tests/machines/test_hosts.py",
    r"python -m parallel_backend host --connect 10\.0\.0\.1 .*--node 1": "tests/machines/test_hosts.py",
    r"torchrun --nnodes 2 .* -m parallel_backend host --interface enp5s0": "tests/machines/test_torchrun.py",
    r"(#!/bin/bash|#SBATCH .*|export MASTER_ADDR=.*|srun --kill-on-bad-exit=1 .*)": "tests/machines/test_slurm.py",
    r"python -m parallel_backend doctor( --report)?": "tests/faults/test_doctor.py",
    r"python -m parallel_backend doctor --markdown": "tests/unit/doctor/test_report.py",
    r"python -m parallel_backend make-parallel FILE\.json.*": "tests/unit/make_parallel/test_workflow.py",
    r"python -m parallel_backend plan --model .*": "tests/unit/planner/test_command.py",
    r"pip wheel --no-deps --wheel-dir dist \.": "tests/unit/test_wheel.py",
    r"(pip install dist/parallel_dit-\*\.whl|parallel-dit --help)": "tests/unit/test_wheel.py",
    r"mkdocs build --strict": "tests/unit/docs/test_site.py",
    r"python -m scripts\.generate \[--thumbnails\]": "tests/unit/docs/test_pictures.py",
    r"python -m tests\.fuzz --minutes 20 \[--target gguf\]": "tests/fuzz/test_fuzz.py",
    r"python -m scripts\.node_table": "tests/unit/scripts/test_node_table.py",
    r"python -m tests\.fuzz\.seeds": "tests/fuzz/test_corpus.py",
    r"python -m lab synchronisations --write": "tests/unit/scripts/test_synchronisations.py",
    r"python -m lab bench --family flux .*": "tests/faults/test_bench_commands.py",
    r"python -m lab verify --vae KIND .*": "tests/ranks/test_vaes.py",
    r"python -m tests\.support\.inside .*": "tests/comfyui/test_nodes_inside.py",
}  # fmt: skip
"""Commands by their pattern, and the test that runs the same with other places, sizes or addresses."""

LEFT_OUT = {
    r"(git clone|git pull|hf download|pip install -r|python -m venv|\.venv/comfy-cli/bin/).*": "downloads",
    r"cd \S+": "goes to a folder of the reader's",
    r"(\. \.venv/bin/activate|export OMP_NUM_THREADS=1 PYTHONPATH=.*)": "is for the reader's own shell",
    r"mkdocs serve": "serves until it is ended; the site is that of mkdocs build",
    r"bash scripts/test\.sh.*": "is what runs the tests",
    r"PARALLEL_DIT_WRITE_NODES=1 bash scripts/test\.sh --grid .*": "takes hours",
    r"pytest tests/unit/families -k FluxTransformer2DModel": "is a part of the tests",
    r"PARALLEL_DIT_SCREENS=\S+ pytest tests/browser/.*": "is a part of the tests",
    r"python -m lab verify --family flux": "takes minutes; test.sh runs one variant of it",
    r'python -m lab verify --layout "mine=3"': "names a strategy that the reader has written",
}
"""Commands by their pattern, and why no test runs them."""


def commands() -> Iterator[tuple[str, str]]:
    """Yield each page's path and each of its commands."""
    for page in PAGES:
        path = page.relative_to(ROOT).as_posix()
        for language, block in blocks(page):
            if language == "" or (language == "bash" and path not in BLOCKS):
                yield from ((path, line) for line in lines(block))


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of each block of a page, without the indent of a list."""
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(language, re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)) for indent, language, text in found]


def lines(block: str) -> list[str]:
    """Return the commands of a block."""
    whole = re.sub(r"\\\n\s*", "", block)
    bare = (re.sub(r"\s+# .*", "", line).strip() for line in whole.splitlines())
    return [each for line in bare for each in line.split("; ") if each]


def kept_by(command: str) -> list[str]:
    """Return which of the three lists have a command."""
    found = ["RUN"] if command in RUN else []
    for name, patterns in (("ELSEWHERE", ELSEWHERE), ("LEFT_OUT", LEFT_OUT)):
        found += [name] * any(re.fullmatch(pattern, command) for pattern in patterns)
    return found
