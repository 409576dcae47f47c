"""Workflows in both formats made parallel, and what stays as it is."""

import json
from pathlib import Path
from typing import Any

import pytest

from parallel_backend.__main__ import main
from parallel_backend.errors import InvalidRequest
from parallel_backend.make_parallel.workflow import make_parallel
from scripts import workflows


def prompt(**nodes: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {key.strip("n"): {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}


PLAIN = prompt(
    n1=("UNETLoader", {"unet_name": "flux1-dev.safetensors", "weight_dtype": "default"}),
    n2=("VAELoader", {"vae_name": "ae.safetensors"}),
    n3=("LoraLoaderModelOnly", {"model": ["1", 0], "lora_name": "x"}),
    n4=("KSampler", {"model": ["3", 0], "latent_image": ["6", 0]}),
    n5=("VAEDecode", {"vae": ["2", 0], "samples": ["4", 0]}),
    n6=("VAEEncode", {"vae": ["2", 0]}),
    n7=("CLIPLoader", {"clip_name": "t5.safetensors"}),
)


def reasons(made: Any) -> list[tuple[str, str, str]]:
    return [(each.loader.node, each.kind, each.reason) for each in made.kept]


def test_a_prompt_gets_a_node_behind_each_loader() -> None:
    made = make_parallel(PLAIN, devices="0,1")
    assert [(each.loader.node, each.kind, each.node) for each in made.added] == [("1", "MODEL", "8"), ("2", "VAE", "9")]
    assert made.workflow["8"]["class_type"] == "ParallelModel"
    assert made.workflow["8"]["inputs"] == {"model": ["1", 0], "devices": "0,1"}
    assert made.workflow["9"]["inputs"] == {"vae": ["2", 0], "devices": "0,1"}
    assert made.workflow["3"]["inputs"]["model"] == ["8", 0]
    assert made.workflow["5"]["inputs"]["vae"] == made.workflow["6"]["inputs"]["vae"] == ["9", 0]
    assert reasons(made) == [("7", "CLIP", "text")]
    assert "8" not in PLAIN


def test_a_request_to_the_server_keeps_what_it_has_besides() -> None:
    made = make_parallel({"prompt": PLAIN, "client_id": "c"})
    assert made.workflow["client_id"] == "c"
    assert made.workflow["prompt"] == make_parallel(PLAIN).workflow


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        (
            {"n5": ("VAEDecodeAudio", {"vae": ["2", 0]}), "n6": ("VAEEncodeAudio", {"vae": ["2", 0]})},
            ("2", "VAE", "audio"),
        ),
        ({"n2": ("VAELoader", {"vae_name": "ltx_audio_vae.safetensors"})}, ("2", "VAE", "audio")),
        ({"n2": ("VAELoader", {"vae_name": "taesd"})}, ("2", "VAE", "builtin")),
        ({"n3": ("ModelMergeSimple", {"model1": ["1", 0], "model2": ["1", 0]})}, ("1", "MODEL", "weights")),
        ({"n4": ("ModelSave", {"model": ["3", 0]})}, ("1", "MODEL", "weights")),
        ({"n3": ("ParallelModel", {"model": ["1", 0]})}, ("1", "MODEL", "already")),
    ],
)
def test_what_cannot_be_parallel_stays_and_says_why(changes: dict[str, Any], kept: tuple[str, str, str]) -> None:
    made = make_parallel({**PLAIN, **prompt(**changes)})
    assert kept in reasons(made)
    assert all((each.loader.node, each.kind) != kept[:2] for each in made.added)
    sentence = next(str(each) for each in made.kept if (each.loader.node, each.kind) == kept[:2])
    assert "stays as it is: " in sentence
    assert "{" not in sentence


def test_a_file_that_is_not_for_us_stays_with_its_own_sentence() -> None:
    def readable(loader: str, file: str, kind: str) -> str:
        return f"{file} is a UNet" if loader == "UNETLoader" else ""

    made = make_parallel(PLAIN, readable=readable)
    assert "MODEL of UNETLoader (node 1) stays as it is: flux1-dev.safetensors is a UNet" in map(str, made.kept)
    assert [each.kind for each in made.added] == ["VAE"]


@pytest.mark.parametrize("name", workflows.names())
def test_our_own_examples_are_parallel_already_in_both_formats(name: str) -> None:
    for given in (workflows.api(name), workflows.graph(name)):
        made = make_parallel(given)
        assert (made.workflow, made.added) == (given, ())
        assert {each.reason for each in made.kept} <= {"already", "audio", "text"}


def test_muted_and_bypassed_loaders_stay() -> None:
    graph = workflows.graph("Z-Image turbo, text to image")
    for node in graph["nodes"]:
        if node["type"] == "ParallelModel":
            node["type"] = "LoraLoaderModelOnly"
        if node["type"] == "UNETLoader":
            node["mode"] = 4
    assert [each.reason for each in make_parallel(graph).kept if each.kind == "MODEL"] == ["inactive"]


def test_a_loader_that_nobody_knows_is_named() -> None:
    graph = workflows.graph("Z-Image turbo, text to image")
    for node in graph["nodes"]:
        if node["type"] in ("UNETLoader", "ParallelModel"):
            node["type"] = {"UNETLoader": "TheirLoader", "ParallelModel": "TheirNode"}[node["type"]]
    assert [each.loader.type for each in make_parallel(graph).kept if each.reason == "unknown"] == ["TheirLoader"]


@pytest.mark.parametrize(
    "given", [[], 3, {}, {"a": 1}, {"1": {"class_type": 1, "inputs": {}}}, {"nodes": 3}, {"nodes": [{"id": 1}]},
              {"nodes": [], "links": [[1, 2]]}, {"prompt": {}}],
)  # fmt: skip
def test_what_is_no_workflow_is_refused_in_a_sentence(given: Any) -> None:
    with pytest.raises(InvalidRequest, match="save the workflow in ComfyUI with Export"):
        make_parallel(given)


def test_the_command_writes_a_file_beside_and_says_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(PLAIN))
    assert main(["make-parallel", str(file)]) == 0
    written = tmp_path / "mine (parallel).json"
    assert json.loads(written.read_text()) == make_parallel(PLAIN).workflow
    said = capsys.readouterr().out
    assert "ParallelModel 8 behind UNETLoader (node 1)" in said
    assert str(written) in said
    assert json.loads(file.read_text()) == PLAIN
    assert main(["make-parallel", str(written), "--output", str(tmp_path / "x.json")]) == 0
    assert "nothing to do: no file was written" in capsys.readouterr().out
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("text", "sentence"), [(None, "cannot be read"), ("{", "holds no JSON"), ("[]", "no workflow")]
)
def test_the_command_refuses_other_files(
    text: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    if text is not None:
        file.write_text(text)
    assert main(["make-parallel", str(file)]) == 1
    assert sentence in capsys.readouterr().err
