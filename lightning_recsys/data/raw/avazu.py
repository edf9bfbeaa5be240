"""Avazu's click logs: the Kaggle challenge's ``train.gz``."""

from __future__ import annotations

from datetime import datetime

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from lightning_recsys.data.raw.columns import LineFormat, RawColumns, RowJudge
from lightning_recsys.data.raw.delimited import parse_labels, split_columns

_SITE = ("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category")
_DEVICE = ("device_id", "device_ip", "device_model", "device_type", "device_conn_type")
_COLUMNS = ("id", "click", "hour", "C1", "banner_pos", *_SITE, *_DEVICE, *(f"C{i}" for i in range(14, 22)))
_HOURS, _WEEKDAYS = (pa.array([str(i).encode() for i in range(n)], pa.binary()) for n in (24, 7))


class AvazuFormat(LineFormat):
    r"""Comma-separated lines with a header: ``id,click,hour,C1,...,C21``.

    ``hour`` is the time as YYMMDDHH. It becomes two features, ``hour`` of the day (0 to 23) and ``weekday`` (0 is
    Monday), and is what ``split.by=time`` goes by. ``id`` numbers the rows and is left out. All others are categorical.

    >>> line = b"1000,0,14102100,1005,0" + b",ab12" * 6 + b",cd34" * 5 + b",1" * 8 + b"\n"
    >>> rows = AvazuFormat().parse(line)
    >>> [rows.categories[name].to_pylist() for name in ("hour", "weekday", "device_ip")], rows.time_N.tolist()
    ([[b'0'], [b'1'], [b'cd34']], [14102100])
    """

    name = "avazu"
    categories = ("hour", "weekday", *_COLUMNS[3:])
    header = True
    time_unit = "hours as YYMMDDHH"

    def check_header(self, line: bytes) -> None:
        """See the base class."""
        found = line.decode("utf-8", "backslashreplace").split(",")
        if tuple(found) != _COLUMNS:
            hint = " (a test file without labels cannot be used)" if "click" not in found else ""
            raise ValueError(f"the header must be {','.join(_COLUMNS)}, got {','.join(found)[:200]}{hint}.")

    def parse(self, block: bytes) -> RawColumns:
        """The rows of a block of whole lines."""
        columns, lines, bad = split_columns(block, _COLUMNS, separator=",")
        judge = RowJudge(lines, bad)
        labels, wrong = parse_labels(columns[1])
        judge.flag(wrong, column="click", problem="must be 0 or 1", values=columns[1])
        time, hour, weekday = _parse_hours(columns[2])
        judge.flag(time < 0, column="hour", problem="must be a time as YYMMDDHH", values=columns[2])
        features = {"hour": _HOURS.take(pa.array(hour)), "weekday": _WEEKDAYS.take(pa.array(weekday))}
        features |= dict(zip(_COLUMNS[3:], columns[3:], strict=True))
        dense = np.empty((0, len(labels)))
        return RawColumns(lines, labels, dense, features, time_N=time, bad=judge.bad).keep(judge.good)


def _parse_hours(values: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Time, hour of the day and weekday; the time is -1 where a value is none."""
    coded = values.dictionary_encode()
    parsed = np.array([_parse_hour(value) for value in coded.dictionary.to_pylist()], dtype=np.int64).reshape(-1, 3)
    time, hour, weekday = parsed[coded.indices.to_numpy()].T
    return time, hour, weekday


def _parse_hour(value: bytes) -> tuple[int, int, int]:
    try:
        time = datetime.strptime(value.decode("ascii"), "%y%m%d%H")
    except ValueError:
        return -1, 0, 0
    return (int(value), time.hour, time.weekday()) if len(value) == 8 else (-1, 0, 0)
