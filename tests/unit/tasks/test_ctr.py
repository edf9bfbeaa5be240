"""CTRTask under Lightning's single-device strategy; the other strategies are rows of the conformance table."""

import math
import warnings
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn

from lightning_recsys.callbacks import NormalizedEntropyMonitor
from lightning_recsys.checkpoints import to_folder
from lightning_recsys.data import Batch
from lightning_recsys.embeddings import SparseFeatures
from lightning_recsys.models import DLRM, DeepFM
from lightning_recsys.optim import RowSGD, RowWiseAdagrad
from lightning_recsys.tasks import CTRTask, base

FIELDS, NUM_DENSE = {"user": 50, "movie": 30}, 3


class Batches(list[Batch]):
    """Batches as a loader; a plain list would be a list of loaders to Lightning."""


def make_batches(count: int, size: int = 16, seed: int = 0) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    batches = Batches()
    for _ in range(count):
        ids = torch.cat([torch.randint(0, rows, (size,), generator=generator) for rows in FIELDS.values()])
        dense = torch.randn(size, NUM_DENSE, generator=generator)
        labels = (dense.sum(1) + (ids[:size] % 2) > 0.5).float()
        batches.append(Batch(dense, SparseFeatures(tuple(FIELDS), ids), labels))
    return batches


def make_task(**kwargs) -> CTRTask:
    torch.manual_seed(0)
    row_optimizer = kwargs.pop("row_optimizer", RowWiseAdagrad(lr=0.1))
    model = DLRM(NUM_DENSE, FIELDS, embedding_dim=4, bottom_hidden=(8,), top_hidden=(8,), row_optimizer=row_optimizer)
    return CTRTask(model, **kwargs)


