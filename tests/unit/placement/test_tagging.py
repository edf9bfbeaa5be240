"""Tagging of operators: rules, components, balancing, greedy refinement, and what has no room."""

import importlib.util
import re
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_graphs import cheap, dlrm, graph_of, graphs, layer, lookup

from lightning_recsys.errors import OperatorRoomError
from lightning_recsys.placement.communication import Network
from lightning_recsys.placement.exact import solve
from lightning_recsys.placement.loads import LoadModel
from lightning_recsys.placement.machines import Coding, GroupMachines, Processor
from lightning_recsys.placement.operator_plans.plan import levels
from lightning_recsys.placement.operators import TRAINER
from lightning_recsys.placement.tagging import by_rules, components, place_operators, refine, score, tag

# One byte a microsecond, no cost for anything but arithmetic and the link.
PLAIN = Processor(flops=1e9, memory_bandwidth=1e15, call_seconds=0.0)
GROUP = GroupMachines(
    2,
    processor=PLAIN,
    link=Network(1e6),
    seconds_per_byte=0.0,
    trainer_seconds_per_request=0.0,
    server_seconds_per_request=0.0,
)


# --- Rules ------------------------------------------------------------------------------------------------------------


def test_tag_then_parameters_are_on_servers_and_only_what_stands_between_them_stays_there():
    on_server = tag(dlrm())
    assert {name for name, tagged in on_server.items() if tagged} == {
        "bottom.0",
        "bottom.1",
        "bottom.2",
        "top.0",
        "top.1",
    }


def test_tag_when_a_cheap_operator_touches_a_trainer_then_so_do_its_cheap_neighbours():
    graph = graph_of([layer("a", "x"), cheap("b", "a"), cheap("c", "b"), lookup("rows"), cheap("d", "c", "rows")])
    assert [name for name, tagged in tag(graph).items() if tagged] == ["a"]


def test_components_then_are_parted_by_trainers():
    graph = dlrm()
    assert components(graph, tag(graph)) == [["bottom.0", "bottom.1", "bottom.2"], ["top.0", "top.1"]]


def test_rules_then_components_are_balanced_by_the_bytes_of_weights():
    operators = [layer(f"tower{i}", "x", weights=weights) for i, weights in enumerate((500, 400, 300, 300))]
    devices = by_rules(graph_of(operators), GROUP)
    assert devices == {"tower0": "server0", "tower1": "server1", "tower2": "server1", "tower3": "server0"}


def test_none_then_operators_with_parameters_are_dealt_in_turn():
    devices = place_operators(dlrm(), GROUP, method="none").devices
    assert [devices[x] for x in ("bottom.0", "bottom.2", "top.0", "top.1")] == ["server0", "server1"] * 2
    assert devices["bottom.1"] == TRAINER


# --- Loads ------------------------------------------------------------------------------------------------------------


def test_loads_then_are_those_counted_by_hand():
    graph = graph_of(
        [lookup("rows"), layer("a", "rows", flops=1e6, weights=1000), cheap("b", "a", flops=0)],
        results=("b",),
        sizes={"rows": 800, "a": 200, "b": 4},
    )
    group = replace(
        GROUP,
        num_trainers=3,
        nets_per_trainer=2,
        trainer_cores=2.0,
        activations=Coding(0.25, encode_seconds=1e-6, decode_seconds=2e-6),
        gradients=Coding(0.5, encode_seconds=3e-6, decode_seconds=4e-6),
    )
    loads = LoadModel(graph, group).loads({"rows": TRAINER, "a": "server0", "b": TRAINER})
    assert list(loads) == ["trainer", "server0", "server1"]
    trainer, server, idle = loads.values()
    # 800 bytes of rows go forward and their gradient comes back, 200 bytes of the result likewise.
    assert (server.received_bytes, server.sent_bytes) == (6 * (200 + 100), 6 * (50 + 400))
    assert (trainer.sent_bytes, trainer.received_bytes) == (2 * (200 + 100), 2 * (50 + 400))
    assert server.cpu_seconds == pytest.approx(6 * (3e-3 + 800 * 2e-6 + 200 * 1e-6 + 200 * 4e-6 + 800 * 3e-6))
    assert trainer.cpu_seconds == pytest.approx(2 * (800 * 1e-6 + 200 * 2e-6 + 200 * 3e-6 + 800 * 4e-6))
    assert server.memory_bytes == 6 * 1000 + 6 * (100 + 800)
    assert (idle.cpu_seconds, idle.sent_bytes, idle.memory_bytes) == (0, 0, 0)


