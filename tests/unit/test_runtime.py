"""Process-wide settings, and their way into a worker."""

import ctypes
import logging
import os
import pickle
import random
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_recsys.runtime import ProcessState, configure_worker


def test_threads_and_denormals_when_configured_then_set():
    configure_worker(num_threads=2)
    assert torch.get_num_threads() == 2
    assert (torch.tensor([1e-39]) * 1).item() == 0.0
    configure_worker()
    assert torch.get_num_threads() == 1


def test_number_of_threads_when_below_one_then_refused():
    with pytest.raises(ValueError, match="num_threads must be at least 1, got 0"):
        configure_worker(num_threads=0)


FREED = """
import resource
import torch
from lightning_recsys.runtime import configure_worker

def step():
    return len([torch.ones(1 << 20) for _ in range(20)])  # 80 MiB, above what glibc keeps by itself

configure_worker()
for _ in range(2):  # the first one's memory may lie in several pieces, which the second one fills up
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_memory_when_a_step_has_freed_it_then_the_next_one_takes_it_without_faults():
    # A process of its own: in one that has run other tests, their threads fault too, and their holes are filled first.
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=100, check=True)
    assert int(done.stdout) < 2000  # of 20,480 pages


def test_process_state_when_pickled_and_restored_then_everything_is_back(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    logger = logging.getLogger("lightning_recsys.test_runtime")
    logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="no such thing")
    filters = list(warnings.filters)
    torch.set_float32_matmul_precision("high")
    model = nn.Linear(1, 1)
    model.register_forward_hook(print)
    state = pickle.dumps(ProcessState.capture())
    drawn = torch.rand(1).item(), np.random.rand(), random.random()
    model = pickle.loads(pickle.dumps(model))

    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    monkeypatch.setenv("NEW", "1")
    monkeypatch.delenv("KEPT")
    logger.setLevel(logging.DEBUG)
    warnings.resetwarnings()
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("highest")
    torch.set_default_dtype(torch.float64)
    pickle.loads(state).restore()

    assert os.environ["KEPT"] == "1"
    assert "NEW" not in os.environ
    assert logger.level == logging.ERROR
    assert list(warnings.filters) == filters
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_default_dtype() == torch.float32
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == drawn
    model.register_forward_hook(repr)
    assert list(model._forward_hooks.values()) == [print, repr]


FORK = """
import os, sys
from lightning_recsys.runtime import fork_between_threads

asked = []
sys._current_frames = lambda: asked.append("for the list of threads")
fork_between_threads()
fork_between_threads()
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
print(len(asked))
"""


def test_process_when_forked_then_the_list_of_threads_is_asked_for_once_before_where_a_child_could_not_free_its_lock():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == ("1" if sys.version_info < (3, 12) else "0")
