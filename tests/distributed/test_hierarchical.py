"""Hierarchical Training with processes: as exact as one process where one net trains, and near it where many do."""

import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from server_helpers import listening_child

from lightning_recsys import cli
from lightning_recsys.callbacks import TelemetryMonitor
from lightning_recsys.data import SyntheticDataModule
from lightning_recsys.errors import OperatorRoomError
from lightning_recsys.models import DLRM, DeepFM
from lightning_recsys.placement.operator_plans.file import read_measured, read_plan
from lightning_recsys.strategies import HierarchicalStrategy
from lightning_recsys.strategies.hierarchical import OperatorPlacement
from lightning_recsys.strategies.hierarchical.draining import WANTED
from lightning_recsys.sync import EASGD, ModelAveraging
from lightning_recsys.tasks import CTRTask

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(200),
    # Lightning 2.6 on torch 2.13
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    # a run that goes on elsewhere, on purpose
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

FIELDS = {"c0": 50, "c1": 30, "c2": 20}
MODELS = {
    "dlrm": partial(DLRM, 4, FIELDS, embedding_dim=8, bottom_hidden=(16,), top_hidden=(16,)),
    "deepfm": partial(DeepFM, 4, FIELDS, embedding_dim=8, hidden=(16, 16)),
}
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05, fused=True)
ADAM = partial(torch.optim.Adam, lr=0.01)


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.8)


def make_task(model="dlrm", optimizer=ADAGRAD, **options):
    torch.manual_seed(0)
    return CTRTask(MODELS[model](), optimizer=optimizer, **options)


def make_data(rows=512, batch_size=64):
    sizes = {"train_rows": rows, "val_rows": 256, "test_rows": 64, "batch_size": batch_size}
    return SyntheticDataModule(num_dense=4, cardinalities=tuple(FIELDS.values()), **sizes)


def fit(task, data=None, *, strategy="auto", epochs=1, callbacks=(), ckpt_path=None, **options):
    pl.seed_everything(1)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=1 if strategy == "auto" else "auto",
        max_epochs=epochs,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(x, ModelCheckpoint) for x in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(task, data or make_data(), ckpt_path=ckpt_path)
    return trainer


def hierarchical(**options):
    return HierarchicalStrategy(table_placement="size", **options)


def assert_equal(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_close(one, other):
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("model", "optimizer"), [("dlrm", SGD), ("deepfm", ADAM)])
def test_one_net_when_it_trains_then_all_parameters_and_metrics_are_those_of_one_process_bit_by_bit(model, optimizer):
    task, reference = (make_task(model, optimizer, scheduler=schedule) for _ in range(2))
    before = [x.clone() for x in task.parameters()]
    trainer = fit(task, strategy=hierarchical(servers_per_group=2))
    expected = fit(reference)
    assert trainer.world_size == 1
    assert not any(torch.equal(a, b) for a, b in zip(before, task.parameters(), strict=True) if a.numel() > 1)
    assert_equal(task, reference)
    assert trainer.callback_metrics["val/ne"] == expected.callback_metrics["val/ne"]


def test_checkpoint_when_training_goes_on_in_another_layout_and_in_one_process_then_as_never_interrupted(tmp_path):
    saving = ModelCheckpoint(tmp_path, filename="first")
    fit(make_task(), strategy=hierarchical(servers_per_group=2), callbacks=[saving])
    whole, elsewhere, alone = make_task(), make_task(), make_task()
    fit(whole, epochs=2)
    fit(elsewhere, strategy=hierarchical(), epochs=2, ckpt_path=saving.best_model_path)
    fit(alone, epochs=2, ckpt_path=saving.best_model_path)
    assert_equal(elsewhere, whole)
    assert_equal(alone, whole)


