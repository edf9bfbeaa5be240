"""Step times in closed form, where there is one; plans as tables and files."""

import re
from dataclasses import replace

import pytest
from operator_graphs import cheap, dlrm, graph_of, layer, lookup

from lightning_recsys.placement.communication import Network
from lightning_recsys.placement.machines import GroupMachines, Processor
from lightning_recsys.placement.operator_plans.file import read_measured, read_plan, write_plan
from lightning_recsys.placement.operator_plans.picture import _places, draw_plan
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.placement.operators import TRAINER
from lightning_recsys.placement.step_time import predict
from lightning_recsys.placement.tagging import place_operators

PLAIN = Processor(flops=1e9, memory_bandwidth=1e15, call_seconds=0.0)
GROUP = GroupMachines(
    1,
    processor=PLAIN,
    link=Network(1e6),
    seconds_per_byte=0.0,
    trainer_seconds_per_request=0.0,
    server_seconds_per_request=0.0,
)
# 3 ms of arithmetic on the server, 1000 bytes there and 200 back, and the same with gradients.
GRAPH = graph_of(
    [lookup("rows"), layer("a", "rows", flops=1e6), cheap("b", "a", flops=0)],
    results=("b",),
    sizes={"rows": 1000, "a": 200, "b": 4},
    batch_size=10,
)
PLAN = OperatorPlan({"rows": TRAINER, "a": "server0", "b": TRAINER})
ALONE = 3e-3 + 2 * 1.2e-3


def test_step_when_one_net_runs_then_is_the_sum_of_all_it_does():
    group = replace(GROUP, trainer_seconds=0.5e-3, link=Network(1e6, latency=0.25e-3))
    step = predict(GRAPH, PLAN, group)
    assert step.seconds == step.alone_seconds == pytest.approx(ALONE + 0.5e-3 + 4 * 0.25e-3)
    assert step.examples_per_second == pytest.approx(10 / step.seconds)
    assert step.utilisation["server0"].cpu == pytest.approx(3e-3 / step.seconds)
    assert step.utilisation["server0"].network == pytest.approx(1.2e-3 / step.seconds)
    assert step.utilisation["trainer"].cpu == pytest.approx(0.5e-3 / step.seconds)


def test_step_when_requests_cost_then_both_ends_and_the_wait_are_in_it():
    group = replace(
        GROUP, trainer_seconds_per_request=0.1e-3, server_seconds_per_request=0.3e-3, wait_per_request=0.2e-3
    )
    step = predict(GRAPH, PLAN, group)
    assert step.seconds == pytest.approx(ALONE + 2 * 0.6e-3)
    assert step.loads["trainer"].cpu_seconds == pytest.approx(2 * 0.1e-3)
    assert step.loads["server0"].cpu_seconds == pytest.approx(3e-3 + 2 * 0.3e-3)


@pytest.mark.parametrize(
    ("shared", "longest"), [(None, 6e-3), (4.0, 6e-3), (2.0, 6e-3), (1.0, 11e-3), (1.5, 11e-3 / 1.5)]
)
def test_step_when_servers_compute_side_by_side_then_the_longest_counts_or_what_shared_cores_take(shared, longest):
    layers = [layer("a", "x", flops=2e6), layer("b", "x", flops=1e6), cheap("c", "x", flops=1e6)]  # 6, 3 and 2 ms
    graph = graph_of([*layers, cheap("d", "a", "b", "c", flops=0)], results=("d",))
    plan = OperatorPlan({"a": "server0", "b": "server1", "c": TRAINER, "d": TRAINER}, num_servers=2)
    group = replace(GROUP, num_servers=2, link=Network(1e12), shared_cores=shared, wait_per_request=1e-3)
    assert predict(graph, plan, group).alone_seconds == pytest.approx(longest + 2 * 1e-3, rel=1e-3)


def test_step_when_there_are_many_nets_then_the_bottleneck_is_always_busy():
    step = predict(GRAPH, PLAN, replace(GROUP, num_trainers=50, nets_per_trainer=2))
    assert step.bottleneck == "server0 cpu"
    assert step.seconds == pytest.approx(100 * 3e-3, rel=0.01)
    assert step.utilisation["server0"].cpu == pytest.approx(1, rel=0.01)


def test_step_when_two_nets_meet_then_is_what_mean_value_analysis_gives():
    demands = (3e-3, 1.2e-3, 1.2e-3)
    expected = sum(x * (1 + x / ALONE) for x in demands)
    assert predict(GRAPH, PLAN, replace(GROUP, num_trainers=2)).seconds == pytest.approx(expected)


def test_step_when_processors_are_shared_then_all_processes_queue_for_them():
    alone = replace(GROUP, num_trainers=2, trainer_seconds=3e-3, link=Network(1e12))
    apart, together = predict(GRAPH, PLAN, alone), predict(GRAPH, PLAN, replace(alone, shared_cores=1.0))
    assert apart.seconds == pytest.approx(3e-3 * 1.5 + 3e-3 * 1.25, rel=1e-3)  # at the server, and at either trainer
    assert together.seconds == pytest.approx(12e-3, rel=1e-3)
    assert together.bottleneck == "shared cpu"
    groups = predict(GRAPH, PLAN, replace(alone, shared_cores=1.0, num_groups=3))
    assert groups.seconds == pytest.approx(36e-3, rel=1e-3)


