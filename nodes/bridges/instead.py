"""What to use with a parallel model instead of other people's nodes that need the layers of a model."""

import re

_ATTENTION = "the input attention of Parallel Loader or Parallel Model chooses the kernel: remove that node"
_MEMORY = (
    "ranks stream by themselves what they have no room for, and shard_weights in Parallel Layout divides the weights: "
    "remove that node"
)
_INSTEAD = {
    r"\b(tea|fb)?cache|\bwave ?speed": "use Parallel Cache, or ComfyUI's EasyCache or LazyCache, instead",
    r"\bsage|\bflash ?att": _ATTENTION,
    r"\b(block)?swap|\boffload|\bchunk|\blow ?(v?ram|mem)|\bmemory": _MEMORY,
    r"\bskip ?layer|\bslg\b": "use ComfyUI's SkipLayerGuidanceDiT instead",
}
"""By what the words of a node's name tell of its purpose."""


def instead_of(node: str) -> str:
    """Return what to do instead of using a node, by its name, or by its pack's where only that is known.

    Args:
        node: such as ``TeaCache of ComfyUI-TeaCache``, ``a node of ComfyUI-TeaCache``, or nothing.
    """
    name, _, pack = node.partition(" of ")
    known = pack if name == "a node" else name
    words = " ".join(re.findall(r"[A-Z]*[a-z]+|[A-Z]+|\d+", known)).lower()
    return next((remedy for purpose, remedy in _INSTEAD.items() if re.search(purpose, words)), "remove that node")