def test_layers_in_pieces_when_saved_and_gone_on_with_whole_or_in_other_pieces_then_as_one_process(tmp_path):
    saving, splits = ModelCheckpoint(tmp_path, filename="first"), {"top.0": "output", "top.2": "input"}
    first, reference = (make_task(optimizer=ADAM) for _ in range(2))
    placement = OperatorPlacement(save=tmp_path / "operators.yaml")
    pieces = hierarchical(servers_per_group=2, fc_splits=splits, operator_placement=placement)
    fit(first, strategy=pieces, callbacks=[saving])
    assert {f"{path}.pieces.{i}" for path in splits for i in range(2)} <= read_plan(placement.save).keys()
    measured = read_measured(placement.save)
    assert measured.keys() == {"trainer_seconds_per_request", "server_seconds_per_request", "wait_per_request"}
    assert min(measured["trainer_seconds_per_request"], measured["server_seconds_per_request"]) > 1e-5
    fit(reference)
    assert_close(first, reference)
    assert not torch.equal(first.model.top[0].weight, make_task(optimizer=ADAM).model.top[0].weight)
    fit(whole := make_task(optimizer=ADAM), epochs=2)
    other = hierarchical(servers_per_group=3, fc_splits={"top.0": "input"})
    for strategy in ("auto", other):
        again = make_task(optimizer=ADAM)
        fit(again, strategy=strategy, epochs=2, ckpt_path=saving.best_model_path)
        assert_close(again, whole)


class NotesRounds:
    """Of an algorithm: each group server notes that it makes rounds. They begin when servers have found each other."""

    folder: Path

    def fold(self, replica, answer):
        super().fold(replica, answer)
        (self.folder / f"round-{os.getpid()}").touch()


class NotingEASGD(NotesRounds, EASGD):
    pass


class NotingAveraging(NotesRounds, ModelAveraging):
    pass


class AwaitsRounds(Callback):
    """Nobody goes on to the second batch before all group servers have made a round: training does not wait for them.

    Args:
        folder: For the servers' notes.
        num_servers: Group servers of the run.
    """

    def __init__(self, folder, num_servers):
        self.folder, self.num_servers = folder, num_servers

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        while batch_idx == 1 and len(list(self.folder.glob("round-*"))) < self.num_servers:
            time.sleep(0.01)


