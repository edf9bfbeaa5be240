"""Plans of a group: which of several is taken, how layers are split before, and how ranks hear of a refusal."""

import pickle
import threading

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.distributed import HashStore
from torch.utils.data import DataLoader

from lightning_recsys.compression import Compression
from lightning_recsys.errors import OperatorRoomError
from lightning_recsys.models import GraphSAGE
from lightning_recsys.partition.fc_split import LayerSplit
from lightning_recsys.partition.parts import split
from lightning_recsys.partition.tracing import check_traceable, trace
from lightning_recsys.placement.machine_kinds import MachineKind
from lightning_recsys.placement.machines import Processor
from lightning_recsys.placement.operator_plans.file import read_plan
from lightning_recsys.placement.operator_plans.plan import OperatorPlan
from lightning_recsys.strategies import HierarchicalStrategy
from lightning_recsys.strategies.hierarchical import OperatorPlacement
from lightning_recsys.strategies.hierarchical.cut.cut_layers import CutLayers
from lightning_recsys.strategies.hierarchical.cut.sample_call import sample_call
from lightning_recsys.strategies.hierarchical.groups import Groups
from lightning_recsys.strategies.hierarchical.news import News
from lightning_recsys.strategies.hierarchical.planning import group_machines, make_plan
from lightning_recsys.strategies.hierarchical.servers.group_parts import GroupParts


def perceptron(width=64):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def plan(method="auto", *, fc_splits="none", nets=1, rooms=(), batch_size=32, save=None, **machines):
    return make_plan(
        perceptron(),
        [torch.randn(batch_size, 8)],
        OperatorPlacement(method, save=save, machines=machines),
        fc_splits=fc_splits,
        groups=Groups(1, 1, nets, 2),
        compression=Compression.from_option("none"),
        rooms=rooms,
    )


def test_plan_when_saved_then_is_a_file_and_a_picture(tmp_path):
    font_manager = pytest.importorskip("matplotlib.font_manager")
    plan("rules", save=tmp_path / "run" / "operators.yaml")
    font_manager._get_font.cache_clear()  # matplotlib's, which keeps the fonts' files open
    assert read_plan(tmp_path / "run" / "operators.yaml")
    assert (tmp_path / "run" / "operators.png").read_bytes().startswith(b"\x89PNG")


SLOW = Processor(flops=1e6, memory_bandwidth=1e15, call_seconds=0.0)


@pytest.mark.parametrize(("nets", "shorter"), [(1, "rules"), (8, "greedy")])
def test_auto_then_the_plan_with_the_shorter_predicted_step_is_taken(nets, shorter):
    found = {
        method: plan(method, nets=nets, shared_cores=None, trainer_cores=8.0, processor=SLOW)
        for method in ("auto", "rules", "greedy")
    }
    seconds = {method: prediction.seconds for method, (_, _, prediction) in found.items()}
    assert min(("rules", "greedy"), key=seconds.__getitem__) == shorter
    assert seconds["rules"] != seconds["greedy"]
    assert found["auto"][1] == found[shorter][1]


