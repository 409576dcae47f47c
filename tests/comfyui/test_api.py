"""The nodes as ComfyUI lists them."""

import pytest

from scripts.comfy_api import ComfyClient

NODES = ("ParallelLoader", "ParallelLayout", "ParallelSampler", "ParallelVAEDecode")


@pytest.mark.parametrize("node_id", NODES)
def test_node_is_listed_with_a_tooltip_on_every_input(client: ComfyClient, node_id: str) -> None:
    node = client.object_info()[node_id]
    assert node["category"] == "Parallel DiT"
    inputs = {**node["input"].get("required", {}), **node["input"].get("optional", {})}
    bare = [name for name, (_, *options) in inputs.items() if not (options and options[0].get("tooltip"))]
    assert inputs
    assert not bare, f"{node_id} has inputs without a tooltip: {bare}"
