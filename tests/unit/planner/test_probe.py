"""What a rank measures of its machine, and what is predicted from it."""

from dataclasses import replace
from unittest import mock

import msgspec
import pytest
import torch

from parallel_backend import env
from parallel_backend.attention import kernels
from parallel_backend.distributed.mesh import Axis
from parallel_backend.distributed.world import world
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.registry import FAMILIES, family_of
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner import communication, layer_curve, probe
from parallel_backend.planner.measured import limited
from parallel_backend.planner.models import Model
from parallel_backend.planner.prediction import predict
from parallel_backend.planner.request import Prompt
from parallel_backend.protocol.messages import Trial
from parallel_backend.protocol.model_spec import Devices, ModelSpec

WAN = "WanTransformer3DModel"
MESSAGE = Trial(model=ModelSpec(path="/", devices=Devices(kind="cpu", indices=(0,))), name=probe.NAME)


def asked(class_name: str) -> tuple[Prompt, probe.ProbeRequest]:
    family = family_of(class_name)
    variant = next(iter(family.variants().values()))
    model = Model(name="small", class_name=class_name, config=variant.config, text=variant.text)
    prompt = Prompt(model=model, size=variant.size, steps=2, dtype=torch.float32)
    request = probe.ProbeRequest(
        class_name=class_name, config=dict(variant.config), shapes=prompt.shapes, dtype="float32", name="here",
        device_names=("cpu",),
    )  # fmt: skip
    return prompt, request


def measured(request: probe.ProbeRequest):
    axis = world(0, 1)
    return probe.answered(probe.run(MESSAGE, probe.asked_by(request), axis, torch.device("cpu")))


@pytest.mark.parametrize(
    "class_name", [WAN, "FluxTransformer2DModel", "LatteTransformer3DModel", "LTX2VideoTransformer3DModel"]
)
def test_one_rank_measures_its_layers_and_its_attention(class_name):
    prompt, request = asked(class_name)
    hardware = measured(request)
    (device,) = hardware.devices
    assert [share for share, _ in device.layers] == [1.0]
    assert all(seconds > 0 for curve in (device.layers, device.attends) for _, seconds in curve)
    assert (hardware.name, device.name, device.alone, hardware.links) == ("here", "cpu", 1.0, ())
    predicted = predict(prompt, ParallelLayout(), hardware)
    assert predicted.step.layers == pytest.approx(device.layers[0][1])
    assert predicted.sampling == pytest.approx(2 * predicted.step.seconds)


@pytest.mark.parametrize("name", ["sage", "no such kernel"])
def test_the_kernel_of_the_request_is_measured_where_it_can_be(monkeypatch, name):
    (_, request), taken = asked(WAN), []

    def choosing(name, *given):
        taken.append(name)
        return kernels.choose(name, *given)

    monkeypatch.setattr(probe, "choose", choosing)
    hardware = measured(msgspec.structs.replace(request, attention=name))
    assert taken == [name]
    assert hardware.devices[0].attends, "by torch's own: the other is refused with the request"


def test_exchanges_are_measured_in_small_groups_and_with_idle_ranks():
    assert [probe._groups(ranks) for ranks in (1, 2, 3)] == [[], [[(0, 1)]], [[(0, 1)], [(0, 1, 2)]]]
    assert probe._groups(4) == [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1, 2)], [(0, 1, 2, 3)]]


@pytest.mark.parametrize(
    ("rank", "of_three", "of_four"),
    [(0, ((1,), (2,)), ((1,), (3,))), (2, ((0,), (1,)), ((3,), (1,))), (3, ((), ()), ((0,), (2,)))],
)
def test_groups_of_more_than_two_also_send_around(monkeypatch, rank, of_three, of_four):
    """To the next rank as many bytes as to all others together."""
    axis, calls = Axis(name="all", group=None, ranks=(0, 1, 2, 3), index=rank, gloo=True), []

    def exchange(values, to, source, *_):
        calls.append((values, to, source))
        return 1.0 if len(calls) in (7, 10) else 0.5

    monkeypatch.setattr(probe, "_exchange", exchange)
    links = probe._links(asked(WAN)[1], axis, torch.device("cpu"), torch.float32)
    assert (calls[6][1:], calls[9][1:]) == (of_three, of_four)
    assert (calls[6][0], calls[9][0]) == (2 * calls[5][0], 3 * calls[8][0])
    assert [link.around / link.bandwidth for link in links] == [0, 0, 0, 0, pytest.approx(0.1), pytest.approx(0.1)]


