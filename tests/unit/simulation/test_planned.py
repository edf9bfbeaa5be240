"""Plans as legs: what each device is asked for is what planners count, and a cut model is as large as the whole one."""

from dataclasses import replace

import pytest

from lightning_recsys.placement.communication import Network
from lightning_recsys.placement.loads import LoadModel
from lightning_recsys.placement.machines import GroupMachines, Processor
from lightning_recsys.placement.operators import TRAINER, server_name
from lightning_recsys.placement.tagging import place_operators
from lightning_recsys.simulation import Group, LargeModel, Leg, planned_group
from lightning_recsys.simulation.planned import coding, legs_of

SMALL = LargeModel(
    batch_size=10, towers=2, tower_inputs=64, tower_widths=(32, 16), interaction_width=48, top_widths=(64, 64, 16)
)
MACHINE = {"cores": 4, "flops": 1e9, "bandwidth": 1e8, "latency": 1e-4, "trainer_seconds": 1e-4}


@pytest.mark.parametrize("method", ["none", "rules", "greedy"])
@pytest.mark.parametrize("pieces", [1, 3])
def test_legs_when_summed_then_are_what_the_planner_counts_for_each_device(method, pieces):
    graph = replace(SMALL, pieces=pieces).graph()
    machines = GroupMachines(
        3,
        num_trainers=2,
        nets_per_trainer=5,
        processor=Processor(flops=1e9),
        link=Network(1e8),
        activations=coding("int8", "activations"),
        gradients=coding("topk", "gradients"),
        trainer_seconds=0.25,
    )
    devices = place_operators(graph, machines, method=method).devices
    legs = Group(legs_of(graph, machines, devices), num_servers=3).all_legs
    loads = LoadModel(graph, machines).loads(devices)
    for device in (TRAINER, *map(server_name, range(3))):
        server = None if device == TRAINER else int(device.removeprefix("server"))
        nets = 5 if server is None else 10
        assert loads[device].cpu_seconds == pytest.approx(nets * sum(x.seconds for x in legs if x.server == server))
        if server is not None:
            own = [leg for leg in legs if leg.server == server]
            assert loads[device].received_bytes == pytest.approx(10 * sum(leg.sent_bytes for leg in own))
            assert loads[device].sent_bytes == pytest.approx(10 * sum(leg.returned_bytes for leg in own))
    assert loads[TRAINER].sent_bytes == pytest.approx(5 * sum(leg.sent_bytes for leg in legs))


def test_pieces_of_a_layer_when_each_server_has_one_then_are_asked_for_together():
    graph = replace(SMALL, pieces=3).graph()
    machines = GroupMachines(3, processor=Processor(flops=1e9), link=Network(1e8))
    devices = dict.fromkeys((x.name for x in graph.operators), TRAINER)
    devices |= {f"top.{layer}.{i}": server_name(i) for layer in (0, 1) for i in range(3)}
    legs = legs_of(graph, machines, devices)
    together = [x for x in legs if not isinstance(x, Leg)]
    assert [[leg.server for leg in x] for x in together] == [[0, 1, 2]] * 2, "forward and backward"


def test_model_when_cut_then_has_the_same_weights_and_products_and_no_gather_between_two_cut_layers():
    whole, cut = (replace(SMALL, pieces=pieces).graph() for pieces in (1, 3))
    for cost in ("weight_bytes", "forward_flops"):
        of_layers = [sum(getattr(x, cost) for x in graph.operators if x.owns_parameters) for graph in (whole, cut)]
        assert of_layers[0] == of_layers[1] > 0
    pairs = [x for x in cut.operators if x.name.startswith("top.1.") and x.owns_parameters]
    assert [x.inputs for x in pairs] == [(f"top.0.{i}.out",) for i in range(3)]


def test_large_model_then_its_dense_part_has_several_hundred_megabytes():
    weights = sum(operator.weight_bytes for operator in LargeModel().graph().operators)
    assert 200e6 < weights < 500e6


def test_planned_group_when_there_are_no_servers_then_a_trainer_computes_everything():
    group = planned_group(model=SMALL, num_trainers=1, num_servers=0, nets_per_trainer=3, **MACHINE)
    seconds = sum(
        Processor(flops=1e9).forward_seconds(x) + Processor(flops=1e9).backward_seconds(x)
        for x in SMALL.graph().operators
    )
    assert [leg.seconds for leg in group.all_legs] == [pytest.approx(1e-4 + seconds)]


def test_planned_group_when_made_twice_then_is_the_same_and_greedy_is_no_slower_than_rules():
    def make(method):
        return planned_group(model=SMALL, num_trainers=2, num_servers=2, nets_per_trainer=3, method=method, **MACHINE)

    def busiest(group):
        return max(sum(leg.seconds for leg in group.all_legs if leg.server == server) for server in range(2))

    assert make("greedy") == make("greedy")
    assert busiest(make("greedy")) <= busiest(make("rules"))
