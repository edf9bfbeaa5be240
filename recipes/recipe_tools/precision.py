"""``trainer.precision=auto``, and what a float32 run says where bfloat16 would be faster."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from recipe_tools.build import Config, build
from recipe_tools.report import console
from torch.distributed import TCPStore

from lightning_recsys.data import CTRDataModule
from lightning_recsys.launchers import started_processes
from lightning_recsys.tasks import Task, time_precisions

HINTED_STEPS = 1000  # of a float32 run that is long enough to be told
HINT_SECONDS = 0.1


def choose_precision(config: Config, task: Task, datamodule: Any, *, sweeping: bool) -> dict[str, float | str]:
    """Set ``trainer.precision=auto`` to what is fast here, in the task's kept configuration as well, and say so.

    On a CPU the model's dense part is timed in both precisions on the first examples. A GPU that has bfloat16 gets
    ``bf16-mixed``. Processes that torchrun has started take what the first of them has measured. A float32 run on a
    processor with bfloat16 is told what it would gain.

    Returns:
        The precision and the times, for ``metrics.json``; nothing where another precision was asked for.

    Raises:
        ValueError: several processes start in a way in which they cannot agree.
    """
    trainer = config["trainer"]
    if trainer["precision"] != "auto":
        if not sweeping and _is_float32_beside_bfloat16(trainer) and _steps(trainer, datamodule) >= HINTED_STEPS:
            times = time_precisions(task, _first_batch(datamodule), seconds=HINT_SECONDS)
            if times.precision != "32-true":
                _say(
                    f"On this processor trainer.precision=bf16-mixed makes the dense part {times.gain:.1f} times as"
                    " fast; trainer.precision=auto takes it where it is worth it."
                )
        return {}
    if _is_float32_only(trainer["strategy"]):
        _say("trainer.precision=auto: 32-true, the only one that this strategy's dense part computes in.")
        found: dict[str, float | str] = {"precision": "32-true"}
    else:
        found = _agreed(trainer, task, datamodule)
    # The checkpoint's configuration, too: whoever evaluates or serves it computes as it was trained.
    for kept in (trainer, task.hparams["config"]["trainer"]):
        kept["precision"] = found["precision"]
    return found


def _agreed(trainer: Config, task: Task, datamodule: Any) -> dict[str, float | str]:
    """What was measured, by the first of several processes for all."""
    started = started_processes()
    if started is None or started.num_nodes * started.devices == 1:
        if isinstance(trainer["strategy"], str) and trainer["devices"] not in (1, "1", "auto"):
            raise ValueError(
                f"trainer.precision=auto: the processes of trainer.strategy={trainer['strategy']} would each decide for"
                " themselves. Write bf16-mixed or 32-true, or use a strategy=... of conf/strategy."
            )
        return _measured(trainer, task, datamodule)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError(
            f"trainer.precision=auto: {started.variables} are processes that cannot agree before the training starts."
            " Start them by torchrun, or write bf16-mixed or 32-true."
        )
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    prefix = f"lightning_recsys/precision/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if int(os.environ["RANK"]) == 0:
        found = _measured(trainer, task, datamodule)
        for name, value in found.items():
            store.set(f"{prefix}/{name}", str(value))
        store.set(prefix, ",".join(found))
        return found
    names = store.get(prefix).decode().split(",")
    told = {name: store.get(f"{prefix}/{name}").decode() for name in names}
    return {name: value if name == "precision" else float(value) for name, value in told.items()}


def _measured(trainer: Config, task: Task, datamodule: Any) -> dict[str, float | str]:
    if trainer["accelerator"] != "cpu" and torch.cuda.is_available():
        precision = "bf16-mixed" if torch.cuda.is_bf16_supported() else "32-true"
        _say(f"trainer.precision=auto: {precision}, by what the GPU computes in.")
        return {"precision": precision}
    times = time_precisions(task, _first_batch(datamodule))
    float32_ms, bfloat16_ms = 1e3 * times.float32, 1e3 * times.bfloat16
    _say(
        f"trainer.precision=auto: {times.precision}. The dense part's forward and backward pass takes"
        f" {float32_ms:.1f} ms in float32 and {bfloat16_ms:.1f} ms in bfloat16."
    )
    return {"precision": times.precision, "float32_ms": float32_ms, "bfloat16_ms": bfloat16_ms}


def _first_batch(datamodule: Any) -> Any:
    if isinstance(datamodule, CTRDataModule):
        return datamodule.sample_batches(1)[0]
    return next(iter(datamodule.train_dataloader()))


def _is_float32_only(strategy: Any) -> bool:
    """Whether a strategy's dense part refuses other precisions; Lightning's own, by name, take all."""
    return isinstance(strategy, dict) and getattr(getattr(build(strategy), "dense", None), "float32_only", False)


def _is_float32_beside_bfloat16(trainer: Config) -> bool:
    if _is_float32_only(trainer["strategy"]):
        return False
    on_cpu = trainer["accelerator"] == "cpu" or not torch.cuda.is_available()
    return on_cpu and str(trainer["precision"]) in ("32-true", "32") and torch.cpu._is_avx512_bf16_supported()


def _steps(trainer: Config, datamodule: Any) -> float:
    """Batches of a run on rows of clicks, as far as the configuration tells."""
    if not isinstance(datamodule, CTRDataModule) or trainer["fast_dev_run"]:
        return 0
    epoch = len(datamodule.rows("train")) / datamodule.batch_size
    limit = trainer["limit_train_batches"]
    if limit is not None:
        epoch = min(epoch, limit) if isinstance(limit, int) else epoch * limit
    epochs = trainer["max_epochs"] if isinstance(trainer["max_epochs"], int) else 1
    steps = epoch * (epochs if epochs >= 0 else math.inf)
    return steps if trainer["max_steps"] < 0 else min(steps, trainer["max_steps"])


@rank_zero_only
def _say(sentence: str) -> None:
    console().print(sentence, markup=False, highlight=False, soft_wrap=True)
