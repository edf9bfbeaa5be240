"""``launcher=ray`` without a cluster; ``tests/distributed/test_ray.py`` has one."""

from __future__ import annotations

import pytest
from recipe_helpers import run_recipe
from recipe_tools.build import build, build_trainer, plain
from recipe_tools.on_ray import refuse_one_process, worker_arguments


def test_launcher_when_it_is_to_start_no_worker_then_refused(composed):
    config = plain(composed("train", "launcher=ray", "launcher.num_workers=0"))
    with pytest.raises(ValueError, match=r"launcher\.num_workers must be at least 1, got 0"):
        build(config["launcher"])


def test_servers_when_they_have_no_folder_then_refused(composed):
    config = plain(composed("train", "launcher=ray", "launcher.num_servers=2"))
    with pytest.raises(ValueError, match=r"launcher\.num_servers=2, and launcher\.store_folder does not say"):
        build(config["launcher"])


def test_strategy_of_one_process_when_ray_starts_two_then_refused(composed):
    config = plain(composed("train", "launcher=ray", "strategy=single", "trainer=cpu"))
    with pytest.raises(ValueError, match=r"launcher\.num_workers=2, and this strategy trains on 1 process: .*ddp"):
        refuse_one_process(build_trainer(config, logger=False), config)


def test_run_on_this_machine_then_its_trainer_knows_nothing_of_ray(composed):
    config = plain(composed("train", "trainer=cpu"))
    assert worker_arguments(config) == {}
    refuse_one_process(build_trainer(config, logger=False), config)


def test_launcher_when_a_value_has_the_wrong_type_then_refused_before_any_cluster_is_there(tmp_path):
    done = run_recipe("train.py", "launcher=ray", "launcher.num_workers=two", "hydra.run.dir=out", folder=tmp_path)
    assert done.returncode != 0
    assert "launcher.num_workers must be int, got 'two' (str)" in done.stderr
