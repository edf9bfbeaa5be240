"""Runs recipes in forks of this process, which has imported what takes seconds; a line on standard input for each run.

A line is JSON: ``[RECIPE, ARGUMENTS, FOLDER, ENVIRONMENT, OUTPUT, ERRORS]``, the last two for what the run prints;
the answer is its exit status. Otherwise a fork does what ``python RECIPE ARGUMENTS`` would do in that folder.
"""

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import evaluate  # noqa: F401 - all of it for what it imports
import prepare  # noqa: F401
import train  # noqa: F401

import lightning_recsys.callbacks
import lightning_recsys.data
import lightning_recsys.models
import lightning_recsys.strategies.het
import lightning_recsys.strategies.shadowsync
import lightning_recsys.tasks  # noqa: F401

for line in sys.stdin:  # noqa: B007 - read by the fork
    pid = os.fork()
    if not pid:
        break
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
else:
    sys.exit()

recipe, arguments, folder, environment, output, errors = json.loads(line)
os.chdir(folder)
os.environ.update(environment)
tempfile.tempdir = None  # asked for anew
for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY), (2, errors, os.O_WRONLY)):
    os.dup2(os.open(path, flags | os.O_CREAT | os.O_TRUNC), number)
sys.argv = [recipe, *arguments]
runpy.run_path(recipe, run_name="__main__")
