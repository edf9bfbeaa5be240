"""Runs recipes in forks of this process, which has imported what takes seconds; a line on standard input for each run.

The library and the recipes are those that Python finds here: of the repository, or of a wheel in ``PYTHONPATH``.

A line is JSON: ``[RECIPE, ARGUMENTS, FOLDER, ENVIRONMENT, OUTPUT, ERRORS]``, the last two for what the run prints;
the answer is its exit status, after a line that says that all is ready. Otherwise a fork does what
``python RECIPE ARGUMENTS`` would do in that folder; but its workers come from a fork server that all runs share.
"""

import json
import os
import runpy
import sys
import tempfile
from importlib import import_module
from multiprocessing import forkserver

from lightning_recsys.cli import recipes_folder

sys.path.insert(0, str(recipes_folder()))

import benchmark  # noqa: F401 - all of it for what it imports
import evaluate  # noqa: F401
import predict  # noqa: F401
import prepare  # noqa: F401
import train  # noqa: F401

import lightning_recsys.callbacks
import lightning_recsys.data
import lightning_recsys.models
import lightning_recsys.strategies.des.strategy
import lightning_recsys.strategies.het.strategy
import lightning_recsys.strategies.shadowsync.strategy
import lightning_recsys.tasks  # noqa: F401
from lightning_recsys.launchers.processes import IN_FORK_SERVER

forkserver.set_forkserver_preload(
    ["train", "evaluate", *sorted(x for x in sys.modules if x.partition(".")[0] == "lightning_recsys"), IN_FORK_SERVER]
)
forkserver.ensure_running()
import_module(IN_FORK_SERVER)  # this process is one, too
print("ready", flush=True)
for line in sys.stdin:  # noqa: B007 - read by the fork
    pid = os.fork()
    if not pid:
        break
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
else:
    sys.exit()

# The server runs as long as this process's parent does, whose child it is: only that one can ask whether it has ended.
forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
recipe, arguments, folder, environment, output, errors = json.loads(line)
os.chdir(folder)
os.environ.update(environment)
tempfile.tempdir = None  # asked for anew
for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY), (2, errors, os.O_WRONLY)):
    os.dup2(os.open(path, flags | os.O_CREAT | os.O_TRUNC), number)
sys.argv = [recipe, *arguments]
runpy.run_path(recipe, run_name="__main__")
