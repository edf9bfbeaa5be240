"""The quality suite: what it keeps, which learning rates it takes, and FuxiCTR's counterparts where it is installed."""

import random
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.harness.turns import in_turns
from benchmarks.harness.workload import Workload
from benchmarks.peers import fuxictr as fuxictr_peer
from benchmarks.suites import quality
from benchmarks.suites.quality import Comparison, Job, Runs, climb
from hydra import initialize_config_dir
from recipe_helpers import CONF
from recipe_tools.quiet import be_quiet

from lightning_recsys import models
from lightning_recsys.data import Batch
from lightning_recsys.embeddings import EmbeddingBagCollection, SparseFeatures


def adult_file(path: Path, *, rows: int, seed: int, dot: str) -> None:
    """Rows in Adult's format whose label follows the education."""
    draw = random.Random(seed)
    lines = []
    for _ in range(rows):
        education, number = draw.choice([("Bachelors", 13), ("HS-grad", 9)])
        rich = draw.random() < (0.8 if number == 13 else 0.2)
        label = (">50K" if rich else "<=50K") + dot
        lines.append(
            f"{draw.randint(17, 90)}, Private, {draw.randint(10_000, 90_000)}, {education}, {number}, Divorced, Sales, "
            f"Husband, White, {draw.choice(['Male', 'Female'])}, 0, 0, 40, United-States, {label}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def suite(tmp_path: Path) -> Iterator[Any]:
    """The suite on rows of Adult's shape, in one epoch's time."""
    adult_file(tmp_path / "adult/adult.data", rows=600, seed=0, dot="")
    adult_file(tmp_path / "adult/adult.test", rows=200, seed=1, dot=".")
    defaults = {
        "experiments": ["quality_adult"],
        "sizes": {},
        "ours": {},
        "seeds": [0],
        "rate_factors": {"ours": [1], "fuxictr": [10]},
    }

    def run(**arguments: Any) -> list[Comparison]:
        return quality.run(**defaults | arguments, cache=str(tmp_path / "cache"), data=str(tmp_path))

    be_quiet()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield run


def trained(tmp_path: Path) -> dict[str, int]:
    """Folder -> time of its record, in the cache."""
    return {path.parent.name: path.stat().st_mtime_ns for path in tmp_path.glob("cache/*/metrics.json")}


def test_suite_when_run_again_then_only_what_is_new_is_trained(suite, tmp_path):
    (first,) = suite(models=["lr"], libraries=["ours"])
    before = trained(tmp_path)
    assert len(before) == 1
    (again,) = suite(models=["lr"], libraries=["ours"], seeds=[0, 1])
    after = trained(tmp_path)
    assert before.items() <= after.items()
    assert [name.split("-")[:5] for name in after.keys() - before.keys()] == [
        ["quality_adult", "lr", "ours", "x1", "seed1"]
    ]
    assert again.runs[0].metrics[0] == first.runs[0].metrics[0]
    assert 0.7 < first.runs[0].mean("test/auc") < 0.9  # 0.8 is what the education tells


def test_suite_when_a_run_was_interrupted_then_it_is_trained_again(suite, tmp_path):
    suite(models=["lr"], libraries=["ours"])
    (path,) = tmp_path.glob("cache/*/metrics.json")
    path.write_text(path.read_text().replace('"status": "completed"', '"status": "running"'))
    suite(models=["lr"], libraries=["ours"])
    assert '"status": "completed"' in path.read_text()


def test_suite_when_sizes_are_given_then_they_reach_the_model_and_the_command(suite, tmp_path):
    sizes = {"wide_deep": ["model.hidden=[8]"]}
    (result,) = suite(models=["wide_deep"], libraries=["ours"], sizes=sizes)
    command = shlex.split(result.runs[0].command())
    assert command[:3] == ["python", "recipes/train.py", "-m"]
    assert command[3:] == ["experiment=quality_adult", "model=wide_deep", "model.hidden=[8]", "seed=0"]
    suite(models=["wide_deep"], libraries=["ours"], sizes={"wide_deep": ["model.hidden=[4]"]})
    assert len(trained(tmp_path)) == 2


def test_suite_when_ours_has_settings_then_they_are_for_that_experiment_alone(suite):
    ours = {"quality_adult": {"lr": ["optim.dense.lr=0.5"]}, "quality_movielens": {"lr": ["optim.dense.lr=0.7"]}}
    (result,) = suite(models=["lr"], libraries=["ours"], ours=ours)
    assert shlex.split(result.runs[0].command())[5:] == ["optim.dense.lr=0.5", "seed=0"]


def test_job_when_the_rate_is_changed_then_that_of_the_rows_is_and_the_command_says_so():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        job = Job("quality_movielens", "fm", (), "ours", rate_factor=2)
        config = job.config(folder=Path("out"), data="data")
        plain = Job("quality_movielens", "fm", (), "ours").config(folder=Path("out"), data="data")
        rate = plain["optim"]["rows"]["lr"]
        assert f"optim.rows.lr={2 * rate:g}" in Runs(job, [0], [], {}).command()
    assert config["optim"]["rows"].pop("lr") == 2 * plain["optim"]["rows"].pop("lr")
    assert config["optim"] == plain["optim"]


@pytest.mark.parametrize(("top", "expected"), [(0.01, 0.1), (0.3, 0.3), (1, 1), (8, 10), (500, 30)])
def test_climb_then_the_nearest_step_or_the_end(top, expected):
    assert climb([0.1, 0.3, 1, 3, 10, 30], lambda rate: -abs(rate - top)) == expected


def test_climb_then_it_looks_at_neighbours_only():
    seen: list[float] = []

    def height(rate: float) -> float:
        seen.append(rate)
        return {0.3: 1, 1: 2, 3: 1}[rate]

    assert climb([0.1, 0.3, 1, 3, 10], height) == 1
    assert set(seen) == {0.3, 1, 3}


def test_climb_when_all_are_level_then_it_stays():
    assert climb([0.3, 1, 3], lambda _: 0.5) == 1


def test_comparison_then_mean_and_deviation_of_the_seeds_and_the_difference():
    def runs(library: quality.Library, *aucs: float) -> Runs:
        metrics = [{"test/auc": auc, "test/logloss": 0.5, "test/ne": 0.9} for auc in aucs]
        return Runs(Job("some", "fm", (), library), range(len(aucs)), metrics, {1: 0.8})

    compared = Comparison("some", [runs("ours", 0.80, 0.82), runs("fuxictr", 0.79, 0.81)])
    assert compared.ahead("fm") == pytest.approx(0.01)
    table = compared.table()
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert cells["AUC"] == ["0.8100 ± 0.0141", "0.8000 ± 0.0141"]
    assert cells["ahead"] == ["+0.0100", ""]
    assert compared.to_dict()["auc_ahead"] == {"fm": pytest.approx(0.01)}
    assert "suite.libraries=[fuxictr]" in compared.to_dict()["runs"][1]["command"]


def test_comparison_when_one_library_was_run_then_no_difference():
    alone = Runs(Job("some", "fm", (), "ours"), [0], [{"test/auc": 0.8, "test/logloss": 0.5, "test/ne": 0.9}], {1: 0.8})
    compared = Comparison("some", [alone])
    assert compared.ahead("fm") is None
    assert alone.deviation("test/auc") == 0


@pytest.fixture(scope="module")
def fuxictr() -> None:
    """FuxiCTR, imported before a test's own time: it sets environment variables, which no test may do."""
    if not fuxictr_peer.is_available():
        pytest.skip("FuxiCTR is not installed")
    import fuxictr.pytorch.dataloaders
    import fuxictr.pytorch.models  # noqa: F401 - for what importing does


needs_fuxictr = pytest.mark.usefixtures("fuxictr")

OURS = {
    "lr": models.LogisticRegression,
    "fm": models.FactorizationMachine,
    "wide_deep": models.WideDeep,
    "deepfm": models.DeepFM,
    "dcn": models.DCN,
    "dcn_v2": models.DCNv2,
    "dlrm": models.DLRM,
}
SIZES: dict[str, dict[str, Any]] = {
    "lr": {},
    "fm": {"embedding_dim": 4},
    "wide_deep": {"embedding_dim": 4, "hidden": [8, 6]},
    "deepfm": {"embedding_dim": 4, "hidden": [8, 6]},
    "dcn": {"embedding_dim": 4, "hidden": [8, 6], "num_cross_layers": 3},
    "dcn_v2": {"embedding_dim": 4, "hidden": [8, 6], "num_cross_layers": 3},
    "dlrm": {"embedding_dim": 4, "bottom_hidden": [8], "top_hidden": [6]},
}


@needs_fuxictr
@pytest.mark.parametrize("name", OURS)
def test_counterpart_then_as_many_parameters_as_ours(name, tmp_path):
    from benchmarks.peers.fuxictr_models import MODELS, feature_map

    fields = {"user": 50, "movie": 40, "genre": 7}
    columns = feature_map(tmp_path, embedding_dim=4, dense=[], fields=fields, bags={})
    theirs = MODELS[name](columns, lr=1e-3, **SIZES[name])
    ours = OURS[name](0, fields, kernel="torch", **SIZES[name])
    trained = sum(parameter.numel() for parameter in ours.parameters() if parameter.requires_grad)
    tables = [table for part in ours.modules() if isinstance(part, EmbeddingBagCollection) for table in part.tables]
    trained += sum(table.num_embeddings * table.embedding_dim for table in tables)
    own_bias = name == "deepfm"  # of its first order, beside the network's
    assert sum(part.numel() for part in theirs.parameters() if part.requires_grad) == trained + own_bias


@needs_fuxictr
def test_columns_then_every_row_as_it_was_and_bags_filled_up_with_zeros():
    from benchmarks.peers.fuxictr_training import Loader, as_columns

    lengths = torch.tensor([1, 1, 1, 2, 0, 1])
    sparse = SparseFeatures(("user", "genres"), torch.tensor([4, 5, 6, 7, 8, 0]), lengths=lengths)
    rows = Batch(torch.tensor([[0.5], [1.5], [2.5]]), sparse, torch.tensor([1.0, 0.0, 1.0]))
    loader = Loader(as_columns(rows, bags=["genres"]), batch_size=2, shuffle=False)
    first, last = loader
    assert len(loader) == 2
    assert first["genres"].tolist() == [[8, 9], [0, 0]]
    assert (last["genres"].tolist(), last["user"].tolist(), last["label"].tolist()) == ([[1, 0]], [6], [1.0])
    assert first["d0"].tolist() == [0.5, 1.5]


@needs_fuxictr
@pytest.mark.parametrize("name", OURS)
def test_suite_when_fuxictr_trains_then_it_learns(name, suite):
    overrides = [f"model.{size}={value}" for size, value in SIZES[name].items() if isinstance(value, list)]
    (result,) = suite(models=[name], libraries=["fuxictr"], sizes={name: overrides})
    assert result.runs[0].mean("test/auc") > 0.6
    assert 0 < result.runs[0].mean("test/ne") < 1.5


@needs_fuxictr
@pytest.mark.parametrize("variant", [fuxictr_peer.variant, fuxictr_peer.preloaded])
def test_peer_then_it_trains_in_turns(variant):
    work = Workload(cardinalities=(20, 30), num_dense=2, dim=4, rows=64)
    measured = in_turns({"fuxictr": variant(work, "deepfm", 16)}, rounds=2, seconds=0.0)
    assert len(measured.rates["fuxictr"]) == 2
