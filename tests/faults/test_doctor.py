"""The whole doctor on CPU ranks, and what neither its archive nor status nor logs tell."""

import json
import re
import stat
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel_backend.client.client import Client
from parallel_backend.doctor.registry import CHECKS
from parallel_backend.errors import InvalidRequest
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.messages import EncodeText
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from scripts import comfy_paths, processes
from tests.support import tiny

from .backend import run_command

WORDS = {"zebrafish": 177_731, "umbrella": 193_939, "xylophone": 164_646}
"""A prompt and its tokens."""
UNKNOWN = 987_654
"""A token that the text encoder does not know."""
VOCABULARY = 200_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose text encoder knows the prompt's tokens, in somebody's home folder."""
    folder = tmp_path_factory.mktemp("home") / "zoe" / "models" / "tiny"
    encoder = tiny.text_encoder(tiny.Tiny())
    encoder.resize_token_embeddings(VOCABULARY)
    written = tiny.write(folder, replace(tiny.Tiny(), vae=False))
    encoder.save_pretrained(str(written / "text_encoder"), safe_serialization=True)
    return written


def encode(client: Client, model: Path, tokens: list[int]) -> dict[str, torch.Tensor]:
    spec = ModelSpec(path=str(model), devices=Devices(kind="cpu", indices=(0, 1)), dtype="float32")
    ids = torch.tensor([tokens])
    return client.call(EncodeText(model=spec), {"ids": ids, "lengths": torch.tensor([len(tokens)])})


def test_the_doctor_and_its_archive(runtime: Path, model: Path, tmp_path: Path) -> None:
    client = Client(endpoint=Endpoint(folder=runtime))
    encode(client, model, list(WORDS.values()))
    with pytest.raises(InvalidRequest, match=str(UNKNOWN)):
        encode(client, model, [*WORDS.values(), UNKNOWN])
    home, file = str(model.parents[1]), tmp_path / "report.zip"
    comfyui = [f"--comfyui={path}" for path in comfy_paths.candidates()[:1]]
    done = run_command(runtime, "doctor", "--json", f"--report={file}", *comfyui, timeout=400.0, HOME=home, USER="zoe")
    found = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {finding["check"] for finding in found} == {check.name for check in CHECKS}
    verdicts = {finding["check"]: finding["verdict"] for finding in found}
    assert (verdicts["packages"], verdicts["backend"], verdicts["forward"]) == ("fine", "fine", "fine")
    assert verdicts["exchange"] in ("fine", "slow")
    assert verdicts["ComfyUI"] == ("fine" if comfyui else "not here")

    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with zipfile.ZipFile(file) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {"logs/requests.log", "logs/rank0.log", "logs/backend.log", "doctor-logs/requests.log"} <= set(texts)
    assert json.loads(texts["status.json"])["ranks"]
    assert "~/models/tiny" in texts["status.json"]
    private = [*WORDS, *map(str, WORDS.values()), str(UNKNOWN)]
    assert _found([*private, home, "zoe"], "".join(texts.values())) == []

    status = run_command(runtime, "status", "--json").stdout + run_command(runtime, "status").stdout
    logs = "".join(path.read_text() for path in client.endpoint.logs.iterdir())
    assert "EncodeText" in logs
    assert _found(private, status + logs) == []
    assert processes.find(processes.RUNTIME, lambda value: "parallel-dit-doctor" in value) == []


def _found(words: list[str], text: str) -> list[str]:
    return [word for word in words if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)]