def test_two_groups_when_as_many_updates_as_one_process_made_then_near_it_with_the_staleness_of_their_nets(tmp_path):
    data = partial(make_data, rows=4096)
    once, twice = (float(fit(make_task(), data(), epochs=n).callback_metrics["val/ne"]) for n in (1, 2))
    algorithm = NotingEASGD()
    algorithm.folder = tmp_path
    strategy = partial(hierarchical, num_groups=2, nets_per_trainer=2, algorithm=algorithm)
    saving = ModelCheckpoint(tmp_path / "saved", filename="first")
    callbacks = [AwaitsRounds(tmp_path, num_servers=2), TelemetryMonitor(), saving]
    shares = {"limit_train_batches": 4096 // 64 // 4}  # of each net: a faster one leases none of the others' batches
    trainer = fit(make_task(), data(), strategy=strategy(), epochs=1, callbacks=callbacks, **shares)
    seen = trainer.callback_metrics
    assert trainer.world_size == 4
    assert 0 <= float(seen["staleness/group/mean"]) <= 1 * 2  # t trainers of r nets
    assert float(seen["staleness/group/max"]) >= float(seen["staleness/group/mean"])
    assert float(seen["sync/rounds"]) > 0
    # Two nets make each group's updates: half as many in an epoch as one process makes. Rows, which groups share, get
    # all of them; and the fewer rounds are made, the less is taken back of what a group has learned.
    again = fit(
        make_task(), data(), strategy=strategy(), epochs=2, ckpt_path=saving.best_model_path, **shares
    ).callback_metrics
    assert twice < once
    assert twice * 0.97 <= float(again["val/ne"]) <= once * 1.03


def test_groups_when_they_average_among_themselves_then_rounds_are_made_and_all_stop_in_the_same_one(tmp_path):
    algorithm = NotingAveraging(alpha=1.0)
    algorithm.folder = tmp_path
    strategy = hierarchical(num_groups=2, servers_per_group=2, algorithm=algorithm)
    callbacks = [AwaitsRounds(tmp_path, num_servers=4), TelemetryMonitor()]
    trainer = fit(make_task(), make_data(rows=2048), strategy=strategy, epochs=2, callbacks=callbacks)
    assert trainer.world_size == 2
    assert trainer.current_epoch == 2
    assert float(trainer.callback_metrics["sync/rounds"]) > 0
    assert float(trainer.callback_metrics["val/ne"]) < 1


def test_compression_when_chosen_then_fewer_bytes_travel_and_the_model_is_nearly_the_same(tmp_path):
    expected, plan = fit(make_task()).callback_metrics["val/ne"], tmp_path / "operators.yaml"
    seen = {}
    for compression, forward in (("none", "float32"), ({"activations": "int8", "gradients": "bf16"}, "int8")):
        placement = OperatorPlacement("rules", save=plan) if compression == "none" else OperatorPlacement(plan=plan)
        strategy = hierarchical(
            servers_per_group=2, compression=compression, fc_forward=forward, operator_placement=placement
        )
        seen[str(compression)] = fit(make_task(), strategy=strategy, callbacks=[TelemetryMonitor()]).callback_metrics
    plain, compressed = seen.values()
    assert float(compressed["comm/sent_bytes"]) < 0.6 * float(plain["comm/sent_bytes"])
    assert float(compressed["comm/received_bytes"]) < 0.6 * float(plain["comm/received_bytes"])
    assert "compression/saved_bytes" not in plain
    assert float(compressed["compression/saved_bytes"]) > 0
    assert plain["val/ne"] == expected
    assert float(compressed["val/ne"]) == pytest.approx(float(expected), rel=0.01)


TOPK = {"activations": "none", "gradients": "topk"}  # which sends two arrays for each tensor


class Towers(torch.nn.Module):
    """DLRM on the sum of what many layers make of the dense features, which the nets add up."""

    def __init__(self, num_towers):
        super().__init__()
        self.towers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(num_towers))
        self.dlrm = MODELS["dlrm"]()

    def forward(self, dense, sparse):
        return self.dlrm(torch.stack([tower(dense) for tower in self.towers]).mean(0), sparse)


@pytest.mark.parametrize(("num_towers", "compression"), [(70, "none"), (40, TOPK)])
def test_model_when_a_server_computes_many_layers_for_a_net_then_trains(num_towers, compression):
    torch.manual_seed(0)
    task = CTRTask(Towers(num_towers), optimizer=ADAGRAD)
    before = [x.clone() for x in task.model.towers.parameters()]
    trainer = fit(task, make_data(rows=256), strategy=hierarchical(compression=compression))
    assert (trainer.world_size, trainer.global_step) == (1, 4)
    assert not any(torch.equal(a, b) for a, b in zip(before, task.model.towers.parameters(), strict=True))


class Normed(torch.nn.Module):
    """DLRM behind two normalisations, of which one is frozen."""

    def __init__(self):
        super().__init__()
        self.dlrm, self.norm, self.frozen = (
            MODELS["dlrm"](),
            torch.nn.BatchNorm1d(4, momentum=0.5),
            torch.nn.BatchNorm1d(4),
        )
        self.frozen.eval()

    def forward(self, dense, sparse):
        return self.dlrm(self.frozen(self.norm(dense + 100)), sparse)


@pytest.mark.filterwarnings("ignore:Found 1 module.s. in eval mode")  # on purpose
def test_running_values_when_a_server_has_them_for_several_nets_then_the_model_gets_those_of_the_server():
    torch.manual_seed(0)
    task = CTRTask(Normed(), optimizer=ADAGRAD)
    trainer = fit(task, make_data(rows=1024), strategy=hierarchical(nets_per_trainer=2))
    assert trainer.world_size == 2
    torch.testing.assert_close(task.model.norm.running_mean, torch.full((4,), 100.0), atol=2, rtol=0)
    assert torch.equal(task.model.frozen.running_mean, torch.zeros(4))


