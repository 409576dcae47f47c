"""What to use with a parallel model instead of other people's nodes that need the layers of a model."""

import re

_ATTENTION = "the input attention of Parallel Loader or Parallel Model chooses the kernel: remove that node"
_MEMORY = (
    "ranks stream by themselves what they have no room for, and shard_weights in Parallel Layout divides the weights: "
    "remove that node"
)
_INSTEAD = {
    r"cache|wavespeed": "use ComfyUI's EasyCache or LazyCache instead",
    r"sage|flash": _ATTENTION,
    r"swap|offload|chunk|low_?(v?ram|mem)|memory": _MEMORY,
    r"skip_?layer|slg": "use ComfyUI's SkipLayerGuidanceDiT instead",
}
"""By what a node's name tells of its purpose."""


def instead_of(node: str) -> str:
    """Return what to do instead of using a node, by its name and its pack's."""
    return next((remedy for words, remedy in _INSTEAD.items() if re.search(words, node.lower())), "remove that node")
