"""The changes that a run made in a worker's trainer, on their way back to the trainer that the user holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loops.loop import _Loop
from pytorch_lightning.trainer.call import _call_callbacks_load_state_dict, _call_callbacks_state_dict
from pytorch_lightning.trainer.states import TrainerFn, TrainerState
from torch import Tensor

WEIGHTS, CALLBACKS = "weights.pt", "callbacks.pt"  # of the first worker
METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


@dataclass(frozen=True)
class RunResults:
    """The part of a worker's trainer that a process that ran nothing lacks.

    Args:
        value: What the launched function returned; for ``predict`` a list of batches per data loader.
        state: Status and function of the trainer.
        ckpt_path: The checkpoint that the run loaded.
        metrics: The trainer's ``callback_metrics``, ``logged_metrics`` and ``progress_bar_metrics``.
        progress: State dict of the fit loop (epochs, steps); ``None`` if the run did not fit.
    """

    value: Any
    state: TrainerState
    ckpt_path: str | Path | None
    metrics: dict[str, dict[str, Any]]
    progress: dict[str, Any] | None


def results_path(folder: Path, rank: int) -> Path:
    """The file of a worker's results."""
    return folder / f"results-{rank}.pt"


def save_results(value: Any, trainer: pl.Trainer | None, folder: Path, *, rank: int) -> None:
    """Write what a worker brings home; every worker calls this, as state dicts may be collective.

    Args:
        value: The return value of the launched function.
        trainer: The worker's trainer, or ``None`` where a bare function was launched.
        folder: The folder in which :func:`load_results` will look.
        rank: The worker's local rank. The first worker that lives brings weights and the callbacks' states, and all of
            them the trainer's state and their share of predictions.
    """
    if trainer is None:
        torch.save(value, results_path(folder, rank))
        return
    fitted = trainer.state.fn == TrainerFn.FITTING
    weights = trainer.strategy.lightning_module_state_dict() if fitted or trainer.ckpt_path is not None else None
    if trainer.state.fn == TrainerFn.PREDICTING and value is not None:
        value = [value] if trainer.predict_loop.num_dataloaders == 1 else value
        if not getattr(trainer.strategy, "sees_own_examples", True):
            value = [[] for _ in value]
    with getattr(trainer.strategy, "counting_once", nullcontext)():
        callbacks = _call_callbacks_state_dict(trainer)  # on all ranks, as for a checkpoint: some gather over them
    has_saved = False
    for _ in range(2):  # the second time behind the barrier: whoever was the first may have died before it was done
        if trainer.is_global_zero and not has_saved:
            if weights is not None:
                torch.save(weights, folder / WEIGHTS)
            torch.save(callbacks, folder / CALLBACKS)
            has_saved = True
        trainer.strategy.barrier("what the first worker brings is there")
    results = RunResults(
        value=value,
        state=trainer.state,
        ckpt_path=trainer.ckpt_path,
        metrics={name: getattr(trainer, name) for name in METRICS},
        progress=trainer.fit_loop.state_dict() if fitted else None,
    )
    torch.save(results, results_path(folder, rank))


def load_results(trainer: pl.Trainer | None, folder: Path, *, ranks: Sequence[int]) -> Any:
    """Give the main process's trainer what :func:`save_results` wrote, and return the launched function's value.

    The predictions of all workers are returned in the order of their steps: step 0 of rank 0, of rank 1, ..., then
    step 1. That is the order of one process's batches where whole batches are dealt out to the ranks in turn.

    Args:
        trainer: The main process's trainer, or ``None`` where a bare function was launched.
        folder: The folder in which the workers left their results.
        ranks: The local ranks that left results, in rising order.
    """
    all_results = [_load(results_path(folder, rank)) for rank in ranks]
    if trainer is None:
        return all_results[0]
    results: RunResults = all_results[0]
    if (weights := folder / WEIGHTS).exists():
        _load_weights(trainer.lightning_module, weights)
    trainer.state = results.state
    trainer._checkpoint_connector._ckpt_path = results.ckpt_path
    for name, metrics in results.metrics.items():
        setattr(trainer._logger_connector, f"_{name}", metrics)
    _load_callbacks(trainer, _load(folder / CALLBACKS))
    if results.progress is not None:
        load_progress(trainer.fit_loop, results.progress)
    if results.state.fn == TrainerFn.PREDICTING and results.value is not None:
        per_loader = [list(_in_turn(*batches)) for batches in zip(*(x.value for x in all_results), strict=True)]
        return per_loader[0] if len(per_loader) == 1 else per_loader
    return results.value


def _load(path: Path, **options: Any) -> Any:
    """Ours, so trusted; to the CPU, as the main process may have no use for a GPU."""
    return torch.load(path, map_location="cpu", weights_only=False, **options)


def _load_weights(model: pl.LightningModule, path: Path) -> None:
    """Not strict: a model may grow and lose layers during the run. It should not do so unnoticed, though.

    A tensor gets the type that it was trained in, which the trainer's precision may have changed in the workers.
    """
    weights = _load(path, mmap=True)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        trained = weights.get(name)
        if isinstance(trained, Tensor) and trained.is_floating_point() and tensor.is_floating_point():
            tensor.data = tensor.data.to(trained.dtype)
    keys = model.load_state_dict(weights, strict=False)
    if keys.unexpected_keys:
        rank_zero_warn(
            f"The trained model has tensors that the model of the main process lacks, so they stay behind:"
            f" {keys.unexpected_keys[:3]}{'...' if len(keys.unexpected_keys) > 3 else ''}. Layers that are built in"
            " `configure_model` exist in the workers only; load the model from a checkpoint instead."
        )


def _load_callbacks(trainer: pl.Trainer, states: dict[str, dict[str, Any]]) -> None:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and (state := states.get(callback.state_key)):
            callback.dirpath = state["dirpath"]  # resolved in the worker; load_state_dict insists on the same folder
    _call_callbacks_load_state_dict(trainer, {"callbacks": states})


def load_progress(loop: _Loop, state: dict[str, Any]) -> None:
    """Epochs and steps as after the run, and no loop believes that it is resuming one."""
    loop.load_state_dict(state)
    for finished in _with_children(loop):
        finished.on_iteration_done()


def _with_children(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for child in vars(loop).values():
        if isinstance(child, _Loop):
            yield from _with_children(child)


def _in_turn(*ranks: list[Any]) -> Iterator[Any]:
    """Items of several lists in turn, until all are empty.

    >>> list(_in_turn(["a0", "a1"], ["b0"]))
    ['a0', 'b0', 'a1']
    """
    missing = object()
    return (item for item in chain.from_iterable(zip_longest(*ranks, fillvalue=missing)) if item is not missing)