def test_loads_when_processors_are_shared_then_all_processes_take_from_them():
    graph = graph_of([layer("a", "x", flops=1e6), layer("b", "x", flops=2e6)], results=("a", "b"))
    group = replace(GROUP, num_trainers=2, shared_cores=2.0, num_groups=3, trainer_seconds=0.01)
    model = LoadModel(graph, group)
    busy = model.busy_seconds(model.loads({"a": "server0", "b": "server1"}))
    assert busy["server1 cpu"] == pytest.approx(2 * 6e-3)
    assert busy["shared cpu"] == pytest.approx(3 * 2 * (0.01 + 9e-3) / 2)


def test_loads_when_an_operator_was_measured_then_that_counts():
    measured = replace(layer("a", "x"), forward_seconds=0.25, backward_seconds=0.5)
    model = LoadModel(graph_of([measured], results=("a",)), GROUP)
    assert model.loads({"a": "server0"})["server0"].cpu_seconds == 0.75


# --- Invariants on random graphs --------------------------------------------------------------------------------------


def groups():
    return st.builds(
        GroupMachines,
        st.integers(1, 3),
        num_trainers=st.integers(1, 3),
        nets_per_trainer=st.integers(1, 2),
        processor=st.just(PLAIN),
        link=st.sampled_from([Network(1e5), Network(1e7), Network(1e9)]),
        shared_cores=st.sampled_from([None, 2.0]),
    )


@settings(max_examples=60)
@given(graphs(), groups(), st.sampled_from(["none", "rules", "greedy"]))
def test_placement_then_every_operator_has_one_device_that_it_may_be_on_and_cuts_are_acyclic(graph, group, method):
    plan = place_operators(graph, group, method=method, time_limit=1.0)
    assert plan.devices.keys() == graph.by_name.keys()
    for operator in graph.operators:
        on_trainer = plan.devices[operator.name] == TRAINER
        assert not (operator.owns_parameters and on_trainer)
        assert on_trainer or not operator.trainer_only
    level_of = levels(graph, plan.devices)
    parts = {(plan.devices[name], level): set() for name, level in level_of.items()}
    for first, second in graph.edges:
        one, two = ((plan.devices[name], level_of[name]) for name in (first, second))
        parts[two] |= {one} - {two}
    TopologicalSorter(parts).prepare()  # raises on a cycle


@settings(max_examples=60)
@given(graphs(), groups(), st.randoms(use_true_random=False))
def test_refinement_when_begun_anywhere_then_the_bottleneck_is_never_worse(graph, group, random):
    model = LoadModel(graph, group)
    servers = model.device_names[1:]
    start = {
        x.name: TRAINER if x.trainer_only else random.choice(servers if x.owns_parameters else model.device_names)
        for x in graph.operators
    }
    refined = refine(model, start, time_limit=1.0)
    before, after = (max(model.busy_seconds(model.loads(x)).values()) for x in (start, refined))
    assert after <= before + 1e-12  # the score, which is what is made small, is rounded there
    assert score(model, refined) <= score(model, start)


@settings(max_examples=25)
@given(graphs(max_operators=5), groups())
def test_exact_then_no_placement_is_below_its_bound_and_its_own_is_close(graph, group):
    model = LoadModel(graph, group)
    solution = solve(graph, group)
    allowed = [[TRAINER] if x.trainer_only else model.device_names[bool(x.owns_parameters) :] for x in graph.operators]
    names = list(graph.by_name)
    busy = [
        max(model.busy_seconds(model.loads(dict(zip(names, devices, strict=True)))).values())
        for devices in product(*allowed)
    ]
    assert solution.bound <= min(busy) * (1 + 1e-4) + 1e-9
    own = max(model.busy_seconds(model.loads(solution.devices)).values())
    assert own >= min(busy) - 1e-12
    if own > min(busy) * (1 + 1e-3):  # what the program leaves out: a server that is asked at several levels
        parts = model.traffic(solution.devices)
        assert len(parts) > len({device for device, _ in parts})


def test_exact_when_operators_stand_side_by_side_then_divides_them_best():
    operators = [layer(f"a{i}", "x", flops=flops) for i, flops in enumerate((7e6, 5e6, 4e6, 4e6, 4e6))]
    graph = graph_of(
        operators, results=[x.name for x in operators], sizes=dict.fromkeys([x.name for x in operators], 0)
    )
    group = replace(GROUP, link=Network(1e12))
    solution = solve(graph, group)
    assert solution.bound == pytest.approx(3 * 12e-3, rel=1e-3)
    # 7 + 5 against 4 + 4 + 4: no move of one operator gets there from 7 + 4 against 5 + 4 + 4, a swap of two does.
    devices = dict(zip(graph.by_name, ["server0", "server1", "server0", "server1", "server1"], strict=True))
    refined = refine(LoadModel(graph, group), devices, tolerance=0.0)
    assert max(x.cpu_seconds for x in LoadModel(graph, group).loads(refined).values()) == pytest.approx(36e-3)