def make_trainer(tmp_path, **kwargs) -> pl.Trainer:
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_progress_bar": False}
    defaults |= {"enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    return pl.Trainer(**(defaults | kwargs))


def fit(trainer: pl.Trainer, task: pl.LightningModule, batches: Batches, **kwargs) -> None:
    """Fit with a validation loader: Lightning warns about a validation step without one."""
    trainer.fit(task, batches, make_batches(1, seed=1), **kwargs)


def rows_of(task: CTRTask) -> torch.Tensor:
    return task.model.embeddings.embedding_bags.rows.detach().clone()


class Alike(nn.Module):
    """Scores all examples alike."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense, sparse):
        return self.bias.expand(len(dense))


class SeesWarnings(pl.Callback):
    """How many warnings there were before training, and of what."""

    def __init__(self, seen: list[warnings.WarningMessage]) -> None:
        self.seen, self.before = seen, -1

    def on_train_start(self, trainer, pl_module):
        self.before = len(self.seen)


@pytest.mark.filterwarnings("default")
def test_sanity_check_when_scores_are_alike_then_the_warning_waits_for_a_validation(tmp_path):
    with warnings.catch_warnings(record=True) as seen:
        warnings.filterwarnings("always", message="AUC may be off")
        watch = SeesWarnings(seen)
        trainer = make_trainer(tmp_path, num_sanity_val_steps=1, callbacks=[watch])
        fit(trainer, CTRTask(Alike()), make_batches(2))
    of_auc = [i for i, one in enumerate(seen) if "AUC may be off by up to 0.5" in str(one.message)]
    assert len(of_auc) == 1
    assert of_auc[0] >= watch.before >= 0
    assert trainer.callback_metrics["val/auc"] == 0.5


def test_fit_then_dense_part_and_rows_have_learned(tmp_path):
    task, batches = make_task(), make_batches(40)
    before = rows_of(task)
    trainer = make_trainer(tmp_path, max_epochs=3)
    trainer.validate(task, batches, verbose=False)
    untrained = trainer.callback_metrics["val/auc"]
    trainer.fit(task, batches, batches)
    assert not torch.equal(before, rows_of(task))
    assert trainer.callback_metrics["val/auc"] > max(untrained, 0.9)


def test_evaluation_then_metrics_equal_scikit_learn(tmp_path):
    task, batches = make_task(), make_batches(5)
    trainer = make_trainer(tmp_path)
    fit(trainer, task, batches)
    predictions = torch.cat(trainer.predict(task, batches)).double().numpy()
    labels = torch.cat([batch.labels for batch in batches]).numpy()
    metrics = {name: float(value) for name, value in trainer.test(task, batches, verbose=False)[0].items()}
    assert metrics["test/logloss"] == pytest.approx(log_loss(labels, predictions), abs=1e-6)
    assert metrics["test/auc"] == pytest.approx(roc_auc_score(labels, predictions), abs=1e-3)
    assert metrics["test/calibration"] == pytest.approx(predictions.sum() / labels.sum(), abs=1e-5)
    rate = labels.mean()
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert metrics["test/ne"] == pytest.approx(log_loss(labels, predictions) / entropy, abs=1e-5)


def test_accumulation_then_equals_larger_batches(tmp_path):
    halves = make_batches(8)
    wholes = Batches(
        Batch(
            torch.cat([first.dense, second.dense]),
            SparseFeatures.cat([first.sparse, second.sparse]),
            torch.cat([first.labels, second.labels]),
        )
        for first, second in zip(halves[::2], halves[1::2], strict=True)
    )
    accumulated, whole = make_task(), make_task()
    fit(make_trainer(tmp_path, accumulate_grad_batches=2), accumulated, halves)
    fit(make_trainer(tmp_path), whole, wholes)
    for (name, left), right in zip(accumulated.state_dict().items(), whole.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_scheduler_then_drives_dense_part_and_rows(tmp_path):
    scheduler = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.0 if step >= 2 else 1.0)
    task = make_task(row_optimizer=RowSGD(lr=0.5), optimizer=partial(torch.optim.SGD, lr=0.1), scheduler=scheduler)
    batches = make_batches(5)
    fit(make_trainer(tmp_path, max_steps=2), task, batches)
    after_two = {name: value.clone() for name, value in task.state_dict().items()}
    task = make_task(row_optimizer=RowSGD(lr=0.5), optimizer=partial(torch.optim.SGD, lr=0.1), scheduler=scheduler)
    trainer = make_trainer(tmp_path)
    fit(trainer, task, batches)
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.0, 0.0]
    for name, value in task.state_dict().items():
        if not name.endswith(".step"):
            assert torch.equal(value, after_two[name]), name


def test_resume_by_ckpt_path_then_equals_the_run_without_a_break(tmp_path):
    batches = make_batches(6)
    through, broken, resumed = make_task(), make_task(), make_task()
    fit(make_trainer(tmp_path, max_epochs=2), through, batches)
    trainer = make_trainer(tmp_path)
    fit(trainer, broken, batches)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    fit(make_trainer(tmp_path, max_epochs=2), resumed, batches, ckpt_path=tmp_path / "half.ckpt")
    for name, value in through.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_checkpoint_then_loads_with_weights_only_and_holds_plain_config(tmp_path):
    task = make_task(config={"model": {"name": "dlrm"}, "seed": 0})
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, monitor="val/ne", mode="min")
    trainer = make_trainer(tmp_path, enable_checkpointing=True, callbacks=[checkpoint])
    trainer.fit(task, make_batches(4), make_batches(2))
    content = torch.load(checkpoint.best_model_path, weights_only=True)
    assert content["hyper_parameters"]["config"] == {"model": {"name": "dlrm"}, "seed": 0}
    trainer.test(task, make_batches(2), ckpt_path="best", verbose=False)
    reloaded = CTRTask.load_from_checkpoint(checkpoint.best_model_path, model=make_task().model)
    assert torch.equal(rows_of(reloaded), rows_of(task))


def test_folder_checkpoint_then_a_plain_trainer_and_the_class_read_it(tmp_path):
    task, batches, folder = make_task(), make_batches(4), tmp_path / "folder.ckpt"
    trainer = make_trainer(tmp_path)
    fit(trainer, task, batches)
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    to_folder(tmp_path / "file.ckpt", folder)
    assert folder.is_dir()
    reloaded = CTRTask.load_from_checkpoint(folder, model=make_task().model)
    assert all(torch.equal(value, reloaded.state_dict()[name]) for name, value in task.state_dict().items())
    (expected,) = make_trainer(tmp_path).validate(task, batches, verbose=False)
    (found,) = make_trainer(tmp_path).validate(make_task(), batches, ckpt_path=folder, verbose=False)
    assert found == expected
    rows = []
    for path in (folder, tmp_path / "file.ckpt"):
        resumed = make_trainer(tmp_path, max_epochs=2)
        fit(resumed, resumed_task := make_task(), batches, ckpt_path=path)
        assert resumed.global_step == 8
        rows.append(rows_of(resumed_task))
    assert torch.equal(*rows)


@pytest.mark.parametrize("model", [DLRM, DeepFM])
def test_bfloat16_mixed_then_trains_and_rows_stay_float32(tmp_path, model):
    torch.manual_seed(0)
    task = CTRTask(model(NUM_DENSE, FIELDS, embedding_dim=4))
    trainer = make_trainer(tmp_path, precision="bf16-mixed", max_epochs=3)
    trainer.fit(task, make_batches(40), make_batches(5))
    assert trainer.callback_metrics["val/auc"] > 0.8
    assert rows_of(task).dtype == torch.float32


def test_bfloat16_true_then_it_is_refused_and_told_what_to_use(tmp_path):
    with pytest.raises(TypeError, match=r"rows are kept as they were made.*precision='bf16-mixed'"):
        fit(make_trainer(tmp_path, precision="bf16-true"), make_task(), make_batches(1))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
def test_compiled_then_it_trains_as_it_does_uncompiled(tmp_path):
    plain = make_task()
    make_trainer(tmp_path).fit(plain, make_batches(3))
    compiled = torch.compile(make_task(), backend="eager")  # graphs as for any backend, without a C++ compiler
    make_trainer(tmp_path).fit(compiled, make_batches(3))
    trained = {name.replace("_orig_mod.", ""): value for name, value in compiled.state_dict().items()}
    torch.testing.assert_close(trained, dict(plain.state_dict()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


def test_fast_dev_run_then_one_batch(tmp_path):
    task = make_task()
    trainer = make_trainer(tmp_path, fast_dev_run=True)
    trainer.fit(task, make_batches(4), make_batches(2))
    assert trainer.global_step == 1


def test_second_fit_of_the_same_task_then_trains_on(tmp_path):
    task, batches = make_task(), make_batches(4)
    first = make_trainer(tmp_path)
    fit(first, task, batches)
    before = rows_of(task)
    fit(make_trainer(tmp_path), task, batches)
    assert not torch.equal(before, rows_of(task))


@pytest.mark.parametrize("given", [True, False])
def test_callbacks_then_exactly_one_monitor(tmp_path, given):
    monitor = NormalizedEntropyMonitor()
    trainer = make_trainer(tmp_path, callbacks=[monitor] if given else [])
    fit(trainer, make_task(), make_batches(2))
    monitors = [callback for callback in trainer.callbacks if isinstance(callback, NormalizedEntropyMonitor)]
    assert len(monitors) == 1
    assert (monitors[0] is monitor) == given


class OwnModule(pl.LightningModule):
    """Somebody's own LightningModule around one of our models, with nothing of CTRTask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = DeepFM(NUM_DENSE, FIELDS, embedding_dim=4, row_optimizer=RowSGD(lr=0.5))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.net(batch.dense, batch.sparse), batch.labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], lr=0.1)


def test_own_module_when_it_attaches_nothing_then_rows_are_trained_in_backward(tmp_path):
    module = OwnModule()
    before = module.net.embeddings.embedding_bags.rows.detach().clone()
    make_trainer(tmp_path).fit(module, make_batches(3))
    assert not torch.equal(before, module.net.embeddings.embedding_bags.rows)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("value", [None, 0.5])
def test_gradient_clipping_when_asked_for_then_a_line_says_that_rows_are_left_alone(tmp_path, monkeypatch, value):
    lines: list[str] = []
    monkeypatch.setattr(base.log, "warning", lambda message, *values: lines.append(message % values))
    make_trainer(tmp_path, gradient_clip_val=value).fit(make_task(), make_batches(1))
    assert [line.split(" clips")[0] for line in lines] == ([] if value is None else ["trainer.gradient_clip_val=0.5"])


def test_model_when_it_returns_a_column_then_says_how_to_end_it():
    class Column(nn.Linear):
        def forward(self, dense, sparse):
            return super().forward(dense)

    with pytest.raises(
        ValueError, match=r"Column\.forward must return one logit .* \[16\], got \[16, 1\]\. End it with"
    ):
        CTRTask(Column(NUM_DENSE, 1)).training_step(make_batches(1)[0], 0)
