"""Real models on real rows, through the recipe: what a user gets from the commands in the documentation."""

import pytest
from recipe_helpers import train_here


def run(composed, data_root, folder, *overrides: str) -> dict[str, float]:
    quiet = (
        f"paths.output_dir={folder}",
        "callbacks/progress_bar=none",
        "logger=none",
        "trainer.enable_model_summary=false",
    )
    return train_here(composed("train", f"paths.data={data_root}", *quiet, *overrides), folder).metrics


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_movielens_when_trained_by_the_experiment_then_deepfm_reaches_080_and_beats_lr(composed, data_root, tmp_path):
    deepfm = run(composed, data_root, tmp_path / "deepfm", "experiment=movielens_deepfm", "trainer.max_epochs=1")
    lr = run(composed, data_root, tmp_path / "lr", "experiment=movielens_deepfm", "model=lr", "trainer.max_epochs=1")
    assert deepfm["test/auc"] >= 0.80
    assert 0.777 <= lr["test/auc"] < deepfm["test/auc"]  # below 0.777, one-hot logistic regression would be broken
    assert deepfm["test/ne"] < lr["test/ne"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lr", "fm", "wide_deep", "deepfm", "dcn", "dcn_v2", "dlrm"])
def test_adult_when_trained_then_every_model_ranks_well(composed, data_root, tmp_path, model):
    metrics = run(composed, data_root, tmp_path, "data=adult", f"model={model}", "trainer.max_epochs=1")
    assert metrics["test/auc"] >= 0.90
