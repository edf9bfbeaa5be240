"""Parts that stand alone work, and log, in a program that never imports Lightning."""

import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
import torch
from lightning_recsys.embeddings import EmbeddingBagCollection, EmbeddingBagConfig, SparseFeatures
from lightning_recsys.optim import RowSGD

class Half(RowSGD):
    def update_(self, rows_UD, grads_UD, state, *, lr, step):
        super().update_(rows_UD, grads_UD, state, lr=lr / 2, step=step)

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
for _ in range(2):  # the line comes once
    table = EmbeddingBagConfig("movies", 3, 2, ("movie",), init_std=0.0)
    collection = EmbeddingBagCollection([table], optimizer=Half(lr=1.0))
    collection(SparseFeatures(("movie",), torch.tensor([1]))).sum().backward()
    print(collection.embedding_bags.read("movies", "weight").tolist())
assert not {"pytorch_lightning", "lightning_fabric"} & set(sys.modules)
"""


def test_row_optimizers_subclass_when_lightning_was_never_imported_then_trains_and_says_how():
    output = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, timeout=100, capture_output=True, text=True
    ).stdout.splitlines()
    trained = "[[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]"
    assert output[0].startswith("Half is no rule of lightning_recsys.optim, so its own update_ trains the rows")
    assert output[1:] == [trained, trained]


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("lightning_recsys.parameter_server.server", "zmq"),
        ("lightning_recsys.data.preparation", "pyarrow"),  # of processes that prepare rows
        ("lightning_recsys.serving.server", "litserve"),  # of processes that answer requests
        ("lightning_recsys.ray.servers", "ray"),  # of actors
        ("lightning_recsys.ray.encoding", "ray"),  # of tasks that encode rows
    ],
)
def test_process_that_trains_nothing_when_it_starts_then_it_does_not_import_lightning(module, needs):
    """Which takes it longer than all the rest."""
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    program = f"import {module}, sys; print(sorted({{'pytorch_lightning', 'lightning_fabric'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=100, capture_output=True, text=True)
    assert done.stdout == "[]\n"
