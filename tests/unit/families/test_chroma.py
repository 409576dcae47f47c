"""Chroma's guidance, which diffusers' own forward does not know."""

import torch

from tests.support import families

NAME = "ChromaTransformer2DModel", "image"


@torch.no_grad()
def test_guidance_changes_the_modulation_of_all_blocks():
    family, inputs = families.family(*NAME), families.inputs(*NAME, batch=2)
    without = family.embed(inputs).context["modulation"]
    zero, some = (
        family.embed({**inputs, "guidance": torch.tensor(guidance)}).context["modulation"]
        for guidance in ((0.0, 0.0), (0.0, 2.5))
    )
    assert torch.equal(without, zero)
    assert torch.equal(without[0], some[0])
    assert ((without[1] - some[1]).abs().amax(dim=1) > 1e-3).all()
