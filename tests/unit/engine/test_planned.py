"""When a planner is asked, and what it is told of a request."""

from unittest import mock

import pytest

from parallel_backend.engine.planned import LEAST_BYTES, Planned, by_planner
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner.models import find
from parallel_backend.planner.request import prompt
from parallel_backend.protocol.frames import TensorMeta
from parallel_backend.protocol.model_spec import Devices

ALONE = ParallelLayout()
ONE, TWO, HOSTS = (
    Devices(kind="cuda", indices=indices, hosts=hosts)
    for indices, hosts in (((0,), ()), ((0, 1), ()), ((0, 0), ("", "b")))
)


@pytest.fixture
def ask():
    """Ask for a plan, and return the answer, the planner and the request."""

    def asking(mode="fastest", sigmas=None, devices=TWO, ranks=2, nbytes=LEAST_BYTES, layout=ALONE):
        asked = prompt(find("wan2.1-t2v-1.3b"), "480x480x17")
        given = {"0.encoder_hidden_states": asked.shapes["encoder_hidden_states"]}
        given |= {"sigmas": sigmas} if sigmas else {}
        request = mock.Mock()
        request.message.model.mode, request.message.model.devices = mode, devices
        request.metas = [TensorMeta(name=name, dtype="float32", shape=shape) for name, shape in given.items()]
        components = mock.Mock()
        files = [mock.Mock(), mock.Mock()]
        for file, size in zip(files, (1, nbytes - 1), strict=True):
            file.stat.return_value.st_size = size
        components.checkpoint.stored.return_value.files = files
        planner = mock.Mock(return_value=Planned(layout=layout, reason="why"))
        found = by_planner(planner, asked.plan(ALONE), request, components, mock.Mock(size=ranks))
        return found, planner, request

    return asking


@pytest.mark.parametrize(("sigmas", "steps"), [((5,), 4), (None, None)])
def test_it_is_told_how_many_steps_the_ranks_own_loop_takes(ask, sigmas, steps):
    found, planner, request = ask(sigmas=sigmas)
    assert found is not None
    assert planner.call_args.args[-2:] == (steps, request.message.adapt)


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({"mode": "auto"}, True), ({"mode": "auto", "devices": ONE, "ranks": 1}, False),
        ({"mode": "auto", "nbytes": LEAST_BYTES - 1}, False), ({"mode": ""}, False),
        ({"mode": "auto", "devices": HOSTS}, False), ({"mode": "fit memory", "devices": HOSTS, "nbytes": 1}, True),
        ({"mode": "fit memory", "devices": ONE, "ranks": 1}, True),
    ],
)  # fmt: skip
def test_auto_measures_where_that_pays(ask, given, asked):
    found, planner, request = ask(**given)
    assert (found is not None) == planner.called == asked
    said = [call.args[0].note for call in request.report.call_args_list if call.args[0].value]
    assert said == (["why"] if asked else [])


@pytest.mark.parametrize("mode", ["auto", "fastest"])
def test_where_more_ranks_run_nothing_is_measured(ask, mode):
    found, planner, request = ask(mode=mode, ranks=3)
    assert found is None
    assert not planner.called
    assert request.report.call_args.args[0].note.startswith("more ranks run than this model has devices")


def test_what_does_not_work_for_the_request_is_not_taken(ask):
    found, _, request = ask(layout=ParallelLayout(dsp=2))
    assert found is None
    assert "does not work" in request.report.call_args.args[0].note


def test_a_planner_may_leave_the_layout_to_the_rule_and_say_why(ask):
    found, _, request = ask(layout=None)
    assert found is not None
    assert found.layout is None
    assert request.report.call_args.args[0].note == "why"
