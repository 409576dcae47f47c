"""What a ``Sample`` says of the latents that its flat one holds is checked before anything is loaded."""

import pytest
import torch

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.engine.validation import check_sample
from parallel_backend.errors import InvalidRequest
from parallel_backend.interfaces.geometry import LATENT, SOUND
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.packing import pack, packed_shape, unpack
from parallel_backend.protocol.tensors import describe
from parallel_backend.verify import examples
from tests.support import families

BOTH, ONE = "MiniMaxH3Transformer3DModel", "WanTransformer3DModel"
VIDEO, AUDIO = (24, 3, 7, 9), (32, 2, 7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    kinds = {BOTH: "t2v", ONE: next(kind for name, kind in families.variants() if name == ONE)}
    return {
        name: (examples.write_checkpoint(tmp_path_factory.mktemp("model"), families.module(name, kind)), kind)
        for name, kind in kinds.items()
    }


def plan(folders, name, shapes, *, changed=None):
    """Check a ``Sample`` of one branch with these shapes. ``changed`` has other tensors."""
    folder, kind = folders[name]
    x, kept = examples.loop_inputs(name, families.inputs(name, kind, batch=2))
    tensors = {"x": x, "sigmas": torch.linspace(1, 0, 3), **examples.branches([kept]), **(changed or {})}
    spec = ModelSpec(path=str(folder), devices=Devices(kind="cpu", indices=(0,)), layout=ParallelLayout())
    message = Sample(model=spec, branches=1, sampler="euler", cfg=1.0, timestep_scale=1000.0, latent_shapes=shapes)
    return check_sample(message, describe(tensors), open_checkpoint(spec.path), 1)


def test_latents_of_the_right_shapes_are_planned(folders):
    found = plan(folders, BOTH, (VIDEO, AUDIO))
    assert found.latents == ({LATENT: VIDEO, SOUND: AUDIO},)
    assert found.sizes() == (VIDEO[1:], AUDIO)
    assert found.whole_latent == (2, *packed_shape((VIDEO, AUDIO)))


@pytest.mark.parametrize(
    "shapes",
    [
        (),
        (VIDEO,),
        (AUDIO, VIDEO, AUDIO),
        (VIDEO, (32, 2, 8)),
        (VIDEO, (-32, -2, 7)),
        ((24, 3, 7, 0), (32, 2, 0)),
        ((1, 24 * 3 * 7 * 9 + 32 * 2 * 7),),
    ],
)
def test_other_shapes_are_refused(folders, shapes):
    with pytest.raises(InvalidRequest, match=r"this model takes 2 \(hidden_states, audio_hidden_states\), packed"):
        plan(folders, BOTH, shapes)


@pytest.mark.parametrize("shapes", [((16, 1, 2, 2), (4,)), ((-1, -1), (5,))])
def test_a_model_of_one_latent_takes_no_other(folders, shapes):
    with pytest.raises(InvalidRequest, match=r"this model takes 1 \(hidden_states\), packed in that order"):
        plan(folders, ONE, shapes)


@pytest.mark.parametrize("shapes", [(), ((),)])
def test_a_latent_without_dims_is_refused(folders, shapes):
    with pytest.raises(InvalidRequest, match=r"x of shape \[\] with latents of"):
        plan(folders, ONE, shapes, changed={"x": torch.tensor(1.0)})


@pytest.mark.parametrize("name", ["mask", "latent"])
def test_what_inpaints_fits_the_flat_latent(folders, name):
    flat = torch.ones(2, *packed_shape((VIDEO, AUDIO)))
    inpainting = {"mask": flat[:1], "latent": flat}
    assert plan(folders, BOTH, (VIDEO, AUDIO), changed=inpainting)
    with pytest.raises(InvalidRequest, match=f"{name} of shape .* does not broadcast"):
        plan(folders, BOTH, (VIDEO, AUDIO), changed={**inpainting, name: flat[..., 1:]})


def test_unpacking_undoes_packing():
    latents = [torch.randn(2, *shape) for shape in (VIDEO, AUDIO)]
    packed = pack(latents)
    assert packed.shape[1:] == packed_shape((VIDEO, AUDIO))
    assert all(torch.equal(*pair) for pair in zip(unpack(packed, (VIDEO, AUDIO)), latents, strict=True))
    assert pack(latents[:1]) is latents[0]
    assert unpack(latents[0], (VIDEO,))[0] is latents[0]
