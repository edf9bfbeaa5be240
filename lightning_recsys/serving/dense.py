"""The dense part of a model as a program of its own, which takes pooled vectors in place of ids.

The program is made by :mod:`torch.export` in a process of its own: tracing patches ``nn.Module.__call__`` for a whole
process, where other threads may be in the midst of a forward pass.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_recsys.embeddings import EmbeddingBagCollection
from lightning_recsys.launchers.folders import RunFolder
from lightning_recsys.launchers.pickling import save_job
from lightning_recsys.launchers.processes import ending
from lightning_recsys.partition.field_layer import FieldLayer

_EXAMPLES = 3  # to trace with: 0 and 1 would be taken for constants
_PATIENCE = 600.0  # seconds
_NICE = 10  # training comes first


class _Pooled(nn.Module):
    """Stands in for a collection: the pooled vectors come in with the request."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, pooled: Mapping[str, Tensor]) -> Tensor:
        return pooled[self.path]


class DensePart(nn.Module):
    """A copy of a model without its tables: ``forward(dense, {path of a collection: [B, F, D]}) -> logits [B]``.

    Args:
        model: ``forward(dense, sparse) -> logits``; it gives what it gets as ``sparse`` to its collections only.

    Attributes:
        tables: The tables of each collection, by its path.

    Raises:
        ValueError: the model has plain embeddings, and no collection.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        found = {path: x for path, x in model.named_modules() if isinstance(x, EmbeddingBagCollection)}
        plain = any(isinstance(x, nn.Embedding | nn.EmbeddingBag) for x in model.modules())
        if plain and not found:
            raise ValueError(
                f"{type(model).__name__} has no EmbeddingBagCollection, and it is rows that are published apart from"
                " the dense part: build its tables with lightning_recsys.embeddings."
            )
        self.tables = {path: x.tables for path, x in found.items()}
        stubs: dict[int, Any] = {id(x): _Pooled(path) for path, x in found.items()}
        self.model = copy.deepcopy(model, stubs).eval().cpu()
        for module in self.model.modules():
            if isinstance(module, FieldLayer) and module.share is not None:
                raise ValueError("the model is cut by fields: take its dense part before.")

    def forward(self, dense: Tensor, pooled: Mapping[str, Tensor]) -> Tensor:
        """Logits ``[B]``."""
        logits: Tensor = self.model(dense, pooled)
        return logits.float()

    @property
    def features(self) -> dict[str, int]:
        """Every feature, with how many ids it has."""
        tables = [table for some in self.tables.values() for table in some]
        return {name: table.num_embeddings for table in tables for name in table.feature_names}

    @property
    def names(self) -> list[str]:
        """The names in the model of all parameters and buffers that are published."""
        return list(self.model.state_dict())

    @property
    def buffer_names(self) -> frozenset[str]:
        """The names in the model of its buffers."""
        return frozenset(name for name, _ in self.model.named_buffers(remove_duplicate=False))


def export_apart(part: DensePart, num_dense: int, target: Path) -> None:
    """Write the program of a dense part, by a process of its own.

    Args:
        part: The dense part.
        num_dense: Numeric features.
        target: A file to make.

    Raises:
        OSError: there is no room for the files that this takes; the message names their folder. Or the process was
            killed (``ChildProcessError``) or took too long (``TimeoutError``): another one may do it.
        RuntimeError: the model cannot be exported; the message ends with what torch says.
        TypeError: the model does not travel to another process.
    """
    with RunFolder() as folder:
        job, preparation = folder / "job.pt", folder / "preparation.pkl"
        try:
            save_job({"part": part, "num_dense": num_dense}, job, parts={"model": part.model})
        except RuntimeError as error:  # what torch makes of a full disk
            raise OSError(f"the dense part cannot be written to {folder}: {error}") from error
        data: dict[str, Any] = {"sys_path": sys.path}
        if b"__main__" in job.read_bytes() or b"__mp_main__" in job.read_bytes():
            data = spawn.get_preparation_data("export")
        preparation.write_bytes(pickle.dumps(data))
        command = [sys.executable, "-m", __name__, str(preparation), str(job), str(target)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        try:
            run = subprocess.run(  # noqa: S603 - our own interpreter
                command, env=environment, capture_output=True, text=True, timeout=_PATIENCE, check=False
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"the process that exports the dense part has not ended in {_PATIENCE:g} seconds, and was killed"
            ) from None
    if run.returncode < 0:
        raise ChildProcessError(f"the process that exports the dense part {ending(run.returncode)}")
    if run.returncode == os.EX_IOERR:
        why = run.stderr.splitlines()[-1]
        raise OSError(f"the dense part's program cannot be written to {target.parent}: {why}")
    if run.returncode:
        raise RuntimeError(
            f"{type(part.model).__name__} cannot be published: torch.export failed. A model may look its collections"
            " up and compute with tensors; what it does must not depend on their values, nor on the size of a batch."
            f"\n{run.stderr[-2000:]}"
        )


def _export(part: DensePart, num_dense: int, target: Path) -> None:
    batch = torch.export.Dim("batch")
    dense = torch.randn(_EXAMPLES, num_dense)
    pooled = {
        path: torch.randn(_EXAMPLES, sum(len(x.feature_names) for x in tables), tables[0].embedding_dim)
        for path, tables in part.tables.items()
    }
    shapes: Any = ({0: batch}, {path: {0: batch} for path in pooled})
    with torch.no_grad():
        program = torch.export.export(part, (dense, pooled), dynamic_shapes=shapes, strict=False)
        for size in (1, 2 * _EXAMPLES):
            again = {path: x[:1].expand(size, *x.shape[1:]).contiguous() for path, x in pooled.items()}
            dense_again = dense[:1].expand(size, num_dense).contiguous()
            torch.testing.assert_close(program.module()(dense_again, again), part(dense_again, again))
    content = io.BytesIO()  # of a full disk torch would make an error that may be the model's fault as well
    torch.export.save(program, content)
    target.write_bytes(content.getbuffer())


def _main(preparation: str, job: str, target: str) -> None:
    os.nice(_NICE)
    spawn.prepare(pickle.loads(Path(preparation).read_bytes()))  # noqa: S301 - of the process that started this one
    content = torch.load(job, weights_only=False)
    try:
        _export(content["part"], content["num_dense"], Path(target))
    except OSError as error:
        sys.stderr.write(str(error))
        sys.exit(os.EX_IOERR)


if __name__ == "__main__":
    from lightning_recsys.serving import dense  # the module under its own name, by which the job knows it

    dense._main(*sys.argv[1:])
