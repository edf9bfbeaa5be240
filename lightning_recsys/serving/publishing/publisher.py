"""The callback that publishes versions of a model while it is trained."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor, nn

from lightning_recsys.callbacks import LeanCallback
from lightning_recsys.embeddings import EmbeddingBagCollection, SparseFeatures
from lightning_recsys.errors import PublishedVersionError, PublisherReplacedError
from lightning_recsys.launchers.folders import RunFolder
from lightning_recsys.serving.dense import DensePart, export_apart
from lightning_recsys.serving.encoders import encoder_of, warn_of_weights
from lightning_recsys.serving.files import VersionFolder
from lightning_recsys.serving.publishing.averages import Average, averaged_copy
from lightning_recsys.serving.publishing.retention import check_counts
from lightning_recsys.serving.publishing.snapshots import Backend, CopiedTables, backend_of, snapshot_of
from lightning_recsys.serving.publishing.writer import Cut, Skeleton, VersionWriter, counts_of
from lightning_recsys.serving.rows.packing import RowFormat, check_row_format

DEFAULT_SECONDS = 60.0
_AGREE_BATCHES = 16  # between two looks at rank 0's clock, where all processes publish together

_Gathered = tuple[Mapping[str, Tensor], Mapping[str, Backend]]
"""The dense part, and where the rows of each collection are."""

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


class ModelPublisher(LeanCallback):
    """Publishes the model every N steps or T seconds while training goes on, and once more at its end.

    The first version of a run is a base, with all rows; those that follow are increments, with the rows that changed
    since the version before and the ids of rows that were forgotten. :class:`~lightning_recsys.serving.ModelReader`
    opens them. Between two steps rank 0 copies the dense part, which takes less than a millisecond; a thread of its own
    then reads the rows where they lie, while training goes on. So the parts of a version lie a few steps apart, and the
    manifest says how far. A version that is due while the one before is still being written waits for it.

    Args:
        url: A folder, or a URL that fsspec knows.
        every_n_steps: Publish after so many steps of the optimizer.
        every_seconds: Publish every so many seconds; 60 where neither is given. Workers go by their clocks, each at the
            multiples of this time.
        keep: How many versions of this run can be opened, the latest ones; its older ones are removed. A run that is
            resumed from a checkpoint is the same run.
        keep_runs: The versions of so many runs stay in the folder, this one included; ``None`` for all.
        compact_share: Increments are compacted into a new base once they take this share of its bytes, and 64 MiB.
        max_increments: Increments are compacted as well once there are so many since the last base.
        rows: How rows are stored: ``float32``, ``bf16`` (half of the bytes), or ``int8`` (a quarter, and a scale each).
        module: The name of the LightningModule's part that is published: ``forward(dense, sparse) -> logits``.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        every_n_steps: int | None = None,
        every_seconds: float | None = None,
        keep: int = 3,
        keep_runs: int | None = None,
        compact_share: float = 1.0,
        max_increments: int = 100,
        rows: RowFormat = "float32",
        module: str = "model",
    ) -> None:
        if every_n_steps is not None and every_seconds is not None:
            raise ValueError(f"give every_n_steps or every_seconds, not both; got {every_n_steps} and {every_seconds}.")
        if every_n_steps is None and every_seconds is None:
            every_seconds = DEFAULT_SECONDS
        place = "callbacks.model_publisher."
        check_counts(place, every_n_steps=every_n_steps, keep=keep, keep_runs=keep_runs, max_increments=max_increments)
        for name, value in {"every_seconds": every_seconds, "compact_share": compact_share}.items():
            if value is not None and not value > 0:
                raise ValueError(f"{place}{name} must be above 0, got {value}.")
        # What decides how many versions there are, as the writer takes it.
        self.limits: dict[str, Any] = {"keep": keep, "keep_runs": keep_runs}
        self.limits |= {"compact_share": compact_share, "max_increments": max_increments}
        self.url = str(url)
        self.every_n_steps, self.every_seconds = every_n_steps, every_seconds
        check_row_format(rows)
        self.rows, self.module = rows, module
        self._run = uuid.uuid4().hex
        self._examples = 0  # that were trained on, by all workers
        self._reset()

    def _reset(self) -> None:
        self._part: DensePart | None = None  # the model's structure, from before a strategy changes anything in it
        self._work: _Work | None = None  # of rank 0, while it trains
        # Of another rank that may have to publish in its place: that it does, and the batch that it has seen last.
        self._succeeds = False
        self._batch: Any = None
        self._due = 0  # the step, or the multiple of `every_seconds`, of the latest version
        self._model: nn.Module | None = None
        self._names: list[str] = []  # of the dense part's tensors
        self.on_train_batch_end: Any = None  # Lightning passes over it

    def __getstate__(self) -> dict[str, Any]:
        fresh = type(self).__new__(type(self))
        fresh._reset()
        return vars(self) | vars(fresh)

    def state_dict(self) -> dict[str, Any]:
        """The run, and the examples that were trained on."""
        return {"run": self._run, "examples": self._examples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on as the same run."""
        self._run, self._examples = str(state_dict["run"]), int(state_dict["examples"])

    @property
    def is_exported(self) -> bool:
        """Whether all is there that versions are made of, so that those which are due are written."""
        return self._work is not None and self._work.is_exported

    @property
    def is_writing(self) -> bool:
        """Whether a version is being written, or what the first one needs is being made."""
        return self._work is not None and self._work.is_busy

    # --- Hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Copy the model's structure before a strategy changes anything in it."""
        if stage == "fit" and (trainer.is_global_zero or _may_be_first(trainer)) and hasattr(pl_module, self.module):
            self._part = DensePart(getattr(pl_module, self.module))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to look for versions that are due.

        Raises:
            ValueError: the LightningModule has no such part, or another run publishes there.
        """
        if (model := getattr(pl_module, self.module, None)) is None:
            raise ValueError(
                f"callbacks.model_publisher.module={self.module}: {type(pl_module).__name__} has no such part. Name the"
                " one whose forward(dense, sparse) gives logits."
            )
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # a trial, whose model is not to answer anybody
            return
        self._model, self._due = model, self._now(trainer)
        self._succeeds = not trainer.is_global_zero and _may_be_first(trainer)
        if trainer.is_global_zero or self._succeeds:
            part = self._part or DensePart(model)  # of what was made in configure_model
            self._part, self._names = part, part.names
            self._work = _Work(self, part) if trainer.is_global_zero else None
        self.on_train_batch_end = self._after_batch

    def _succeed(self, trainer: pl.Trainer) -> bool:
        """Begin to publish in the place of a first worker that has died, if it has and nothing is in the way."""
        part = self._part
        if part is None or self._batch is None or not trainer.is_global_zero:
            return False
        try:
            work = _Work(self, part)
        except (OSError, ValueError) as error:  # such as a claim of the dead worker, which ends by itself
            log.warning("This worker cannot publish yet in the place of the one that has died: %s", error)
            return False
        work.prepare(trainer, self._collections(), self._batch)
        self._work, self._succeeds, self._batch = work, False, None
        return True

    def _now(self, trainer: pl.Trainer) -> int:
        if self.every_n_steps is not None:
            return trainer.global_step // self.every_n_steps
        assert self.every_seconds is not None
        return int(time.time() // self.every_seconds)

    def _after_batch(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch's examples, and publish where a version is due."""
        work = self._work
        if work is not None:
            if not work.is_prepared:
                work.prepare(trainer, self._collections(), batch)
            self._examples += len(batch.dense) * _workers(trainer)
            if work.is_busy and not self._is_cut:
                return
        elif self._succeeds:
            self._batch = batch
            self._examples += len(batch.dense) * _workers(trainer)
        now = self._now(trainer)
        if self._is_cut and (now != self._due if self.every_n_steps else batch_idx % _AGREE_BATCHES == 0):
            now = trainer.strategy.broadcast(self._due if work is not None and work.is_busy else now)
        elif self._is_cut:
            return
        if now == self._due:
            return
        self._due = now
        if self._succeeds and self._succeed(trainer):
            return
        if work is not None and not (work.is_exported or self._is_cut):
            # The process that exports was killed, or the disk was full: another one tries. What would be cut now would
            # have to wait for it, while the rows go on; the next version is cut.
            work.export()
        else:
            self._publish(trainer, batch_idx)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Let a version be read before a callback swaps the rows of a model and those of its average."""
        swaps = any(isinstance(x, WeightAveraging) for x in trainer.callbacks)  # type: ignore[attr-defined]
        if self._work is not None and self._work.is_exported and swaps:
            self._work.wait()

    def _collections(self) -> dict[str, EmbeddingBagCollection]:
        assert self._model is not None
        return {path: x for path, x in self._model.named_modules() if isinstance(x, EmbeddingBagCollection)}

    @property
    def _is_cut(self) -> bool:
        """Whether each process has some of the tables: then all of them publish together, at the same step."""
        return any(x.whole_tables is not None for x in self._collections().values())

    def _publish(self, trainer: pl.Trainer, batch_idx: int | None) -> None:
        """Let the stores have every update of this worker; on rank 0, let a version be written."""
        assert self._model is not None
        collections = self._collections()
        for collection in collections.values():
            collection.flush()
        gathered = self._gather(trainer, collections) if self._is_cut else None
        if self._work is not None:
            position = {
                "epoch": trainer.current_epoch,
                "global_step": trainer.global_step,
                "batch_idx": batch_idx,
                "examples": self._examples,
                "examples_are": "estimated" if _is_free(trainer) else "counted",
            }
            average = averaged_copy(trainer, self.module)
            replicas = getattr(trainer.strategy, "num_replicas", 1)
            own = trainer.global_rank * replicas // trainer.world_size
            weights = {
                "replica": None if batch_idx is None else own,  # at the end all replicas have become one
                "replicas": replicas,
                "average": None if average is None else average.name,
            }
            show = getattr(trainer.strategy, "show_weights", lambda: None)
            self._work.submit(self._model, collections, position, weights, gathered, show=show, average=average)

    def _gather(self, trainer: pl.Trainer, collections: Mapping[str, EmbeddingBagCollection]) -> _Gathered | None:
        """The whole model on rank 0, where each process has a part: all stand still for it, as for a checkpoint.

        Communication: the rows of all tables go to rank 0.
        """
        own = {
            path: ({t.name: backend_of(x).read(t.name, "weight").cpu().float() for t in x.tables}, backend_of(x).step)
            for path, x in collections.items()
        }
        everybody: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
        torch.distributed.gather_object(own, everybody)
        state = trainer.strategy.lightning_module_state_dict()
        if everybody is None:
            return None
        rows = {path: {k: v.clone() for part in everybody for k, v in part[path][0].items()} for path in own}
        dense = {name: state[f"{self.module}.{name}"].detach().cpu().clone() for name in self._names}
        return dense, {path: CopiedTables(rows[path], step) for path, (_, step) in own.items()}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Publish the trained model, and wait for it."""
        if self._succeeds:
            self._succeed(trainer)
        work = self._work
        if work is not None:
            work.wait()
        if self._model is not None and (work is None or work.is_prepared):
            self._publish(trainer, None)
        if work is not None:
            work.wait()
        self._end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the last whole version as it is."""
        self._end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget the run."""
        self._end()
        self._reset()

    def _end(self) -> None:
        self.on_train_batch_end = None
        if self._work is not None:
            self._work.close()
            self._work = None


class _Work:
    """The thread that writes versions, and what it needs.

    Args:
        publisher: The publisher, whose settings are used.
        part: Structure of the dense part that is published.

    Attributes:
        is_prepared: Whether a batch was seen, which says what the model takes.
    """

    def __init__(self, publisher: ModelPublisher, part: DensePart) -> None:
        self.is_prepared = False
        self._part, self._row_format = part, publisher.rows
        folder = VersionFolder(publisher.url)
        with ExitStack() as ending:
            ending.enter_context(folder.locked(f"run {publisher._run}"))
            self._program = ending.enter_context(RunFolder()) / "p"
            self._writer = VersionWriter(folder, run=publisher._run, **publisher.limits)
            self._ending = ending.pop_all()  # only now: what was taken is given back where the folder is refused
        self._make: Callable[[], Skeleton]  # from `prepare` on
        self._skeleton: Skeleton | None = None  # what all versions have in common, once the thread has made it
        self._error: BaseException | None = None  # of the thread, until the trainer's thread raises it
        # What the thread is to do, one after the other: `None` ends it. A version is cut in the trainer's thread, and
        # read and written in the other one while training goes on.
        self._tasks: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="model-publisher", daemon=True)
        self._thread.start()

    def prepare(self, trainer: pl.Trainer, collections: Mapping[str, EmbeddingBagCollection], batch: Any) -> None:
        """Let the thread export the dense part, which takes seconds; no version is cut before.

        Raises:
            TypeError: the batches are of another kind.
        """
        dense, sparse = getattr(batch, "dense", None), getattr(batch, "sparse", None)
        if not isinstance(dense, Tensor) or not isinstance(sparse, SparseFeatures):
            raise TypeError(
                "ModelPublisher publishes models of batches with `dense` and `sparse`, as lightning_recsys.data.Batch"
                f" has; got {type(batch).__name__}."
            )
        self.is_prepared = True
        if sparse.weights is not None:
            warn_of_weights(sparse.keys)
        datamodule, num_dense, row_format = getattr(trainer, "datamodule", None), dense.shape[1], self._row_format

        def make() -> Skeleton:
            try:
                export_apart(self._part, num_dense, self._program)
            except RuntimeError as error:  # of the model, which is final; or of a machine that was short of something
                log.warning("The dense part could not be exported, and is once more before the run ends: %s", error)
                export_apart(self._part, num_dense, self._program)
            encoder = encoder_of(datamodule, self._part.features, num_dense)
            tables = {path: snapshot_of(configs, collections[path]) for path, configs in self._part.tables.items()}
            return Skeleton(self._program, encoder, num_dense, tables, row_format, self._part.buffer_names)

        self._make = make
        self.export()

    def export(self) -> None:
        """Let the thread make what all versions have in common, in which an earlier attempt has failed."""
        self._tasks.put(self._prepared)

    def _prepared(self) -> Skeleton:
        if self._skeleton is None:  # or the disk was full when it was made
            self._skeleton = self._make()
        return self._skeleton

    @property
    def is_exported(self) -> bool:
        """Whether all is there that versions are made of."""
        return self._skeleton is not None

    @property
    def is_busy(self) -> bool:
        """Whether a version is being written.

        Raises:
            Exception: the one before could not be, and no later one can.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._tasks.unfinished_tasks > 0

    def submit(
        self,
        model: nn.Module,
        collections: Mapping[str, EmbeddingBagCollection],
        position: Mapping[str, Any],
        weights: Mapping[str, Any],
        gathered: _Gathered | None,
        *,
        show: Callable[[], object],
        average: Average | None,
    ) -> None:
        """Copy the dense part, unless all was copied already, and let the thread do the rest."""
        taken = time.time()
        lag = {path: getattr(x.embedding_bags, "staleness", 0) for path, x in collections.items()}
        dense: Mapping[str, Tensor]
        backends: Mapping[str, Backend]
        counters: Mapping[str, Backend]
        if gathered is None:
            counters = _backends(collections)
            updates = counts_of(counters)  # before the dense part is looked at, which is no older then
            show()
            dense = self._copy(model, average)
            backends = counters if average is None else _backends(average.collections)
        else:
            dense, backends = gathered
            counters, updates = backends, counts_of(backends)
        self._tasks.put(partial(self._write, Cut(dense, position, taken, backends, lag, counters, updates, weights)))

    def _copy(self, model: nn.Module, average: Average | None) -> dict[str, Tensor]:
        named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        if average is not None:
            named |= average.tensors
        lacking = [name for name in self._part.names if name not in named]
        if lacking:
            raise ValueError(
                f"{lacking[0]} of the model is not in this process while it is trained: a strategy keeps rows of plain"
                " nn.Embedding on servers (strategy.min_rows, strategy.embeddings). Rows that are published apart from"
                " the dense part belong in an EmbeddingBagCollection."
            )
        return {name: named[name].detach().to("cpu", copy=True) for name in self._part.names}

    def wait(self) -> None:
        """Return when every version that was submitted is written."""
        self._tasks.join()
        self.is_busy  # noqa: B018 - raises

    def close(self) -> None:
        """End the thread, and let others publish there."""
        self._tasks.put(None)
        self._thread.join()
        self._ending.close()

    def _run(self) -> None:
        is_replaced = False
        while (task := self._tasks.get()) is not None:
            try:
                if not is_replaced:
                    task()
            except PublisherReplacedError as error:
                is_replaced = True
                log.warning("This run publishes no more: %s", error)
            except BaseException as error:
                # A full disk, a bucket that is gone, a model that diverges, an exporter that was killed: it may be well
                # again. What no attempt can change is that the model, or its data, cannot be published at all.
                if not isinstance(error, OSError if self._skeleton is None else Exception):
                    self._error = error
                    continue
                expected = isinstance(error, OSError | PublishedVersionError | FloatingPointError)
                what = str(error) if expected else f"{type(error).__name__}: {error}"
                log.warning(
                    "A version was not published: %s. The last one still counts, and the next one tries again.", what
                )
            finally:
                self._tasks.task_done()

    def _write(self, cut: Cut) -> None:
        began = time.monotonic()
        manifest = self._writer.publish(self._prepared(), cut)
        size, seconds = sum(entry.size for entry in manifest.files.values()), time.monotonic() - began
        log.info("Published version %d (%s, %d bytes) in %.1f s.", manifest.version, manifest.kind, size, seconds)


def _backends(collections: Mapping[str, EmbeddingBagCollection]) -> dict[str, Backend]:
    return {path: backend_of(x) for path, x in collections.items()}


def _workers(trainer: pl.Trainer) -> int:
    """How many workers see examples of their own; of a group that cuts the model by fields, all see the same."""
    return int(trainer.world_size // getattr(trainer.strategy, "group_size", 1))


def _may_be_first(trainer: pl.Trainer) -> bool:
    """Whether this worker publishes where all before it die, without which such a run goes on."""
    servers = getattr(trainer.strategy, "run_servers", None)
    return servers is not None and bool(servers.first_may_die)


def _is_free(trainer: pl.Trainer) -> bool:
    """Whether each worker trains at its own speed, and perhaps more batches than another."""
    return trainer.world_size > 1 and getattr(trainer.strategy, "asynchronous", False)
