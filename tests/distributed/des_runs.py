"""What the tests of DES train, in one process and in several: many small runs in one launch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_recsys.callbacks import ExamplesPerSecond, NormalizedEntropyMonitor
from lightning_recsys.data import Batch, SyntheticDataModule
from lightning_recsys.launchers.sidecars import SHARED_MEMORY
from lightning_recsys.models import DCN, DLRM, DCNv2, DeepFM, FactorizationMachine, LogisticRegression, WideDeep
from lightning_recsys.optim import RowAdagrad, RowAdam, RowFTRL
from lightning_recsys.stores.dynamic.rows import DynamicRows
from lightning_recsys.strategies import DESStrategy
from lightning_recsys.tasks import CTRTask

# Rules that divide by what they have seen start above 0: a step is then a smooth function of the gradient. From 0 the
# first step has full size whatever the gradient is, and takes its sign from a rounding error where it vanishes.
ROWS = {"row_optimizer": RowAdagrad(0.05, initial_accumulator=0.01), "first_order_optimizer": RowFTRL(0.05)}
EMBEDDED = {"embedding_dim": 4, **ROWS}
ADAGRAD = partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.01)
ADAM = partial(torch.optim.Adam, lr=0.01, eps=1e-4)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


@dataclass(frozen=True)
class Case:
    """A model on some data, and how it is trained.

    ``cardinalities``: of the fields. The second one has bags of 0 to 3 ids.
    ``batch_size``: does not divide the rows, so the last batch is a smaller one, of an even number of examples.
    """

    model: Callable[..., nn.Module]
    arguments: dict[str, Any] = field(default_factory=dict)
    cardinalities: tuple[int, ...] = (50, 40, 7, 20, 60)
    optimizer: Callable[..., torch.optim.Optimizer] = ADAGRAD
    batch_size: int = 32
    steps: int = 50
    num_dense: int = 3
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)

    def data(self) -> SyntheticDataModule:
        return SyntheticDataModule(
            batch_size=self.batch_size,
            train_rows=self.batch_size * self.steps - 18,
            val_rows=0,
            test_rows=0,
            cardinalities=self.cardinalities,
            multi_hot={"c1": 3},
            num_dense=self.num_dense,
        )

    def task(self) -> CTRTask:
        torch.manual_seed(1)
        return CTRTask(self.model(self.num_dense, self.data().fields, **self.arguments), optimizer=self.optimizer)

    def fit(
        self, *, strategy: Any = "auto", devices: int = 1, task: CTRTask | None = None, **arguments: Any
    ) -> CTRTask:
        task = self.task() if task is None else task
        ckpt_path = arguments.pop("ckpt_path", None)
        settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **self.trainer, **arguments}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's advice on small runs
            trainer = pl.Trainer(
                accelerator="cpu",
                strategy=strategy,
                devices=devices,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
                **settings,
            )
            trainer.fit(task, datamodule=self.data(), ckpt_path=ckpt_path)
        return task


CASES = {
    "lr": Case(LogisticRegression, ROWS),
    "lr_without_numbers": Case(LogisticRegression, ROWS, num_dense=0),
    "fm": Case(FactorizationMachine, EMBEDDED),
    "wide_deep": Case(WideDeep, {"hidden": (8, 4), **EMBEDDED}, strategy={"field_placement": "balanced"}),
    "deepfm": Case(DeepFM, {"hidden": (8, 4), **EMBEDDED}),
    "deepfm_with_adam": Case(
        DeepFM,
        {"hidden": (8, 4), **EMBEDDED, "row_optimizer": RowAdam(0.01, eps=1e-4, weight_decay=0.1)},
        optimizer=ADAM,
    ),
    "dropped": Case(DeepFM, {"hidden": (8, 4), "dropout": 0.2, "embedding_dropout": 0.2, **EMBEDDED}),
    "dcn": Case(DCN, {"hidden": (8,), "normalization": "batch", **EMBEDDED}, optimizer=SGD),
    "dcn_v2_parallel": Case(DCNv2, {"rank": 3, "hidden": (8,), **EMBEDDED}),
    "dcn_v2_stacked": Case(DCNv2, {"rank": 3, "structure": "stacked", "hidden": (8,), **EMBEDDED}),
    "dcn_v2_full": Case(DCNv2, {"hidden": (8,), **EMBEDDED}),
    "dlrm": Case(DLRM, {"embedding_dropout": 0.2, "bottom_hidden": (5,), "top_hidden": (6,), **EMBEDDED}),
    "two_fields": Case(DeepFM, {"hidden": (8, 4), **EMBEDDED}, cardinalities=(50, 40)),
    "clipped": Case(DeepFM, {"hidden": (8, 4), **EMBEDDED}, optimizer=SGD, trainer={"gradient_clip_val": 0.02}),
    "accumulated": Case(DeepFM, {"hidden": (8, 4), **EMBEDDED}, trainer={"accumulate_grad_batches": 4}),
}
NOISY = Case(
    DCN,
    {"hidden": (16, 8), "dropout": 0.3, "embedding_dropout": 0.2, "normalization": "batch", **EMBEDDED},
    steps=200,
    trainer={"precision": "bf16-mixed"},
)


class Shared(pl.Callback):
    """Remembers which columns a process reads, and what it has as a whole, just as training leaves it."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.columns = batch.sparse.keys

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        own = trainer.strategy._cut.cuts
        named = [*pl_module.named_parameters(), *pl_module.named_buffers()]
        self.seen = {name: x.detach().clone() for name, x in named if name not in own and "embedding_bags" not in name}


