"""A CSV logger for runs that several processes write to in turn."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import CSVLogger as LightningCSVLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only

from lightning_recsys.strategies.common.workers.continuing_writer import ContinuingWriter


class CSVLogger(LightningCSVLogger):
    """Lightning's CSV logger, except that it goes on with a file that is there already.

    Lightning's own deletes it. But a worker process logs the training, and the main process the test after it. What an
    earlier run left is removed when the logger is made, which one process does before the others have it. A run that
    goes on from a checkpoint in its own folder goes on with that file. One that comes from a checkpoint elsewhere sets
    it aside, under the first free name of ``metrics-1.csv``, ``metrics-2.csv``, ...: it may be another run's, or its
    own where checkpoints are not in the run's folder.

    Args:
        ckpt_path: The checkpoint that the run goes on from.
        **options: Arguments of Lightning's.
    """

    def __init__(self, *, ckpt_path: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        if rank_zero_only.rank != 0:
            return
        curves = Path(self.log_dir, ExperimentWriter.NAME_METRICS_FILE)
        if ckpt_path is None:
            curves.unlink(missing_ok=True)
        elif curves.exists() and not _lies_in(ckpt_path, Path(self.save_dir)):
            aside = (curves.with_stem(f"{curves.stem}-{number}") for number in itertools.count(1))
            curves.rename(next(path for path in aside if not path.exists()))

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer of this process."""
        if self._experiment is None:
            self._experiment = ContinuingWriter(log_dir=self.log_dir)
        return self._experiment


def _lies_in(checkpoint: str, folder: Path) -> bool:
    """Whether a checkpoint is a run's own; Lightning looks ``last`` and ``hpc`` up among these."""
    return checkpoint in ("last", "hpc") or Path(checkpoint).parent.resolve().is_relative_to(folder.resolve())
