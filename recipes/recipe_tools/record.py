"""``metrics.json``: what ran, on what, how it ended and what came out. And a job that leaves the process as it was."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from lightning_recsys.runtime import ProcessState

FILE_NAME = "metrics.json"
PACKAGES = (
    "lightning-recsys",
    "torch",
    "pytorch-lightning",
    "torchmetrics",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu",
    "numba",
    "numpy",
    "hydra-core",
)


class RunRecord:
    """Context manager that writes ``metrics.json`` when a run starts and again when it ends, however it ends.

    Of several processes that all run the recipe (``torchrun``, SLURM, Lightning's own ``ddp``) rank 0 writes.

    Args:
        folder: Where the file goes; made when missing.
        job: Number of the job within a sweep, or None.
        alone: Refuse a folder that another run writes to meanwhile.
        overrides: The command line's overrides.
        config: The configuration in plain containers.

    Attributes:
        config: The same; the recipe replaces it when it has checked and resolved it.
        sweeping: Whether the run is a job of a sweep.
        metrics: Filled in by the recipe: name -> value.
        details: Further entries of the file, such as counts of parameters.
    """

    def __init__(
        self,
        folder: Path,
        *,
        config: dict[str, Any],
        overrides: list[str],
        job: int | None = None,
        alone: bool = False,
    ) -> None:
        self.path = folder / FILE_NAME
        self.config = config
        self.sweeping = job is not None
        self.metrics: dict[str, float] = {}
        self.details: dict[str, Any] = {}
        self._fixed = {
            "job": job,
            "overrides": overrides,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": versions(),
            "git_commit": git_commit(),
            "machine": machine(),
        }
        self._start = time.perf_counter()
        self._alone = alone
        self._claimed: int | None = None  # its folder, open and locked while it runs

    @classmethod
    def of_job(cls, cfg: DictConfig) -> RunRecord:
        """The record of the job that Hydra runs, whose configuration may still lack values."""
        hydra = HydraConfig.get()
        job = hydra.job.num if hydra.mode == RunMode.MULTIRUN else None
        config: dict[str, Any] = OmegaConf.to_container(cfg)  # type: ignore[assignment]
        return cls(Path(cfg.paths.output_dir), config=config, overrides=task_overrides(), job=job, alone=True)

    @property
    def wall_time(self) -> float:
        """Seconds since the record was made."""
        return time.perf_counter() - self._start

    def __enter__(self) -> RunRecord:
        self._claim()
        self._write("running")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self._write("completed")
        else:  # Lightning makes SystemExit of Ctrl-C and SIGTERM
            status = "interrupted" if issubclass(kind, KeyboardInterrupt | SystemExit) else "failed"
            self._write(status, error=f"{kind.__name__}: {error}")
        if self._claimed is not None:
            fcntl.flock(self._claimed, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open, too
            os.close(self._claimed)

    def _claim(self) -> None:
        """Hold the folder: runs that start within a second get the same, and would test each other's checkpoints."""
        if not self._alone or rank_zero_only.rank != 0:
            return
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._claimed = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._claimed)
            raise ValueError(
                f"another run writes to {folder}, as where both began in the same second. Start this one again, or name"
                " a folder of its own, such as hydra.run.dir=logs/mine."
            ) from None
        except OSError:  # a file system that knows no locks of folders
            return

    def _write(self, status: str, error: str | None = None) -> None:
        if rank_zero_only.rank != 0:
            return
        content = {
            "status": status,
            "error": error,
            "metrics": self.metrics,
            "wall_time_s": round(self.wall_time, 3),
            **self.details,
            "name": self.config.get("name"),
            **self._fixed,
            "config": self.config,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finite(content), indent=2, allow_nan=False, default=str)
        temporary = self.path.with_suffix(".json.part")
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(self.path)  # whoever reads meanwhile sees a whole file


def completed_record(folder: Path) -> dict[str, Any] | None:
    """What a run wrote that was completed in a folder; ``None`` where there is none, or one was cut off."""
    path = folder / FILE_NAME
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return record if record.get("status") == "completed" else None


def digest(content: Any) -> str:
    """A few characters that tell apart plain containers, such as configurations, for names of folders."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def task_overrides() -> list[str]:
    """The command line's overrides of the job that Hydra runs, as they were written: ``${...}`` is not looked up."""
    written: list[str] = OmegaConf.to_container(HydraConfig.get().overrides.task)  # type: ignore[assignment]
    return written


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on, where installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Commit of the checkout that this recipe is part of, with ``-dirty`` where files differ.

    None outside git, and where it was installed into an environment that lies in a repository of something else.
    """
    here = Path(__file__)
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    described = ""
    for arguments in (["ls-files", "--error-unmatch", here.name], describe):
        try:
            done = subprocess.run(  # noqa: S603 - arguments of our own
                ["git", *arguments],  # noqa: S607 - git from PATH
                cwd=here.parent,
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        described = done.stdout.strip()
    return described


def machine() -> dict[str, Any]:
    """What the wall time depends on."""
    return {
        "host": platform.node(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


@contextmanager
def isolated_job() -> Iterator[None]:
    """Undo what a job does to its process, so that the next job of a sweep starts as the first one did.

    Restores the environment (ranks, ports and seeds that Lightning exports), generators, determinism, warning filters
    and log levels; ends the process group and the W&B run where one was left open.
    """
    before = ProcessState.capture()
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        wandb = sys.modules.get("wandb")
        if wandb is not None and wandb.run is not None:
            wandb.finish()
        before.restore()
