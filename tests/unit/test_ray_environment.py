"""Ranks that an engine has placed, on nodes that may run different numbers of them. No cluster is started."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch

from lightning_recsys.launchers import EngineEnvironment, Launched
from lightning_recsys.parameter_server.meetings import MeetingPlace
from lightning_recsys.placement import ClusterLayout
from lightning_recsys.strategies import (
    AsyncParameterServerStrategy,
    DESStrategy,
    HETStrategy,
    HierarchicalStrategy,
    ShadowSyncStrategy,
)
from lightning_recsys.strategies.common.run.identity import run_id
from lightning_recsys.strategies.hierarchical.groups import Groups


class Placed(EngineEnvironment):
    """The rank that a test says, of ranks whose nodes it says."""

    def __init__(self, nodes, rank):
        self.nodes, self.rank = nodes, rank

    def node_of_ranks(self):
        return self.nodes

    @property
    def job(self):
        return "engine/run"

    @staticmethod
    def detect():
        return False

    main_address, main_port = "10.0.0.1", 29500

    def world_size(self):
        return len(self.nodes)

    def global_rank(self):
        return self.rank

    def local_rank(self):
        return self.nodes[: self.rank].count(self.nodes[self.rank])

    def node_rank(self):
        return self.nodes[self.rank]

    def set_world_size(self, size):
        pass

    def set_global_rank(self, rank):
        pass


class Replaced(Placed):
    """An engine that replaces single ranks."""

    def launched(self):
        return Launched("start1", "/shared", replaces=self.rank == 0)


def trainer(strategy, nodes, rank, *, engine=Placed, **options):
    return pl.Trainer(accelerator="cpu", strategy=strategy, plugins=[engine(nodes, rank)], logger=False, **options)


@pytest.mark.parametrize("strategy", [HETStrategy, ShadowSyncStrategy, DESStrategy])
@pytest.mark.parametrize(("rank", "local"), [(0, 2), (1, 2), (2, 1)])
def test_trainer_when_nodes_run_two_ranks_and_one_then_it_has_the_engine_s_ranks(strategy, rank, local):
    made = trainer(strategy(), (0, 0, 1), rank)
    assert (made.world_size, made.num_nodes, made.global_rank) == (3, 2, rank)
    assert made.strategy.num_processes == local
    assert made.strategy.root_device == torch.device("cpu")
    assert made.local_rank == (0, 1, 0)[rank]


def test_layouts_when_nodes_run_two_ranks_and_one_then_counted_as_placed():
    assert trainer(ShadowSyncStrategy(), (0, 0, 1), 2).strategy.dense.layout.num_trainers == 3
    groups = Groups(3, 1, 1, 1, num_nodes=2, nodes=(0, 0, 1))
    assert [groups.node_of(group) for group in range(3)] == [0, 0, 1]
    assert trainer(DESStrategy(), (0, 0, 1), 2).strategy.group_size == 3
    made = trainer(HierarchicalStrategy(num_groups=3, trainers_per_group=1), (0, 0, 1), 2)
    assert [spec.node for spec in made.strategy.server_specs() if spec.kind == "group"][-1] == 1


@pytest.mark.parametrize(("nets", "groups"), [(1, 4), (2, 2)])
def test_groups_when_auto_then_as_many_as_there_are_processes_for(nets, groups, monkeypatch):
    def make(**options):
        strategy = HierarchicalStrategy(num_groups="auto", nets_per_trainer=nets, num_sync_servers=2)
        return pl.Trainer(accelerator="cpu", strategy=strategy, logger=False, **options)

    made = make(plugins=[Placed((0, 0, 1, 1), 2)])
    assert (made.strategy.dense.num_groups, made.world_size) == (groups, 4)
    assert len([spec for spec in made.strategy.server_specs() if spec.kind == "group"]) == groups
    made = make(devices=4)
    assert (made.strategy.dense.num_groups, made.world_size) == (groups, 4)
    assert make().world_size == nets  # of one group, where nobody says more
    started = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "RANK": "3", "LOCAL_RANK": "1"}
    for name, value in {**started, "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "run"}.items():
        monkeypatch.setenv(name, value)
    made = make(num_nodes=2)
    assert (made.strategy.dense.num_groups, made.world_size) == (groups, 4)


def test_groups_when_auto_and_processes_are_left_over_then_refused_by_both_numbers():
    strategy = HierarchicalStrategy(num_groups="auto", nets_per_trainer=2)
    with pytest.raises(ValueError, match=r"num_groups=1 .* needs 2 processes, and 3 were started"):
        trainer(strategy, (0, 0, 0), 0)


def test_trainer_when_its_ranks_are_on_two_nodes_then_refused():
    with pytest.raises(ValueError, match=r"ranks 2 to 3 are on the nodes \[0, 1\], and workers of a trainer share"):
        ClusterLayout(2, 2, 2, nodes=(0, 0, 0, 1))
    with pytest.raises(ValueError, match=r"ranks 2 to 3 .* nets of a trainer .* a multiple of 2 ranks"):
        Groups(2, 1, 2, 1, num_nodes=2, nodes=(0, 0, 0, 1))


def test_trainers_when_the_engine_started_fewer_ranks_then_refused_by_both_numbers():
    with pytest.raises(ValueError, match=r"num_trainers=4 .* needs 4 processes, and 3 were started.*num_workers"):
        trainer(ShadowSyncStrategy(num_trainers=4), (0, 0, 1), 0)


SERVERS = {"servers": ["tcp://10.0.0.1:5790"], "max_replacements": 1}


@pytest.mark.parametrize("make", [AsyncParameterServerStrategy, ShadowSyncStrategy])
def test_workers_when_an_engine_replaces_single_ones_then_they_meet_at_the_first_server_under_the_start_s_name(make):
    strategies = [trainer(make(**SERVERS), (0, 1, 2), rank, engine=Replaced).strategy for rank in (0, 1)]
    assert [strategy.is_global_zero for strategy in strategies] == [False, False]  # the new one is behind the others
    places = {strategy.run_servers.meeting_place() for strategy in strategies}
    assert places == {MeetingPlace("tcp://10.0.0.1:5790", "start1", 3)}


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            HETStrategy(servers=["tcp://10.0.0.1:5790"]),
            "HETStrategy can have no other process in the place of a worker",
        ),
        (ShadowSyncStrategy(workers_per_trainer=3, **SERVERS), "can have no other process in the place of a worker"),
        (
            HierarchicalStrategy(num_groups=3, trainers_per_group=1, max_replacements=1),
            "has servers that hold the code",
        ),
        (ShadowSyncStrategy(max_replacements=1), "needs servers that outlive workers: give it some .strategy.servers"),
    ],
)
def test_strategy_when_an_engine_replaces_single_workers_and_it_cannot_go_on_then_refused(strategy, message):
    with pytest.raises(ValueError, match=message):
        trainer(strategy, (0, 1, 2), 0, engine=Replaced)


def test_run_id_when_an_engine_names_the_job_then_it_outlives_ports(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "1")
    first = run_id(launched_by_others=True, job="engine/run")
    monkeypatch.setenv("MASTER_PORT", "2")
    assert run_id(launched_by_others=True, job="engine/run") == first
    assert run_id(launched_by_others=True, job="engine/other") != first


def test_ray_environment_when_made_outside_of_a_worker_then_says_where_it_belongs():
    ray = pytest.importorskip("lightning_recsys.ray", reason="the extra lightning-recsys[ray] is not installed")
    with pytest.raises(RuntimeError, match="for workers of Ray Train: make the Trainer in the function"):
        ray.RayEnvironment()


def test_checkpoint_when_its_storage_has_no_url_then_refused(tmp_path):
    ray = pytest.importorskip("lightning_recsys.ray", reason="the extra lightning-recsys[ray] is not installed")
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
    from ray.train import Checkpoint

    assert ray.path_in(Checkpoint(str(tmp_path), LocalFileSystem())) == f"{tmp_path}/checkpoint.ckpt"
    with pytest.raises(ValueError, match=r"cannot be written to .*SubTree.*storage_path that all nodes share"):
        ray.path_in(Checkpoint("x", SubTreeFileSystem(str(tmp_path), LocalFileSystem())))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"needs servers that outlive workers: fit\(.*servers=RayServers"),
        ({"servers": True}, "needs failures that the run allows: .*max_failures=3"),
        ({"servers": True, "datasets": {"train": None}}, "does not go with data sets of Ray Data"),
        ({"servers": True, "num_workers": (1, 2)}, r"does not go with num_workers=\(1, 2\)"),
    ],
)
def test_fit_when_workers_cannot_be_replaced_one_by_one_then_refused_before_any_worker_is_there(arguments, message):
    ray = pytest.importorskip("lightning_recsys.ray", reason="the extra lightning-recsys[ray] is not installed")
    from ray.train import ScalingConfig

    servers = ray.RayServers(1, store_folder="/data") if arguments.pop("servers", False) else None
    scaling = ScalingConfig(num_workers=arguments.pop("num_workers", 2))
    strategy = ShadowSyncStrategy(max_replacements=1)
    with pytest.raises(ValueError, match=message):
        ray.fit(print, strategy=strategy, scaling=scaling, servers=servers, **arguments)


def test_fit_when_group_servers_are_to_be_actors_then_refused():
    ray = pytest.importorskip("lightning_recsys.ray", reason="the extra lightning-recsys[ray] is not installed")
    from ray.train import ScalingConfig

    servers, scaling = ray.RayServers(1, store_folder="/data"), ScalingConfig(num_workers=2)
    with pytest.raises(ValueError, match="group servers hold the code of the run"):
        ray.fit(print, strategy=HierarchicalStrategy(), scaling=scaling, servers=servers)


def test_checkpoints_when_nothing_is_reported_then_the_whole_ones_are_found_and_the_best_and_the_last_kept(tmp_path):
    ray = pytest.importorskip("lightning_recsys.ray", reason="the extra lightning-recsys[ray] is not installed")
    from pyarrow.fs import LocalFileSystem
    from ray.train import CheckpointConfig

    from lightning_recsys.ray import checkpoints

    for epoch, loss in enumerate([0.3, 0.1, 0.2, 0.4]):
        folder = tmp_path / f"checkpoint_{epoch:06}_000000008"
        folder.mkdir()
        (folder / "checkpoint.ckpt").write_bytes(b"whole")
        (folder / "metrics.json").write_text(f'{{"loss": {loss}}}')
    (tmp_path / "checkpoint_000009_000000008").mkdir()  # one that was cut off
    saved = checkpoints.saved_checkpoints(LocalFileSystem(), str(tmp_path))
    assert [metrics["loss"] for _, metrics in saved] == [0.3, 0.1, 0.2, 0.4]
    config = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min")
    checkpoints._remove_all_but_the_best(saved, config)
    left = checkpoints.saved_checkpoints(LocalFileSystem(), str(tmp_path))
    assert [metrics["loss"] for _, metrics in left] == [0.1, 0.4]
    assert ray.path_in(left[-1][0]) == f"{tmp_path}/checkpoint_000003_000000008/checkpoint.ckpt"
    assert checkpoints.saved_checkpoints(LocalFileSystem(), f"{tmp_path}/nowhere") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_servers": 0, "store_folder": "/data"}, "num_servers must be at least 1, got 0"),
        ({"num_servers": 1, "store_folder": "data"}, "store_folder must be an absolute path, .* got data"),
    ],
)
def test_servers_when_a_setting_cannot_be_then_refused_before_any_actor_is_there(arguments, message):
    ray = pytest.importorskip("lightning_recsys.ray", reason="the extra lightning-recsys[ray] is not installed")
    with pytest.raises(ValueError, match=message):
        ray.RayServers(**arguments)
