"""What a planner is told of a request."""

from unittest import mock

import pytest

from parallel_backend.engine.planned import Planned, by_planner
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner.models import find
from parallel_backend.planner.request import prompt
from parallel_backend.protocol.frames import TensorMeta


@pytest.mark.parametrize(("sigmas", "steps"), [((5,), 4), (None, None)])
def test_it_is_told_how_many_steps_the_ranks_own_loop_takes(sigmas, steps):
    asked = prompt(find("wan2.1-t2v-1.3b"), "480x480x17")
    given = {"0.encoder_hidden_states": asked.shapes["encoder_hidden_states"]} | ({"sigmas": sigmas} if sigmas else {})
    request = mock.Mock()
    request.metas = [TensorMeta(name=name, dtype="float32", shape=shape) for name, shape in given.items()]
    planner = mock.Mock(return_value=Planned(layout=ParallelLayout(), reason=""))
    assert by_planner(planner, asked.plan(ParallelLayout()), request, mock.Mock(), mock.Mock()) is not None
    assert planner.call_args.args[-1] == steps
