"""A CSV logger for runs that several processes write to in turn."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import CSVLogger as LightningCSVLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only


class CSVLogger(LightningCSVLogger):
    """Lightning's CSV logger, except that it goes on with a file that is there already.

    Lightning's own deletes it. But a worker process logs the training, and the main process the test after it. What an
    earlier run left is removed when the logger is made, which one process does before the others have it.

    Args:
        ckpt_path: The checkpoint that the run goes on from; with one the file of an earlier run is gone on with, too.
        **options: Arguments of Lightning's.
    """

    def __init__(self, *, ckpt_path: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        if ckpt_path is None and rank_zero_only.rank == 0:
            Path(self.log_dir, ExperimentWriter.NAME_METRICS_FILE).unlink(missing_ok=True)

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer of this process."""
        if self._experiment is None:
            self._experiment = _ContinuingWriter(log_dir=self.log_dir)
        return self._experiment


class _ContinuingWriter(ExperimentWriter):
    def _check_log_dir_exists(self) -> None:
        if self._fs.isfile(self.metrics_file_path):
            with self._fs.open(self.metrics_file_path, "r", newline="") as file:
                self.metrics_keys = next(csv.reader(file), [])
