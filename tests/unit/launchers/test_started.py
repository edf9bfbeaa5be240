from __future__ import annotations

import pytest

from lightning_recsys.launchers import started_processes

TORCHRUN = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
SLURM = {"SLURM_NTASKS": "6", "SLURM_NNODES": "3", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (TORCHRUN, (2, 2)),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, (2, 2)),  # as Ray has it
        ({"WORLD_SIZE": "4"}, None),  # Lightning's own launcher sets it in the main process
        (SLURM, (3, 2)),
        ({"SLURM_NTASKS": "1", "SLURM_NNODES": "1"}, (1, 1)),  # without --ntasks-per-node
        (SLURM | {"SLURM_JOB_NAME": "bash"}, None),  # somebody at a prompt
        (SLURM | TORCHRUN, (2, 2)),  # srun started torchrun
    ],
)
def test_processes_then_counted_as_whoever_started_them_says(monkeypatch, variables, expected):
    tell(monkeypatch, variables)
    started = started_processes()
    assert (started and (started.num_nodes, started.devices)) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (TORCHRUN | {"WORLD_SIZE": "3"}, r"^GROUP_WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, WORLD_SIZE=3: every.*torchrun"),
        ({"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, r"^LOCAL_WORLD_SIZE=2, WORLD_SIZE=3: every node"),
        (SLURM | {"SLURM_NTASKS": "5"}, r"^SLURM_NNODES=3, SLURM_NTASKS_PER_NODE=2, SLURM_NTASKS=5: every.*srun"),
    ],
)
def test_processes_when_nodes_have_different_numbers_then_refused_by_the_variables(monkeypatch, variables, message):
    tell(monkeypatch, variables)
    with pytest.raises(ValueError, match=message):
        started_processes()


def tell(monkeypatch, variables):
    for name in (*TORCHRUN, *SLURM):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