def test_splits_when_auto_then_only_where_the_predicted_step_is_shorter_or_there_is_no_room_for_the_whole():
    slow = {"shared_cores": None, "trainer_cores": 8.0, "processor": SLOW}
    assert plan(nets=1, fc_splits="auto", **{**slow, "shared_cores": 1.0})[0] == []  # nothing is done side by side
    for nets in (1, 8):
        splits, _, prediction = plan(nets=nets, fc_splits="auto", **slow)
        assert splits[0] == LayerSplit("2", "output", 2)
        assert prediction.seconds < plan(nets=nets, **slow)[2].seconds
    small = {"rooms": (98_000, 98_000), "batch_size": 4}
    with pytest.raises(OperatorRoomError, match="operator 2 "):
        plan(**small)
    assert "2" in [split.path for split in plan(fc_splits="auto", **small)[0]]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"fc_splits": "some"}, "fc_splits must be none, auto"),
        ({"fc_splits": {"top.0": "rows"}}, "by output or by input"),
        ({"fc_splits": {"top.0": "output"}}, "servers_per_group=1"),
        ({"fc_splits": "auto", "operator_placement": OperatorPlacement(plan="a.yaml")}, "may choose another one"),
        ({"fc_splits": None}, "fc_splits must be none, auto or a mapping of layers, got None"),
        ({"operator_placement": None}, "operator_placement.method must be one of auto, .* got None"),
        ({"num_groups": "2"}, "num_groups must be a whole number, got '2'"),
        ({"num_sync_servers": 3}, "num_sync_servers=3 means nothing without several groups"),
        ({"num_sync_servers": 3, "num_groups": 2, "algorithm": "ma"}, "num_sync_servers=3 means nothing without"),
        ({"top_k_fraction": 0.2}, "top_k_fraction=0.2 means nothing where .* gradients: topk. Leave"),
        ({"top_k_fraction": "0.2", "compression": {"gradients": "topk"}}, "top_k_fraction must be a number, got '0.2'"),
        ({"num_sync_servers": 1.5}, "num_sync_servers must be a whole number, got 1.5"),
        ({"compression": {"rows": "bf16"}}, "keys activations, gradients, got .* rows have strategy.row_compression"),
        (
            {"row_compression": "int8"},
            r"strategy.row_compression=int8 is for activations only, .* Allowed for rows are \['none', 'bf16'\]\.$",
        ),
    ],
)
def test_setting_when_it_cannot_be_meant_then_refused_by_name(options, reason):
    with pytest.raises(ValueError, match=reason):
        HierarchicalStrategy(**options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"machines": {"link": {"bandwith": 1e7}}}, "machines=.*bandwith"),
        ({"machines": {"link": 1e7}}, r"link takes \['bandwidth', 'latency'\], got 10000000.0"),
        ({"machines": {"processor": {"flops": 0}}}, "a processor needs positive speeds"),
        ({"machines": {"shared_cores": 0}}, "machines=.*cores and memory must be positive"),
        ({"machines": {"server_cores": float("nan")}}, "machines=.*cores and memory must be positive"),
        ({"machines": {"server_cores": "8"}}, "machines=.*'8'"),
        ({"machines": {"server_memory": [1e9, 0]}}, "machines=.*server_memory must be positive"),
        ({"time_limit": "5"}, "time_limit must be a number, got '5'"),
        ({"time_limit": -1}, "time_limit must be a positive number of seconds, got -1"),
    ],
)
def test_placement_when_a_setting_cannot_be_meant_then_refused_by_name(options, reason):
    with pytest.raises(ValueError, match=reason):
        OperatorPlacement(**options)


MACHINES = """
big: {number: 2, cores: 8, memory_gib: 4, port_gbit: 10, latency_us: 20, gflops: 100}
small: {cores: 2, memory_gib: 1, port_gbit: 1}
"""


def test_machines_when_a_file_of_the_planner_describes_them_then_it_counts_and_arguments_overrule_it(tmp_path):
    path = tmp_path / "machines.yaml"
    path.write_text(MACHINES)
    settings = OperatorPlacement(machines={"file": path, "kind": "big", "server_cores": 3})
    path.unlink()  # what workers get has the numbers
    told = pickle.loads(pickle.dumps(settings))
    machines = group_machines(told, Groups(1, 2, 1, 2, 2), Compression.from_option("none"), rooms=(1000, 2000))
    port = MachineKind(port_gbit=10, latency_us=20).port
    assert (machines.trainer_cores, machines.server_cores, machines.link) == (8, 3, port)
    assert machines.memories == (1000, 2000)  # as servers tell
    assert machines.processor == Processor(flops=1e11)
    path.write_text(MACHINES.splitlines()[2])
    alone = OperatorPlacement(machines=str(path))
    assert alone.machines["trainer_cores"] == 2
    assert "processor" not in alone.machines


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        ({}, r"has the kinds \['big', 'small'\]; say which one as kind, got None"),
        ({"kind": "medium"}, r"say which one as kind, got 'medium'"),
        ({"kind": "big", "cores": 2}, r"machines has \['cores'\]"),
    ],
)
def test_machines_when_their_file_has_several_kinds_then_one_is_named(tmp_path, machines, message):
    (tmp_path / "machines.yaml").write_text(MACHINES)
    with pytest.raises(ValueError, match=message):
        OperatorPlacement(machines={"file": tmp_path / "machines.yaml", **machines})
    with pytest.raises(FileNotFoundError, match="no file of machines"):
        OperatorPlacement(machines="nothing.yaml")


def test_machines_when_given_as_plain_lists_and_mappings_then_they_count():
    settings = OperatorPlacement(machines={"link": {"bandwidth": 1e7}, "server_memory": [1e9, 2e9]})
    machines = group_machines(settings, Groups(1, 1, 1, 2), Compression.from_option("none"))
    assert machines.link.bandwidth == 1e7
    assert machines.memories == (1e9, 2e9)