def kill_group_server(trainer, number):
    process = listening_child(trainer.strategy.endpoints["group"][number], psutil.Process(os.getppid()))
    process.kill()
    process.wait()


class KillsGroupServer(Callback):
    """Kills a group server in the midst of training, once."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 0 and batch_idx == self.step:
            kill_group_server(trainer, 0)


class LosesGroup(Callback):
    """The last server of a group is killed in the first epoch; each rank notes the examples that it trained.

    Both groups have trained three batches then, whichever is faster: at the end of an epoch nobody would be left to
    train what that one had under way.

    Args:
        folder: For the notes.
        group: Number of the group.
    """

    def __init__(self, folder, group):
        self.folder, self.group = folder, group

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 0 and batch_idx == 3:
            (self.folder / f"three-by-{trainer.global_rank}").touch()
            while len(list(self.folder.glob("three-by-*"))) < 2:
                time.sleep(0.01)
            if trainer.global_rank != self.group:
                kill_group_server(trainer, 2 * self.group + 1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with (self.folder / f"{trainer.current_epoch}-{trainer.global_rank}").open("a") as file:
            file.writelines(f"{x}\n" for x in batch.dense.tolist())

    def on_train_end(self, trainer, pl_module):
        run = Path(trainer.strategy.endpoints["group"][0].removeprefix("ipc://")).parent
        (self.folder / "servers").write_text(str(sorted(x.name for x in run.glob("group-?"))))

    def trained(self, epoch, rank):
        path = self.folder / f"{epoch}-{rank}"
        return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize(("algorithm", "group"), [("easgd", 0), ("ma", 1)])
def test_group_when_a_server_is_lost_for_good_then_it_alone_ends_and_the_others_train_every_example(
    algorithm, group, tmp_path, caplog
):
    noting, other = LosesGroup(tmp_path, group), 1 - group
    strategy = hierarchical(num_groups=2, servers_per_group=2, max_restarts=0, algorithm=algorithm)
    trainer = fit(make_task(), make_data(rows=2048), strategy=strategy, epochs=3, callbacks=[noting])
    assert trainer.world_size == 2
    assert trainer.current_epoch == 3
    assert float(trainer.callback_metrics["val/ne"]) < 1
    every = set(noting.trained(2, other))
    assert len(every) == 2048
    assert set(noting.trained(0, 0)) | set(noting.trained(0, 1)) == every
    assert (tmp_path / "servers").read_text() == str([f"group-{2 * other}", f"group-{2 * other + 1}"])
    for epoch in (1, 2):
        assert sorted(noting.trained(epoch, other)) == sorted(every)
        assert noting.trained(epoch, group) == []
    (said,) = (x for x in caplog.messages if "was ended by" in x)
    lost = rf"^Server group-{2 * group + 1} .* SIGKILL, and max_restarts=0 .* end, too \({group}\); the other 1 go on"
    assert re.search(lost, said)


class Begins(Callback):
    """Tells that training, or what comes before it, has begun."""

    def __init__(self, folder):
        self.folder = folder

    def on_sanity_check_start(self, trainer, pl_module):
        (self.folder / "begun").touch()

    on_train_start = on_sanity_check_start


class Branches(torch.nn.Module):
    """DLRM that decides by its input, which no trace knows."""

    def __init__(self):
        super().__init__()
        self.dlrm = MODELS["dlrm"]()

    def forward(self, dense, sparse):
        return self.dlrm(dense if dense.sum() > 0 else -dense, sparse)


@pytest.mark.parametrize(
    ("model", "options", "error", "reason"),
    [
        (
            None,
            {"operator_placement": OperatorPlacement(machines={"server_memory": 1000.0})},
            OperatorRoomError,
            "^(?!strategy=).*needs .* server0 has 1,000",
        ),
        (
            Branches,
            {},
            ValueError,
            r"strategy=hierarchical cuts Branches over group servers: .*\(Branches\) cannot be traced",
        ),
    ],
    ids=["no_room", "no_trace"],
)
def test_model_when_it_cannot_be_cut_or_has_no_room_then_refused_before_training_begins(
    tmp_path, model, options, error, reason
):
    task = make_task() if model is None else CTRTask(model(), optimizer=ADAGRAD)
    with pytest.raises(error, match=reason) as raised:
        fit(task, strategy=hierarchical(**options), callbacks=[Begins(tmp_path)])
    assert raised.type is error
    assert not (tmp_path / "begun").exists()


class NetsDie(Callback):
    """The first net of a group dies in the first epoch, the other one in the second; others wait for that."""

    def __init__(self, folder, group):
        self.folder, self.group = folder, group

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        doomed = 2 * self.group + trainer.current_epoch
        if batch_idx != 3 or trainer.current_epoch > 1:
            return
        if trainer.global_rank == doomed:
            (self.folder / f"dead-{doomed}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while not (self.folder / f"dead-{doomed}").exists():
            time.sleep(0.01)

    def on_validation_end(self, trainer, pl_module):
        run = trainer.strategy.dense._run
        told = trainer.world_size, dist.get_world_size(), run.leads, run._training
        (self.folder / f"epoch-{trainer.current_epoch}-rank-{trainer.global_rank}").write_text(str(told))


@pytest.mark.parametrize(("group", "algorithm"), [(1, "easgd"), (0, "ma")])
def test_nets_when_they_die_then_others_go_on_and_a_group_without_any_counts_no_more(
    tmp_path, caplog, group, algorithm
):
    strategy = hierarchical(num_groups=2, nets_per_trainer=2, min_workers=2, algorithm=algorithm)
    callbacks = [NetsDie(tmp_path, group), ModelCheckpoint(tmp_path / "saved")]
    trainer = fit(make_task(), make_data(rows=2048), strategy=strategy, epochs=3, callbacks=callbacks)
    seen = {x.name.removeprefix("epoch-"): eval(x.read_text()) for x in tmp_path.glob("epoch-*")}
    other, next_one = 2 * (1 - group), 2 * group + 1
    assert seen[f"0-rank-{other}"] == (4, 3, True, [0, 1])
    assert seen[f"0-rank-{next_one}"] == (4, 3, True, [0, 1])  # in the place of the group's first
    assert seen[f"1-rank-{other}"] == seen[f"2-rank-{other}"] == (4, 2, True, [1 - group])
    assert f"2-rank-{next_one}" not in seen
    assert trainer.current_epoch == 3
    assert float(trainer.callback_metrics["val/ne"]) < 1
    assert sum("was ended by SIGKILL" in x and "go on" in x for x in caplog.messages) == 2


class Drains(Callback):
    """The first group's net has the other one drained in the first epoch, and back in the third, by the command."""

    def __init__(self, folder):
        self.folder = folder

    def trained(self, epoch, rank):
        path = self.folder / f"{epoch}-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        epoch, rank = trainer.current_epoch, trainer.global_rank
        with (self.folder / f"{epoch}-{rank}").open("a") as file:
            file.write(f"{batch_idx}\n")
        folders = [Path(x.removeprefix("ipc://")).with_suffix("") for x in trainer.strategy.endpoints["group"]]
        if (rank, epoch, batch_idx) == (1, 0, 3):  # it would be through before it looks, once a second
            while not (folders[2] / WANTED).exists():
                time.sleep(0.01)
            time.sleep(1.2)
        if rank or batch_idx != 2 or epoch == 1:
            return
        run = folders[0].parent.name
        others = ["--run", run, "--timeout", "60"]
        assert cli.main(["groups", "rejoin" if epoch else "drain", "1", *others]) == 0
        if epoch == 0:
            assert cli.main(["groups", "drain", "0", *others]) == 1  # nobody would train
        while epoch == 2 and len(self.trained(2, 1)) < 3:
            time.sleep(0.01)