def test_exact_when_there_is_no_time_then_says_what_to_do():
    operators = [layer(f"a{i}", "x", flops=1e6 * (i % 7 + 1)) for i in range(60)]
    with pytest.raises(ValueError, match=r"operator_placement\.method=greedy"):
        solve(graph_of(operators), replace(GROUP, num_servers=4), time_limit=1e-3)


def test_exact_when_scipy_is_not_installed_then_names_the_extra(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "scipy" else find_spec(name))
    with pytest.raises(ImportError, match=r"pip install lightning-recsys\[exact\]"):
        place_operators(dlrm(), GROUP, method="exact")


# --- Pins and room ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["none", "rules", "greedy", "exact"])
def test_placement_when_operators_are_pinned_then_they_are_there(method):
    pinned = {"top.1": "server1", "bottom.0": "server1", "bottom.1": "trainer"}
    plan = place_operators(dlrm(), GROUP, method=method, pinned=pinned)
    assert {name: plan.devices[name] for name in pinned} == pinned


@pytest.mark.parametrize(
    ("pinned", "message"),
    [
        ({"rows": "server0"}, "'rows' (EmbeddingBagCollection) is on server0, but has to be on trainers"),
        ({"top.0": "trainer"}, "'top.0' (Linear) owns parameters"),
        ({"top.9": "server0"}, "has no ['top.9']"),
        ({"top.0": "server2"}, "'top.0' is on server2"),
    ],
)
def test_placement_when_a_pin_is_wrong_then_says_so(pinned, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        place_operators(dlrm(), GROUP, pinned=pinned)


def test_placement_when_the_method_is_unknown_then_names_those_there_are():
    with pytest.raises(ValueError, match=re.escape("['none', 'rules', 'greedy', 'exact'], got 'milp'")):
        place_operators(dlrm(), GROUP, method="milp")


@pytest.mark.parametrize("method", ["none", "rules", "greedy", "exact"])
def test_placement_when_an_operator_fits_nowhere_then_is_refused_by_name(method):
    group = replace(GROUP, server_memory=34_000)
    with pytest.raises(OperatorRoomError, match=re.escape("operator top.0 (Linear) needs 36,000 bytes")) as caught:
        place_operators(dlrm(), group, method=method)
    assert (caught.value.needed, caught.value.available) == (36_000, {"server0": 34_000, "server1": 34_000})


def test_placement_when_servers_are_too_small_together_then_is_refused_with_the_bytes():
    group = replace(GROUP, server_memory=(36_000, 18_000))
    with pytest.raises(OperatorRoomError, match="dense part of the model needs 69,000 bytes"):
        place_operators(dlrm(), group)


def test_placement_when_activations_of_all_nets_do_not_fit_then_the_device_is_named():
    group = replace(GROUP, trainer_memory=150)
    with pytest.raises(OperatorRoomError, match="trainer, with rows, needs 300 bytes of memory: trainer has 150"):
        place_operators(dlrm(), group)


def test_rules_when_a_component_is_larger_than_a_server_then_it_is_taken_apart():
    group = replace(GROUP, server_memory=(38_000, 36_000))
    devices = place_operators(dlrm(), group, method="rules").devices
    assert devices["top.0"] == "server0"
    assert devices["top.1"] == "server1"


def test_greedy_when_the_start_lacks_memory_then_mends_that_first():
    graph = dlrm()
    group = replace(GROUP, server_memory=(42_000, 42_000), link=Network(1e3))
    devices = {name: "server0" if tagged else TRAINER for name, tagged in tag(graph).items()}
    model = LoadModel(graph, group)
    assert max(load.memory_share for load in model.loads(devices).values()) > 1
    refined = refine(model, devices)
    assert max(load.memory_share for load in model.loads(refined).values()) <= 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_trainers": 0},
        {"server_memory": (1.0,)},
        {"server_memory": 0.0},
        {"trainer_cores": 0.0},
        {"seconds_per_byte": -1.0},
    ],
)
def test_machines_when_a_number_is_out_of_range_then_are_refused(wrong):
    with pytest.raises(ValueError, match=r"must be (at least 1|positive)"):
        GroupMachines(2, **wrong)


def test_speeds_when_out_of_range_then_are_refused():
    with pytest.raises(ValueError, match="positive speeds"):
        Processor(flops=0)
    with pytest.raises(ValueError, match="positive ratio"):
        Coding(ratio=0)