def test_step_when_a_server_has_more_cores_then_nets_do_not_wait_for_each_other():
    group = replace(GROUP, num_trainers=2, link=Network(1e12), server_cores=64.0)
    assert predict(GRAPH, PLAN, group).seconds == pytest.approx(3e-3, rel=0.02)


def test_step_when_the_trainers_link_is_the_slowest_then_it_is_the_limit():
    step = predict(GRAPH, PLAN, replace(GROUP, nets_per_trainer=8, trainer_bytes=10_000))
    assert step.bottleneck == "trainer network"
    assert step.seconds >= 8 * 11.2e-3


def test_step_when_printed_then_has_a_line_for_each_device():
    lines = str(predict(GRAPH, PLAN, replace(GROUP, server_memory=1e5, trainer_memory=1e5))).splitlines()
    assert lines[0].split() == ["device", "operators", "weights", "cpu", "network", "memory"]
    assert lines[1].split() == ["trainer", "2", "0", "0.0%", "22.2%", "0.4%"]
    assert lines[2].split() == ["server0", "1", "1,000", "55.6%", "22.2%", "7.1%"]
    assert lines[3] == "a net's step 5.40 ms (5.40 ms alone), 1,852 examples/s a group, limited by server0 cpu"


# --- Files ------------------------------------------------------------------------------------------------------------


def test_plan_file_when_written_then_reads_as_the_same_plan_with_comments(tmp_path):
    graph = dlrm()
    plan = place_operators(graph, replace(GROUP, num_servers=2))
    write_plan(tmp_path / "plan.yaml", plan, graph)
    assert read_plan(tmp_path / "plan.yaml") == plan.devices
    assert re.search(r"- top\.0 +# Linear, 6,000 bytes of weights", (tmp_path / "plan.yaml").read_text())


def test_plan_file_when_names_look_like_numbers_then_they_stay_names(tmp_path):
    graph = graph_of([layer("0", "x"), layer("1e3", "0"), layer("null", "1e3"), layer("a:2", "null")])
    plan = OperatorPlan(dict.fromkeys(graph.by_name, "server0"), 2)
    write_plan(tmp_path / "plan.yaml", plan, graph)
    assert read_plan(tmp_path / "plan.yaml") == plan.devices
    assert "server1: []" in (tmp_path / "plan.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server0: [a]\nserver1: [a]\n", "operator 'a' is listed twice"),
        ("server0: [a]\nserver0: [b]\n", "each device once"),
        ("server: [a]\n", "devices are 'trainer' and 'server0'"),
        ("server0: a\n", "server0 must have a list of operators' names, got 'a'"),
        ("server0: [1]\n", "got [1]"),
        ("- a\n", "must be a mapping"),
        ("", "must be a mapping"),
        ("server0: [a\n", "is not YAML"),
    ],
)
def test_plan_file_when_wrong_then_says_where(tmp_path, text, message):
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_plan(tmp_path / "plan.yaml")


def test_plan_file_when_something_was_measured_then_has_it_beside_the_plan(tmp_path):
    graph, measured = dlrm(), {"server_seconds_per_request": 1.25e-3, "wait_per_request": 0.0}
    plan, path = place_operators(graph, replace(GROUP, num_servers=2)), tmp_path / "plan.yaml"
    write_plan(path, plan, graph)
    assert read_measured(path) == {}
    write_plan(path, plan, graph, measured)
    assert read_measured(path) == measured
    assert read_plan(path) == plan.devices
    path.write_text("measured: [1]\n")
    with pytest.raises(ValueError, match="measured must have numbers by name"):
        read_measured(path)


def test_plan_file_when_missing_then_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"operator_placement\.plan"):
        read_plan(tmp_path / "plan.yaml")


def test_plan_file_when_operators_are_left_out_then_they_are_placed_anew(tmp_path):
    graph = dlrm()
    (tmp_path / "plan.yaml").write_text("server1: [bottom.0, bottom.1, bottom.2]\n")
    plan = place_operators(graph, replace(GROUP, num_servers=2), pinned=read_plan(tmp_path / "plan.yaml"))
    assert plan.devices["bottom.0"] == "server1"
    assert plan.devices["top.0"] == "server0"


def test_plan_when_drawn_then_every_operator_has_a_place_of_its_own_in_its_devices_band(tmp_path):
    font_manager = pytest.importorskip("matplotlib.font_manager")
    graph = dlrm()
    plan = place_operators(graph, replace(GROUP, num_servers=3))
    draw_plan(tmp_path / "plan.png", plan, graph)
    font_manager._get_font.cache_clear()  # matplotlib's, which keeps the fonts' files open
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    devices = ["trainer", "server0", "server1", "server2"]
    places, heights = _places(plan, graph, devices)
    assert len(set(places.values())) == len(graph.operators)
    tops = {device: sum(heights[x] for x in devices[:number]) for number, device in enumerate(devices)}
    for name, (_, row) in places.items():
        assert tops[plan.devices[name]] <= row < tops[plan.devices[name]] + heights[plan.devices[name]]
    assert all(places[first][0] < places[second][0] for first, second in graph.edges)
