"""The nodes as ComfyUI lists them, their help pages and their texts."""

import json
import re
from typing import Any

import pytest

from parallel_backend.samplers.samplers import SAMPLERS
from scripts import comfy_paths, generate, workflows
from scripts.comfy_api import ComfyClient

NODES = (
    "ParallelLoader", "ParallelModel", "ParallelVAE", "ParallelLayout", "ParallelSampler", "ParallelCache",
    "ParallelVAEDecode", "ParallelVAEEncode", "ParallelClassLabel", "ParallelOpenSora1Prompt", "ParallelOpenSora1Video",
    "ParallelOpenSora2Prompt", "ParallelOpenSora2Video",
    "ParallelOpenSora2Sampling", "ParallelOpenSora2Guider",
)  # fmt: skip
LANGUAGES = ("en", "zh", "ja", "ko")
NAMES = {*SAMPLERS, "ulysses", "cfg", "auto", "diffusers"}
"""Code words that look like ordinary words."""


def texts(language: str) -> dict[str, Any]:
    file = comfy_paths.ROOT / "locales" / language / "nodeDefs.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def every_text(content: object) -> list[str]:
    if isinstance(content, dict):
        return [text for value in content.values() for text in every_text(value)]
    return [str(content)]


def descriptions(node: dict[str, Any]) -> dict[str, str]:
    """Return a node's description and tooltips by their place."""
    parts = {f"{kind} {key}": part["tooltip"] for kind in ("inputs", "outputs") for key, part in node[kind].items()}
    return {"description": node["description"], **parts}


def code_words(text: str) -> set[str]:
    """Return numbers, names, quoted words, and words with a digit, an underscore, a path or two capital letters."""
    singular = re.sub(r"(?<=[A-Z])s\b", "", text)
    words = [word.rstrip(".") for word in re.findall(r"[\w/=.]+", singular, re.ASCII)]
    code = {word for word in words if word in NAMES or re.search(r"[\d_/=]|[a-z][A-Z]|[A-Z]{2}", word)}
    return code | set(re.findall(r"'(\w+)'", text, re.ASCII))


@pytest.mark.parametrize("node_id", NODES)
def test_node_is_listed_with_a_tooltip_on_every_input(client: ComfyClient, node_id: str) -> None:
    node = client.object_info()[node_id]
    inputs = workflows.declared_inputs(node)
    assert node["category"] == "Parallel DiT"
    assert inputs
    assert [name for name, (_, options) in inputs.items() if not options.get("tooltip")] == []


def test_no_other_node_is_in_the_category(client: ComfyClient) -> None:
    assert set(generate.english(client.object_info())) == set(NODES)


def test_parallel_sampler_has_ksamplers_inputs_and_output(client: ComfyClient) -> None:
    info = client.object_info()
    ours, native = (workflows.declared_inputs(info[name]) for name in ("ParallelSampler", "KSampler"))
    assert {name: kind for name, (kind, _) in ours.items()} == {name: kind for name, (kind, _) in native.items()}
    assert info["ParallelSampler"]["output"] == info["KSampler"]["output"]


@pytest.mark.parametrize("node_id", NODES)
def test_help_page_is_served_and_names_every_input(client: ComfyClient, node_id: str) -> None:
    page = client.request(f"/extensions/comfyui-parallel-dit/docs/{node_id}.md").decode()
    missing = [name for name in workflows.declared_inputs(client.object_info()[node_id]) if f"`{name}`" not in page]
    assert not missing, f"docs/{node_id}.md does not name {missing}"


def test_english_texts_match_the_nodes(client: ComfyClient) -> None:
    assert texts("en") == generate.english(client.object_info()), "run python -m scripts.generate"


@pytest.mark.parametrize("language", LANGUAGES)
def test_language_has_every_text(client: ComfyClient, language: str) -> None:
    served = client.get("/i18n")[language]["nodeDefs"]
    for node_id, english in texts("en").items():
        assert {k: v.keys() for k, v in english["inputs"].items()} == {
            k: v.keys() for k, v in served[node_id]["inputs"].items()
        }
        assert english["outputs"].keys() == served[node_id]["outputs"].keys()
    assert all(every_text(served))


@pytest.mark.parametrize("language", LANGUAGES[1:])
@pytest.mark.parametrize("node_id", NODES)
def test_translation_has_every_number_and_code_word(language: str, node_id: str) -> None:
    english, translated = texts("en"), texts(language)
    display_names = {key: node["display_name"] for key, node in translated.items()}
    for key, node in english.items():
        display_names |= {part["name"]: translated[key]["outputs"][i]["name"] for i, part in node["outputs"].items()}
    translations = descriptions(translated[node_id])
    for place, text in descriptions(english[node_id]).items():
        missing = {
            word
            for word in code_words(text) - code_words(translations[place])
            if word not in display_names or display_names[word] not in translations[place]
        }
        assert not missing, f"{language}: {place} of {node_id} lacks {missing}"


@pytest.mark.parametrize("language", LANGUAGES)
def test_texts_have_no_placeholders(language: str) -> None:
    assert [text for text in every_text(texts(language)) if set(text) & set("{}@|")] == []
