"""Prepares rows in processes of their own, one for each line on standard input.

A line is JSON: ``[OUT, RAW, PREPROCESSING, SHARD_BYTES, WHERE, AT]``. ``PREPROCESSING`` is
``dlrm`` or ``bars`` for Criteo rows, ``schema`` for a table whose columns are Criteo's. ``WHERE, AT`` is where the
process kills itself, as ``kill -9`` would: ``write, N`` at a block past so many rows written, ``survey, N`` and
``learn, N`` the same while surveying and learning,
``rename, N`` just before the N-th file gets its name, ``renamed, N`` just after; ``never, 0`` lets it end. The answer
is JSON: the process's status, how many files it named, and its peak memory in KiB after a third of the blocks and at
the end.
"""

import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

from lightning_recsys.data.preparation import BySchema, ByShare, Preparation, Preprocessing, Progress, SchemaRules
from lightning_recsys.data.raw import CriteoFormat, TabularFormat

PREPROCESSING = {
    "dlrm": Preprocessing(num_ids=1000),
    "bars": Preprocessing("bucket", "vocabulary", min_count=2),
    "schema": SchemaRules(),
}
CRITEO = CriteoFormat()
TABLE = TabularFormat(
    schema={
        "files": "unused",
        "separator": "\t",
        "column_names": ["click", *CRITEO.dense, *CRITEO.categories],
        "label": "click",
        "dense": CRITEO.dense,
        "categorical": {name: {"min_count": 2} for name in CRITEO.categories},
    }
)
replace = Path.replace


def prepare(out: str, raw: str, preprocessing: str, shard_bytes: int, where: str, at: int) -> dict:
    peaks, renames = [0], 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def on_progress(progress: Progress) -> None:
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        if where == progress.phase and progress.rows > at:
            die()

    def killing_replace(self: Path, target: Path) -> None:
        nonlocal renames
        renames += 1
        if (where, at) == ("rename", renames):
            die()
        replace(self, target)
        if (where, at) == ("renamed", renames):
            die()

    Path.replace = killing_replace
    Preparation(
        Path(out),
        raw_format=TABLE if preprocessing == "schema" else CRITEO,
        files=[Path(raw)],
        split=BySchema(TABLE) if preprocessing == "schema" else ByShare(0.1, 0.1),
        preprocessing=PREPROCESSING[preprocessing],
        shard_bytes=shard_bytes,
        on_progress=on_progress,
    ).run()
    return {"renames": renames, "early_peak": peaks[len(peaks) // 3], "last_peak": peaks[-1]}


for line in sys.stdin:  # imports take seconds: each job gets a fork of this process, which has no threads
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(read)
        try:
            with os.fdopen(write, "w") as pipe:
                json.dump(prepare(*json.loads(line)), pipe)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    print(json.dumps({"status": os.waitstatus_to_exitcode(status), **json.loads(answer or "{}")}), flush=True)