def test_group_when_drained_then_the_others_train_its_share_until_it_comes_back(tmp_path):
    drains, strategy = Drains(tmp_path), hierarchical(num_groups=2, servers_per_group=2)
    trainer = fit(make_task(), make_data(rows=2048), strategy=strategy, epochs=3, callbacks=[drains])
    assert trainer.world_size == 2
    counts = [[len(drains.trained(epoch, rank)) for rank in range(2)] for epoch in range(3)]
    assert [sum(x) for x in counts] == [32, 32, 32]
    assert counts[1][1] == 1  # by which it comes to the end of the epoch
    assert counts[0][1] < 16
    assert counts[2][1] >= 3
    assert float(trainer.callback_metrics["val/ne"]) < 1


class TrainsOn(Callback):
    """The second net is slow to end a validation in mid-epoch, behind which no metric is gathered."""

    def __init__(self, folder):
        self.validated, self.went_on = folder / "validated", folder / "went_on"

    def on_validation_end(self, trainer, pl_module):
        if trainer.global_rank == 1 and not self.validated.exists():
            time.sleep(0.5)
            self.validated.touch()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == 0 and batch_idx == 2:
            assert trainer.world_size == 2
            assert self.validated.exists(), "rows change while another net validates"
            self.went_on.touch()


def test_nets_when_one_has_validated_then_it_trains_on_when_all_have(tmp_path):
    fit(make_task(), strategy=hierarchical(nets_per_trainer=2), callbacks=[TrainsOn(tmp_path)], val_check_interval=2)
    assert (tmp_path / "went_on").exists()