def test_layers_in_pieces_when_there_and_back_then_weights_and_states_are_the_same():
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    before = [x.clone() for x in model.parameters()]
    states = [{key: x.clone() for key, x in optimizer.state[p].items()} for p in model.parameters()]
    layers = CutLayers(model, [LayerSplit("0", "output", 2), LayerSplit("2", "input", 2)], optimizer)
    assert len(layers.optimizer.param_groups[0]["params"]) == 6 + 2 + 1  # one half has the bias of layer 2
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer.state.clear()
    optimizer.state[model[4].weight], optimizer.state[model[4].bias] = states[4:]
    layers.take_model()
    layers.take_state()
    torch.testing.assert_close(list(model.parameters())[:4], before[:4], rtol=0, atol=0)
    torch.testing.assert_close([optimizer.state[p] for p in model.parameters()], states, rtol=0, atol=0)


def test_layers_in_pieces_when_the_optimizer_looks_at_matrices_then_refused_by_name():
    model, splits = perceptron(), [LayerSplit("2", "output", 2)]
    with pytest.raises(TypeError, match="fc_splits: Muon does not"):
        CutLayers(model, splits, torch.optim.Muon([model[2].weight]))
    layers = CutLayers(model, splits, torch.optim.Adafactor([model[2].weight]))
    traced = trace(layers.model, [torch.randn(4, 8)])
    devices = {x.name: "server0" if x.owns_parameters else "trainer" for x in traced.operators.operators}
    parts = GroupParts.of(split(traced, OperatorPlan(devices)).on("server0"), layers.optimizer)
    with pytest.raises(TypeError, match="fc_splits: Adafactor does not"):
        layers.check(parts)


class Steps(pl.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model, self.went_on = model, False

    def training_step(self, batch, batch_idx):
        noise = torch.rand(1)
        try:
            loss = self.model(batch[0], scale=batch_idx + noise).sum()
        except Exception:
            self.went_on = True
        self.went_on = True
        return loss

    def train_dataloader(self):
        raise AssertionError("no iteration")


class Scaled(nn.Module):
    def forward(self, x, *, scale):
        raise AssertionError("nothing is computed")


def test_sample_call_when_there_is_a_batch_then_what_the_step_calls_the_model_with_and_nothing_else_happens():
    model = Scaled()
    task, data = Steps(model), torch.utils.data.TensorDataset(torch.arange(6.0))
    trainer = task.trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(task)
    trainer._data_connector.attach_data(task, train_dataloaders=DataLoader(data, batch_size=4))
    state = torch.get_rng_state()
    x, scale = sample_call(task, model)
    assert x.tolist() == [0, 1, 2, 3]
    assert 0 < scale < 1
    assert torch.equal(torch.get_rng_state(), state)
    assert not task.went_on
    assert "forward" not in vars(model)
    assert sample_call(task, nn.Linear(1, 1)) is None  # which the step does not call


def test_graph_model_when_it_is_to_be_cut_then_refused_by_a_sentence():
    model = GraphSAGE(0, {"node": 80}, num_classes=2, embedding_dim=4, hidden=4)
    with pytest.raises(ValueError, match=r"\(GraphSAGE\) cannot be traced"):
        check_traceable(model)


def test_rank_when_it_dies_before_it_has_brought_the_model_then_those_who_wait_for_it_hear_so(monkeypatch):
    monkeypatch.setattr("lightning_recsys.parameter_server.waiting.LOOK_SECONDS", 0.01)
    lost = {1}
    news = News(HashStore(), lost=lambda: lost)
    with pytest.raises(RuntimeError, match="rank 1 died before it had brought the model"):
        news.ask("group-1", by=1)
    told = threading.Timer(0.1, news.tell, ["group-0"])
    told.start()
    assert news.ask("group-0", by=0) is None  # rank 0 lives
    told.join()


def test_rank_when_it_fails_then_those_who_wait_for_it_hear_why_at_once():
    news, heard = News(HashStore()), []

    def wait():
        try:
            news.ask("plan", by=0)
        except RuntimeError as error:
            heard.append(str(error))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    news.tell("meeting", ["host", 1])
    with pytest.raises(FileNotFoundError), news.owing(0, ["plan", "group-0"]):
        raise FileNotFoundError("there is no plan a.yaml")
    waiting.join(20)
    reason = "rank 0 could not bring the model to its group servers: FileNotFoundError: there is no plan a.yaml"
    assert heard == [reason]
    assert news.ask("meeting", by=0) == ["host", 1]
    with pytest.raises(RuntimeError, match=reason):
        news.ask("group-0", by=0)