@pytest.mark.parametrize("layout", ["cfg=2 ulysses=4", "cfg=2 ring=2 ulysses=2", "data=4 tensor=2", "pipe=8", "ring=8"])
def test_every_group_of_a_layout_of_all_ranks_is_measured(layout):
    parsed, measured = ParallelLayout.parse(layout), {group for groups in probe._groups(8) for group in groups}
    axes = (*parsed.degrees, communication.SEQUENCE)
    groups = {tuple(communication.members(parsed, rank, axis)) for rank in range(8) for axis in axes}
    assert {group for group in groups if len(group) > 1} <= measured


@pytest.mark.daily(6)
@pytest.mark.parametrize(
    ("class_name", "variant"), [(name, each) for name in FAMILIES for each in family_of(name).variants()]
)
def test_every_kind_of_request_is_measured(monkeypatch, class_name, variant):
    """``auto`` measures without being asked, so that no family may have inputs of which a probe knows nothing."""
    monkeypatch.setattr("parallel_backend.planner.timing._ROUNDS", 1)
    given = family_of(class_name).variants()[variant]
    model = Model(name="small", class_name=class_name, config=given.config, text=given.text, variant=variant)
    prompt = Prompt(model=model, size=given.size, steps=2, dtype=torch.float32)
    request = probe.ProbeRequest(
        class_name=class_name, config=dict(given.config), shapes=prompt.shapes, dtype="float32", name="here",
        device_names=("cpu",),
    )  # fmt: skip
    assert measured(request).devices[0].layers


def test_a_limit_holds_when_a_measurement_is_used(monkeypatch):
    monkeypatch.setenv(env.MEMORY_LIMIT.name, "1MB")
    hardware = measured(asked(WAN)[1])
    assert hardware.devices[0].memory > 1e6
    assert limited(hardware).devices[0].memory == 1e6


def test_compiled_blocks_are_predicted_from_others(monkeypatch):
    prompt, request = asked(WAN)
    hardware = measured(request)
    plain, compiled = (
        predict(replace(prompt, compiled=each), ParallelLayout(), hardware).step.layers for each in (False, True)
    )
    assert 0 < compiled < plain


def test_a_larger_size_takes_longer():
    _, request = asked(WAN)
    # Fifty times the time, since what else the machine does may make the small one ten times slower.
    larger = msgspec.structs.replace(request, shapes={**request.shapes, "hidden_states": (1, 16, 5, 64, 64)})
    small, large = measured(request), measured(larger)
    assert large.devices[0].layers[0][1] > 2 * small.devices[0].layers[0][1]


@pytest.mark.parametrize("slower", [1.0, 4.0])
def test_beside_a_slower_rank_a_larger_share_is_measured_too(monkeypatch, slower):
    monkeypatch.setattr(layer_curve, "gather_texts", lambda mine, _: [mine, repr(slower * float(mine))])
    part = mock.Mock(wraps=layer_curve._part)
    monkeypatch.setattr(layer_curve, "_part", part)
    (device,) = measured(asked(WAN)[1]).devices
    assert [call.args[1] for call in part.call_args_list] == pytest.approx(
        [1.0] if slower == 1 else [1.0, slower / (1 + slower)]
    )
    assert (device.balanced > 0) == (slower > 1)


@pytest.mark.parametrize(
    "change",
    [
        {"class_name": "NoSuchTransformer"},
        {"dtype": "nothing"},
        {"dtype": "nn"},
        {"device_names": ("a", "b")},
        {"shapes": {"hidden_states": (1, 16, 3, 5, 7)}},
    ],
)
def test_a_wrong_request_is_refused(change):
    _, request = asked(WAN)
    with pytest.raises(InvalidRequest):
        measured(msgspec.structs.replace(request, **change))


@pytest.mark.parametrize("tensors", [{}, {probe.REQUEST: torch.zeros(4, dtype=torch.uint8)}])
def test_a_request_that_is_none_is_refused(tensors):
    with pytest.raises(InvalidRequest, match="understands"):
        probe.run(MESSAGE, tensors, world(0, 1), torch.device("cpu"))