def test_group_server_when_killed_between_two_batches_then_nothing_is_lost():
    task, reference = make_task(), make_task()
    trainer = fit(task, strategy=hierarchical(), callbacks=[KillsGroupServer(3)])
    fit(reference)
    assert trainer.global_step == 8
    assert_equal(task, reference)


class Teacher(torch.nn.Module):
    """DLRM on a dict, distilled from a tower that is not trained, with numbers that a callback changes."""

    def __init__(self):
        super().__init__()
        self.dlrm, self.teacher, self.drop = MODELS["dlrm"](), torch.nn.Linear(4, 1), torch.nn.Dropout(0.0)
        self.frozen, self.bound = torch.nn.Linear(4, 1).requires_grad_(False), torch.nn.Identity()
        self.settings = SimpleNamespace(softmax=SimpleNamespace(temperature=1.0))
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, batch):
        with torch.no_grad():
            taught = self.teacher(batch["dense"]).squeeze(1)
        taught = self.bound(taught + self.frozen(batch["dense"]).squeeze(1))
        return (self.dlrm(batch["dense"], batch["sparse"]) + taught) / self.settings.softmax.temperature + self.drop(
            self.shift
        )


class Distilling(CTRTask):
    def forward(self, batch):
        return self.model({"dense": batch.dense, "sparse": batch.sparse})


