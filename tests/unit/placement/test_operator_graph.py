"""Operators and plans: names, order, levels, and what is refused."""

import re

import pytest
from operator_graphs import cheap, dlrm, graph_of, layer

from lightning_recsys.placement.operator_plans.plan import OperatorPlan, levels
from lightning_recsys.placement.operators import OperatorGraph, Value, server_index, server_name


def test_graph_then_edges_readers_and_made_values_follow_from_the_operators():
    graph = dlrm()
    assert ("bottom.2", "interaction") in graph.edges
    assert len(graph.edges) == 7
    assert graph.readers["x"] == ("rows", "bottom.0")
    assert [value.name for value in graph.made_by["rows"]] == ["rows"]


@pytest.mark.parametrize(
    ("operators", "results", "message"),
    [
        ([cheap("a", "b"), cheap("b", "x")], (), "operator 'a' reads ['b'], which no operator before it makes"),
        ([cheap("a", "x"), cheap("a", "x")], (), "operators need names of their own, got ['a'] twice"),
        ([cheap("a", "x")], ("b",), "no operator for ['b']"),
    ],
)
def test_graph_when_inconsistent_then_is_refused(operators, results, message):
    values = {x.name: Value(x.name, 1, x.name) for x in operators}
    with pytest.raises(ValueError, match=re.escape(message)):
        OperatorGraph(tuple(operators), (Value("x", 1, None), *values.values()), results, 1)


def test_devices_when_named_then_have_a_number():
    assert server_index(server_name(12)) == 12
    assert server_index("trainer") is None
    for wrong in ("server", "server-1", "server00", "gpu0", ""):
        with pytest.raises(ValueError, match="devices are 'trainer' and 'server0'"):
            server_index(wrong)


def test_levels_when_the_device_changes_then_rise_by_one():
    graph = dlrm()
    devices = dict.fromkeys(graph.by_name, "trainer") | {"bottom.0": "server0", "bottom.1": "server0"}
    devices |= {"bottom.2": "server1", "top.0": "server0", "top.1": "server0"}
    assert levels(graph, devices) == {
        "rows": 0,
        "bottom.0": 0,
        "bottom.1": 0,
        "bottom.2": 1,
        "interaction": 2,
        "top.0": 3,
        "top.1": 3,
        "squeeze": 4,
    }


def test_levels_when_a_server_is_asked_again_later_then_what_can_wait_is_asked_then():
    graph = graph_of(
        [layer("a", "x"), layer("b", "a"), layer("beside", "x"), layer("c", "beside"), cheap("d", "b", "c")]
    )
    devices = {"a": "server0", "b": "server1", "beside": "server1", "c": "server1", "d": "trainer"}
    assert levels(graph, devices) == {"a": 0, "b": 1, "beside": 1, "c": 1, "d": 2}


def test_plan_when_there_is_no_server_then_is_refused():
    with pytest.raises(ValueError, match="at least 1 group server, got 0"):
        OperatorPlan({}, num_servers=0)
    with pytest.raises(ValueError, match="'a' is on server2, but a group has 2"):
        OperatorPlan({"a": "server2"}, num_servers=2)


def test_plan_when_parameters_are_on_trainers_then_is_refused():
    graph = graph_of([layer("a", "x")])
    with pytest.raises(ValueError, match="owns parameters and is on trainers"):
        OperatorPlan({"a": "trainer"}).check(graph)
