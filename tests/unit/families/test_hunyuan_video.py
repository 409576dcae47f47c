"""HunyuanVideo's given first frame, per sample."""

import pytest
import torch
from diffusers import HunyuanVideoTransformer3DModel

from parallel_backend.errors import InvalidRequest
from parallel_backend.families.hunyuan_video.transformer import HunyuanVideo
from tests.support import families

CLASS = "HunyuanVideoTransformer3DModel"


def predicted(family, inputs):
    tokens = family.head(families.run(family, family.embed(inputs)))
    return family.unpatchify(tokens, inputs["hidden_states"].shape[2:])


@torch.no_grad()
def test_each_sample_says_whether_its_first_frame_has_noise():
    replaces = families.family(CLASS, "i2v replace")
    module = replaces.module
    plain_module = HunyuanVideoTransformer3DModel(**{**module.config, "image_condition_type": None}).eval()
    plain_module.load_state_dict(module.state_dict())
    plain = HunyuanVideo(plain_module)
    inputs = families.inputs(CLASS, "i2v replace", batch=2)
    given, free = predicted(replaces, inputs), predicted(plain, inputs)
    assert (given - free).abs().max() > 0.01 * free.abs().max()
    found = predicted(replaces, inputs | {"noisy_first_frame": torch.tensor([0.0, 1.0])})
    # ComfyUI's last layer, too, takes a first frame without noise as such.
    assert (found[0][:, 1:] - given[0][:, 1:]).abs().max() <= 1e-6 * given.abs().max()
    assert (found[0][:, :1] - given[0][:, :1]).abs().max() > 0.01 * given.abs().max()
    assert (found[1] - free[1]).abs().max() <= 1e-6 * free.abs().max()
    guided = predicted(replaces, inputs | {"noisy_first_frame": torch.ones(2), "first_guidance": inputs["guidance"]})
    assert (guided - free).abs().max() <= 1e-6 * free.abs().max()


@pytest.mark.parametrize(("kind", "shape"), [("t2v", [2]), ("i2v replace", [2, 3])])
def test_a_noisy_first_frame_that_cannot_be_used_is_refused(kind, shape):
    family = families.family(CLASS, kind)
    inputs = families.inputs(CLASS, kind, batch=2) | {"noisy_first_frame": torch.ones(shape)}
    with pytest.raises(InvalidRequest, match=r"noisy_first_frame of shape \[.*cannot be used"):
        family.extent(family.module.config, {name: tuple(value.shape) for name, value in inputs.items()})
