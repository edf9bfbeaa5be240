"""``launcher=ray`` without a cluster; ``tests/distributed/test_ray.py`` has one."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_helpers import run_recipe
from recipe_tools import on_ray
from recipe_tools.build import build, build_trainer, plain
from recipe_tools.on_ray import refuse_one_process, worker_arguments
from recipe_tools.record import RunRecord


def test_launcher_when_it_is_to_start_no_worker_then_refused(composed):
    config = plain(composed("train", "launcher=ray", "launcher.num_workers=0"))
    with pytest.raises(ValueError, match=r"launcher\.num_workers must be at least 1, got 0"):
        build(config["launcher"])


@pytest.mark.parametrize("number", [0, 3])
def test_launcher_when_fewer_workers_will_do_then_so_few_are_from_1_to_all_of_them(composed, number):
    config = plain(composed("train", "launcher=ray", f"launcher.min_workers={number}"))
    with pytest.raises(ValueError, match=rf"min_workers must be from 1 to num_workers=2, got {number}"):
        build(config["launcher"])


def test_run_when_fewer_workers_will_do_then_one_is_no_mistake(composed):
    config = plain(composed("train", "launcher=ray", "launcher.min_workers=1", "strategy=single", "trainer=cpu"))
    trainer = build_trainer(config, logger=False)
    refuse_one_process(trainer, config)
    config["launcher"]["min_workers"] = 2
    with pytest.raises(ValueError, match="trains on 1 process"):
        refuse_one_process(trainer, config)


def test_run_when_its_first_worker_has_left_nothing_then_says_what_to_do(tmp_path):
    (tmp_path / "ray").mkdir()
    with pytest.raises(RuntimeError, match=rf"tested the model died.*hydra.run.dir={tmp_path} ckpt_path=last"):
        on_ray.read_learned(tmp_path, "run1")
    (tmp_path / "ray" / "learned-run1.json").write_text('{"metrics": {"test/ne": 0.9}, "details": {}}')
    assert on_ray.read_learned(tmp_path, "run1")["metrics"] == {"test/ne": 0.9}


def test_servers_when_they_have_no_folder_then_refused(composed):
    config = plain(composed("train", "launcher=ray", "launcher.num_servers=2"))
    with pytest.raises(ValueError, match=r"launcher\.num_servers=2, and launcher\.store_folder does not say"):
        build(config["launcher"])


def test_workers_when_they_are_to_be_replaced_one_by_one_without_servers_then_refused_before_any_cluster(composed):
    pytest.importorskip("ray", reason="the extra lightning-recsys[ray] is not installed")
    config = plain(composed("train", "launcher=ray", "strategy=shadowsync", "strategy.max_replacements=1"))
    record = RunRecord(Path("nowhere"), config=config, overrides=[])
    with pytest.raises(ValueError, match=r"strategy\.max_replacements needs servers .* launcher\.num_servers=2"):
        build(config["launcher"])(print, record)


@pytest.mark.parametrize(
    ("address", "given", "told"),
    [(None, {"num_cpus": 400}, None), ("auto", {}, "The cluster has 3 CPUs, and this run waits for 399.5, of workers")],
)
def test_cluster_when_it_is_for_the_run_alone_then_it_has_room_for_it_and_another_one_s_lack_is_told(
    address, given, told, monkeypatch, caplog
):
    ray = pytest.importorskip("ray", reason="the extra lightning-recsys[ray] is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    started = {}
    monkeypatch.setattr(ray, "init", lambda **options: started.update(options))
    monkeypatch.setattr(ray, "shutdown", lambda: started.update(ended=True))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(started.get("num_cpus", 3))})
    with caplog.at_level("WARNING"), on_ray._cluster(address, 399.5, 399.5):
        assert "ended" not in started
    assert {name: started[name] for name in ("num_cpus",) if name in started} == given
    assert (started["address"], started["ended"]) == (address, True)
    assert [told in line for line in caplog.messages] == [True] if told else caplog.messages == []


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