def join(rank: int, world: int, port: int) -> None:
    """Become a process as ``torchrun`` would have started it."""
    torch.set_num_threads(1)
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "des",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0",
    }


def state_of(task: CTRTask) -> dict[str, Tensor]:
    return {name: value for name, value in task.state_dict().items() if name.startswith("model.")}


def train_all(rank: int, world: int, port: int, folder: str, names: Sequence[str]) -> None:
    """Fit one case after the other; what this process's own module holds afterwards goes to a file."""
    join(rank, world, port)
    states = {
        name: state_of(CASES[name].fit(strategy=DESStrategy(**CASES[name].strategy), devices=world)) for name in names
    }
    torch.save(states, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def compare_processes(rank: int, world: int, port: int, folder: str) -> None:
    """Dropout, batch norm and bfloat16, and again from the middle of the epoch; loaders that give other batches."""
    join(rank, world, port)
    shared, again = Shared(), Shared()
    saving = ModelCheckpoint(folder, filename="noisy", every_n_train_steps=190)
    NOISY.fit(strategy=DESStrategy(), devices=world, callbacks=[shared, saving], enable_checkpointing=True)
    task = NOISY.task()
    torch.manual_seed(rank)  # as without a seed
    NOISY.fit(strategy=DESStrategy(), devices=world, task=task, callbacks=again, ckpt_path=f"{folder}/noisy.ckpt")
    errors = [
        error_of(lambda: CASES["lr"].fit(strategy=SharesOut(), devices=world)),
        error_of(lambda: fit_whole_batches(world, in_loader=torch.Generator().manual_seed(rank))),
        error_of(lambda: fit_whole_batches(world, in_step=torch.Generator().manual_seed(rank))),
        error_of(lambda: fit_whole_batches(world, in_step=None)),  # torch's global one
    ]
    seen = {"shared": shared.seen, "again": again.seen, "columns": shared.columns, "errors": errors}
    torch.save(seen, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def error_of(fit: Callable[[], Any]) -> str:
    try:
        fit()
    except ValueError as raised:
        return str(raised)
    return "none"


SAME = torch.Generator()


def draw(batch: Batch, generator: torch.Generator | None) -> Batch:
    """Negative samples: other ids of the first field."""
    values = batch.sparse.values.clone()
    values[: len(batch)] = torch.randint(50, (len(batch),), generator=generator)
    return replace(batch, sparse=batch.sparse.with_values(values))


class Draws(CTRTask):
    """Draws negative samples as it steps."""

    generator: torch.Generator | None = SAME

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch if self.generator is SAME else draw(batch, self.generator), batch_idx)


def fit_whole_batches(
    world: int, *, in_loader: torch.Generator | None = SAME, in_step: torch.Generator | None = SAME
) -> None:
    """A loader of one's own, which gives all columns to every process; what is drawn goes in place of ids."""
    case = CASES["lr"]
    data = case.data()
    data.setup("fit")
    task = Draws(case.task().model, optimizer=case.optimizer)
    task.generator = in_step
    batches = [draw(x, in_loader) if in_loader is not SAME else x for x in data.train_dataloader()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on small runs
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy=DESStrategy(),
            devices=world,
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(task, DataLoader(batches, batch_size=None))
    assert trainer.global_step == 2


class SharesOut(DESStrategy):
    """Batches by rank, as most strategies have it."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}


SAVED = CASES["deepfm_with_adam"]


def go_on(rank: int, world: int, port: int, folder: str, starts: dict[str, str | None], devices: int) -> None:
    """Train to the end from each checkpoint, or from the start; save after 20 steps."""
    join(rank, world, port)
    states = {}
    for name, path in starts.items():
        saving = ModelCheckpoint(folder, filename=f"{name}-{{step}}", every_n_train_steps=20, save_top_k=-1)
        arguments = {"callbacks": saving, "enable_checkpointing": True, "ckpt_path": path}
        states[name] = state_of(SAVED.fit(strategy=DESStrategy(), devices=devices, **arguments))
    torch.save(states, f"{folder}/{world}-{rank}.pt")
    torch.distributed.destroy_process_group()


UNBOUNDED = Case(
    DeepFM,
    {"hidden": (8, 4), **EMBEDDED, "row_optimizer": RowAdam(0.01, eps=1e-4), "device": "meta"},
    cardinalities=(10**12, 40, 7, 20, 60),
    steps=20,
)
BOUNDED = replace(UNBOUNDED, cardinalities=(50, 40, 7, 20, 60))


class LeavesNothing(pl.Callback):
    """No file of a process's rows has a name: whenever it is killed, nothing is left."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert list(SHARED_MEMORY.glob(f"lightning_recsys-{os.getpid()}-*")) == []


def train_without_rows(rank: int, world: int, port: int, folder: str) -> None:
    """Tables of which nobody has rows at first: all made, or each when it is first trained; then go on from a file."""
    if world > 1:
        join(rank, world, port)
    for name, case, dynamic in (("all", BOUNDED, None), ("some", UNBOUNDED, DynamicRows())):
        strategy = DESStrategy(dynamic_rows=dynamic)
        saving = ModelCheckpoint(folder, filename=f"{name}-{world}-{{step}}", every_n_train_steps=10, save_top_k=-1)
        case.fit(strategy=strategy, devices=world, callbacks=[saving, LeavesNothing()], enable_checkpointing=True)
    saving = ModelCheckpoint(folder, filename=f"more-{world}", every_n_train_steps=20)
    arguments = {"callbacks": saving, "enable_checkpointing": True, "ckpt_path": f"{folder}/some-{world}-step=10.ckpt"}
    UNBOUNDED.fit(strategy=DESStrategy(dynamic_rows=DynamicRows()), devices=world, **arguments)


SHARED_OUT = replace(CASES["dcn_v2_stacked"], batch_size=30)


def train_groups(rank: int, world: int, port: int, folder: str) -> None:
    """Three groups, each with a third of every batch."""
    join(rank, world, port)
    case = replace(SHARED_OUT, batch_size=SHARED_OUT.batch_size // 3, steps=3 * SHARED_OUT.steps)
    shared, speed = Shared(), ExamplesPerSecond(warmup_steps=0)
    callbacks = [NormalizedEntropyMonitor(), speed, shared]
    task = case.fit(strategy=DESStrategy(num_replicas=3), devices=world, callbacks=callbacks)
    seen = {"state": state_of(task), "shared": shared.seen, "examples": speed.global_examples}
    groups_left = len(torch.distributed.distributed_c10d._world.pg_map)
    seen |= {"train/ne": task.trainer.callback_metrics["train/ne"], "groups_left": groups_left}
    torch.save(seen, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()
