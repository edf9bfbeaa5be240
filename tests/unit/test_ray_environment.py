"""Ranks that an engine has placed, on nodes that may run different numbers of them. No cluster is started."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch

from lightning_recsys.launchers import EngineEnvironment
from lightning_recsys.placement import ClusterLayout
from lightning_recsys.strategies import DESStrategy, HETStrategy, HierarchicalStrategy, ShadowSyncStrategy
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


def trainer(strategy, nodes, rank, **options):
    return pl.Trainer(accelerator="cpu", strategy=strategy, plugins=[Placed(nodes, rank)], logger=False, **options)


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


def test_trainer_when_its_ranks_are_on_two_nodes_then_refused():
    with pytest.raises(ValueError, match=r"ranks 2 to 3 are on the nodes \[0, 1\], and workers of a trainer share"):
        ClusterLayout(2, 2, 2, nodes=(0, 0, 0, 1))
    with pytest.raises(ValueError, match=r"ranks 2 to 3 .* nets of a trainer .* a multiple of 2 ranks"):
        Groups(2, 1, 2, 1, num_nodes=2, nodes=(0, 0, 0, 1))


def test_trainers_when_the_engine_started_fewer_ranks_then_refused_by_both_numbers():
    with pytest.raises(ValueError, match=r"num_trainers=4 .* needs 4 processes, and 3 were started.*num_workers"):
        trainer(ShadowSyncStrategy(num_trainers=4), (0, 0, 1), 0)


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
        ({"num_servers": 0, "store_folder": "/data"}, "num_servers must be at least 1, got 0"),
        ({"num_servers": 1, "store_folder": "data"}, "store_folder must be an absolute path, .* got data"),
    ],
)
def test_servers_when_a_setting_cannot_be_then_refused_before_any_actor_is_there(arguments, message):
    ray = pytest.importorskip("lightning_recsys.ray", reason="the extra lightning-recsys[ray] is not installed")
    with pytest.raises(ValueError, match=message):
        ray.RayServers(**arguments)
