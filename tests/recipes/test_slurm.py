"""The batch script of examples/slurm, with stand-ins for SLURM's commands that start its tasks on this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from ports import free_port
from recipe_helpers import MARK, ROOT, TINY_DATA, _marked

STEPS_PER_EPOCH = 5  # of TINY_DATA on two workers
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
# Starts the tasks of a step, and hands SIGTERM on to them.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
tasks=()
trap 'kill -TERM "${tasks[@]}"' TERM
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
    export SLURM_PROCID=$rank SLURM_NODEID=$((rank / SLURM_NTASKS_PER_NODE))
    SLURM_LOCALID=$((rank % SLURM_NTASKS_PER_NODE)) "$@" &
    tasks+=($!)
done
status=0
for task in "${tasks[@]}"; do
    wait "$task"; code=$?
    while kill -0 "$task" 2>/dev/null; do wait "$task"; code=$?; done  # the signal cut the first one off
    ((code > status)) && status=$code
done
exit $status
"""
SCONTROL = """#!/bin/bash
echo "$@" >>scontrol.txt
"""


@contextmanager
def batch_job(folder: Path, *overrides: str, **variables: str):
    """The script as ``sbatch`` runs it: with what its head asks for in SLURM's variables."""
    head = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", SCRIPT.read_text(), flags=re.MULTILINE))
    nodes, per_node = int(head["nodes"]), int(head["ntasks-per-node"])
    slurm = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": head["job-name"],
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_NNODES": str(nodes),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_NTASKS": str(nodes * per_node),
    }
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **slurm, "PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        ["bash", SCRIPT, *overrides], cwd=folder, env=environment, start_new_session=True, **pipes
    ) as job:
        try:
            yield job
        finally:
            running = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
            job.kill()
            for process in running:
                if process.is_running():
                    process.kill()


def soon(condition) -> bool:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_batch_job_when_its_time_is_over_then_is_requeued_and_goes_on_from_its_last_checkpoint(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    run, last, mark = tmp_path / "runs/4711", tmp_path / "runs/4711/checkpoints/last.ckpt", uuid.uuid4().hex
    tiny = (*TINY_DATA, "model=lr", "strategy=ddp", "logger=none", "callbacks/progress_bar=none", "trainer=cpu")
    variables = {"MASTER_PORT": str(free_port()), MARK: mark}

    with batch_job(tmp_path, *tiny, "trainer.max_epochs=100000", **variables) as job:
        assert soon(lambda: last.exists() or job.poll() is not None)
        job.send_signal(signal.SIGUSR1)
        output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 4711\n"
    assert soon(lambda: not _marked(mark))
    interrupted = json.loads((run / "metrics.json").read_text())
    assert interrupted["status"] == "interrupted", output
    assert "there is no last checkpoint available" in output
    assert [interrupted["config"]["trainer"][x] for x in ("num_nodes", "devices")] == [2, 1]
    steps = torch.load(last, weights_only=True)["global_step"]
    epochs, rest = divmod(steps, STEPS_PER_EPOCH)
    assert (epochs > 0, rest) == (True, 0)

    with batch_job(
        tmp_path, *tiny, f"trainer.max_epochs={epochs + 1}", **variables
    ) as job:  # SLURM would change nothing
        output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    completed = json.loads((run / "metrics.json").read_text())
    assert (completed["status"], completed["epochs"]) == ("completed", epochs + 1)
    assert "there is no last checkpoint available" not in output
    assert torch.load(last, weights_only=True)["global_step"] == steps + STEPS_PER_EPOCH
    assert soon(lambda: not _marked(mark))