class Changes(Callback):
    """Another temperature, shift, frozen layer and dropout in each epoch; in the last one the dropout leaves nothing.

    The shift also moves where the servers' numbers are about to come back, before a validation.
    """

    def on_train_epoch_start(self, trainer, pl_module):
        epoch, model = trainer.current_epoch, pl_module.model
        model.settings.softmax.temperature = 1.0 + epoch
        model.shift.fill_(epoch / 2)
        model.drop.p = float(epoch == 2)
        model.frozen.weight.data.add_(0.1)
        if epoch == 1:
            model.bound = torch.nn.Hardtanh(-0.1, 0.1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx in (3, 5):
            pl_module.model.shift.add_(1.0)

    def on_validation_start(self, trainer, pl_module):
        pl_module.model.shift.mul_(0.5)


class Constant(torch.nn.Module):
    """Its one weight has the gradient ``temperature``, whatever the batch and however stale the weight is."""

    def __init__(self):
        super().__init__()
        self.weight, self.temperature = torch.nn.Parameter(torch.zeros(1)), 1.0

    def forward(self, dense):
        return (self.weight * self.temperature).expand(dense.shape[0])


class ByEpoch(pl.LightningModule):
    """The same as a task without a model of its own, by the number of its trainer's epoch."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense):
        return (self.weight * 2.0**self.current_epoch).expand(dense.shape[0])

    def training_step(self, batch):
        return self(batch.dense).mean()

    def validation_step(self, batch):
        assert torch.equal(self(batch.dense), (self.weight * 2.0**self.current_epoch).expand(64))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25)


class Descends(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Constant()

    def training_step(self, batch):
        return self.model(batch.dense).mean()

    def validation_step(self, batch):
        assert torch.equal(self.model(batch.dense), self.model.weight.expand(64) * self.model.temperature)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25)


class Warms(Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.model.temperature = 2.0**trainer.current_epoch


@pytest.mark.parametrize(("make", "callbacks"), [(Descends, [Warms()]), (ByEpoch, [])])
def test_two_nets_when_what_forward_reads_changes_then_every_update_is_by_the_number_of_its_epoch(make, callbacks):
    task = make()
    strategy = hierarchical(nets_per_trainer=2, servers_per_group=2)
    trainer = fit(task, make_data(rows=1024), strategy=strategy, epochs=3, callbacks=callbacks)
    assert trainer.world_size == 2
    # 1,024 rows are 16 batches of 64, and float32 has these sums exactly.
    (weight,) = task.parameters()
    assert float(weight.detach()) == -0.25 * 16 * (1 + 2 + 4)


class Evaluated(Distilling):
    """Its tower stays in evaluation mode, in which it is trained, as Lightning leaves it."""

    def __init__(self):
        super().__init__(Teacher(), optimizer=SGD)
        self.model.drop.p = 0.5
        self.model.eval()


@pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")  # on purpose
def test_one_net_when_its_model_is_in_evaluation_mode_then_trained_so_bit_by_bit():
    tasks = []
    for strategy in ("auto", hierarchical()):
        torch.manual_seed(0)
        tasks.append(Evaluated())
        before = tasks[-1].model.dlrm.top[0].weight.clone()
        fit(tasks[-1], strategy=strategy, epochs=2)
        assert not torch.equal(tasks[-1].model.dlrm.top[0].weight, before)
    assert_equal(*tasks)


class CallsInner(Distilling):
    """Its step calls a module of the model, and never the model."""

    def forward(self, batch):
        return self.model.dlrm(batch.dense, batch.sparse)


class NormClipped(torch.optim.SGD):
    """Divides by the norm of all gradients inside of its step."""

    def step(self, closure=None):
        grads = [x.grad for group in self.param_groups for x in group["params"] if x.grad is not None]
        norm = torch.stack([x.norm() for x in grads]).norm() if grads else None
        for grad in grads:
            grad /= norm
        return super().step(closure)


@pytest.mark.parametrize(
    ("task", "optimizer", "reason"),
    [
        (CallsInner, SGD, r"training_step did not call, and model.dlrm.\S+ has a gradient"),
        (Distilling, partial(NormClipped, lr=0.1), r"NormClipped moves dlrm.\S+ otherwise where parts of the model"),
    ],
    ids=["calls_inner", "coupled_optimizer"],
)
def test_task_when_its_parts_would_train_otherwise_then_ended_by_name_at_the_first_batch(task, optimizer, reason):
    made = task(Teacher(), optimizer=optimizer)
    with pytest.raises(ValueError, match=reason):
        fit(made, strategy=hierarchical(servers_per_group=2))


def test_one_net_when_what_forward_reads_changes_then_followed_and_the_teacher_stays_bit_by_bit():
    tasks = []
    for strategy in ("auto", hierarchical(servers_per_group=2)):
        torch.manual_seed(0)
        tasks.append(Distilling(Teacher(), optimizer=SGD))
        before = tasks[-1].model.teacher.weight.clone()
        fit(tasks[-1], strategy=strategy, epochs=3, callbacks=[Changes()], val_check_interval=4)
        assert torch.equal(tasks[-1].model.teacher.weight, before)
    assert_equal(*tasks)
