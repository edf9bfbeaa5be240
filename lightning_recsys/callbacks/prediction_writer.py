"""Predictions to a file, as they are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

_NUMBERS = 1 << 16  # of rows that are made at a time


class PredictionWriter(Callback):
    """Writes what ``predict_step`` returns, a number for each row, beside what tells the rows apart.

    The file appears under its name when all rows are written. For one process, as ``Trainer(devices=1)`` has it, with
    ``trainer.predict(..., return_predictions=False)``, which keeps none in memory.

    Args:
        path: The file: ``.parquet``, or text with commas.
        rows: What tells the rows apart, in their order and some at a time, such as
            :meth:`~lightning_recsys.data.TabularDataModule.predicted_rows`; their numbers from 1 if absent. It is read
            by the process that predicts, and a strategy that launches one pickles it: a generator cannot travel there.
        columns: Names of the two columns.

    Attributes:
        num_rows: How many predictions were written.

    Raises:
        ValueError: the path has another ending than ``.csv``, ``.parquet`` or ``.pq``.
    """

    def __init__(
        self,
        path: str | Path,
        rows: Iterable[pa.Array] | None = None,
        *,
        columns: tuple[str, str] = ("row", "prediction"),
    ) -> None:
        super().__init__()
        self.path = Path(path)
        if self.path.suffix not in (".csv", ".parquet", ".pq"):
            raise ValueError(f"predictions go to a file named .csv or .parquet, got {path}.")
        self.num_rows = 0
        self._rows, self._columns = rows, columns
        self._reading: Iterator[pa.Array] = iter(())  # those of the rows that are still to be read
        self._waiting = pa.chunked_array([], pa.null())  # what tells rows apart, read and not written yet
        self._writer: Any = None

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """See that one process makes all predictions.

        Raises:
            ValueError: several processes predict.
        """
        if trainer.world_size > 1:
            raise ValueError(f"PredictionWriter writes in order, in one process: devices=1, not {trainer.world_size}.")
        self.num_rows, self._waiting = 0, pa.chunked_array([], pa.null())
        numbers = (pa.array(range(start, start + _NUMBERS)) for start in count(1, _NUMBERS))
        self._reading = numbers if self._rows is None else iter(self._rows)

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Write a batch."""
        values = pa.array(outputs.float().cpu().numpy())
        self._write(pa.table([self._take(len(values)), values], names=list(self._columns)))

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the file its name."""
        if self._writer is not None:
            self._writer.close()
            self._partial.replace(self.path)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remove what was begun."""
        if self._writer is not None:
            self._writer.close()
        self._partial.unlink(missing_ok=True)

    def state_dict(self) -> dict[str, int]:
        """How many predictions were written, for the process that has launched the one that writes."""
        return {"num_rows": self.num_rows}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """The inverse of :meth:`state_dict`."""
        self.num_rows = state_dict["num_rows"]

    @property
    def _partial(self) -> Path:
        return self.path.with_name(f"{self.path.name}.partial")

    def _take(self, length: int) -> pa.ChunkedArray:
        while len(self._waiting) < length:
            if (
                part := next(self._reading, None)
            ) is None:  # an exception of its own would end the loop as a loader's end does
                raise ValueError(
                    f"there are more predictions than the {self.num_rows + len(self._waiting)} rows to tell apart."
                )
            self._waiting = pa.chunked_array([*self._waiting.chunks, part], part.type)
        taken, self._waiting = self._waiting[:length], self._waiting[length:]
        return taken

    def _write(self, table: pa.Table) -> None:
        if self._writer is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            make = arrow_csv.CSVWriter if self.path.suffix == ".csv" else parquet.ParquetWriter
            self._writer = make(str(self._partial), table.schema)
        self._writer.write_table(table)
        self.num_rows += len(table)
