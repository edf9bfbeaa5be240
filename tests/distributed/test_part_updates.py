"""A group server that is killed anywhere within an update of a part leaves the update whole, or nothing of it."""

import math
import multiprocessing.connection
from pathlib import Path

import pytest
import torch
from server_processes import Processes, die, processes
from torch import nn

from lightning_recsys.parameter_server.messages.wire import Limits, Request
from lightning_recsys.partition.parts import split
from lightning_recsys.partition.tracing import trace
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.strategies.hierarchical.servers.group_parts import GroupParts
from lightning_recsys.strategies.hierarchical.servers.group_server import GroupRequests

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

BEFORE, SIZE = 3, 4  # updates that count ahead of the one that is cut short; inputs and outputs of the layer
# Where the server is killed within the next update, and how many of its updates count then beyond BEFORE.
WHERE = {"recording": 0, "recorded": 0, "begun": 0, "half made": 0, "made": 0, "counted": 1}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(SIZE, SIZE)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        return self.layer(x)


def serve(folder: Path) -> GroupRequests:
    return GroupRequests(folder, Limits(), lambda: None)


def train(part, updates: int) -> None:
    for _ in range(updates):
        graph = part.forward([torch.ones(1, SIZE)], wanted=[False], keep=True)
        part.backward(graph, [torch.ones(1, SIZE)], [{}])


def train_and_die(folder: str, where: str, pipe: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    requests = serve(Path(folder))
    requests._load(Request("load_parts", 1, bytes(16)))
    (part,) = requests.operators.parts.values()
    train(part, BEFORE)
    optimizer, undo = part._optimizer, part._undo
    weight, bias = optimizer.param_groups[0]["params"]
    begin, step = undo.begin, optimizer.step

    def record_half():
        undo._copies[0].fill_(7.0)
        die()

    def record_without_header():
        for copy, x in zip(undo._copies, undo._tensors, strict=True):
            copy.copy_(x)
        die()

    def make_half():
        optimizer.state[weight]["sum"][0] += 1
        weight.data[:2] -= 0.5
        optimizer.state[bias]["step"] += 1
        die()

    match where:
        case "recording":
            undo.begin = record_half
        case "recorded":
            undo.begin = record_without_header
        case "begun":
            undo.begin = lambda: (begin(), die())
        case "half made":
            optimizer.step = make_half
        case "made":
            optimizer.step = lambda: (step(), die())
    train(part, 1)
    die()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folders of servers that were killed, by the place; all of them at once."""
    folders = {where: tmp_path_factory.mktemp("server", numbered=True) for where in WHERE}
    with processes() as pool:
        for where, folder in folders.items():
            folder.chmod(0o700)
            model = Layer()
            traced = trace(model, [torch.ones(2, SIZE)])
            devices = {op.name: "server0" if op.owns_parameters else "trainer" for op in traced.operators.operators}
            optimizer = torch.optim.Adagrad(model.parameters(), lr=1.0, eps=0.0, foreach=False)
            GroupParts.of(split(traced, OperatorPlan(devices)).on("server0"), optimizer).save(folder)
            pool.start(train_and_die, str(folder), where, Processes)
        for process, _ in pool.started:
            process.join(100)
        assert {process.exitcode for process, _ in pool.started} == {-9}
    return folders


@pytest.mark.parametrize("where", WHERE)
def test_part_when_its_server_is_killed_within_an_update_then_every_element_has_as_many_updates(killed, where):
    for more in (0, 2):  # the successor, and one behind it that goes on
        requests = serve(killed[where])
        (part,) = requests.operators.parts.values()
        train(part, more)
        updates = BEFORE + WHERE[where] + more
        assert int(part.version) == updates
        value = -sum(1 / math.sqrt(number) for number in range(1, updates + 1))
        for parameter, state in part._optimizer.state.items():
            assert state["step"].item() == updates
            torch.testing.assert_close(state["sum"], torch.full_like(parameter.data, updates))
            torch.testing.assert_close(parameter.data, torch.full_like(parameter.data, value))
        requests.close()
