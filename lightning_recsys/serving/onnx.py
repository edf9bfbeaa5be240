"""The dense part of a published version as ONNX, for runtimes without torch."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import torch

from lightning_recsys.serving.reader import PublishedModel

_EXAMPLES = 3  # to trace with: 0 and 1 would be taken for constants


def check_onnx(target: str | Path) -> None:
    """See that a file can be written as ONNX, before the work that comes first.

    Args:
        target: The file that is to be written.

    Raises:
        ImportError: onnx and onnxscript are not installed (the extra ``[onnx]``).
        FileNotFoundError: there is no such folder.
    """
    if any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")):
        raise ImportError("ONNX needs the extra [onnx]: pip install lightning-recsys[onnx].")
    if not (folder := Path(target).absolute().parent).is_dir():
        raise FileNotFoundError(f"there is no folder {folder} for {target}.")


def export_onnx(model: PublishedModel, target: str | Path) -> None:
    """Write the dense part: ``dense`` ``[B, I]`` and each collection's pooled rows ``[B, F, D]`` to ``logits`` ``[B]``.

    Rows stay outside: they are looked up and pooled by whoever runs it, as ``model.pooled(sparse)`` does. An input of
    pooled rows has the name of its collection, such as ``embeddings``. Torch traces for this, which disturbs forward
    passes in other threads of this process.

    Args:
        model: A version that is open, such as ``ModelReader(url).model``.
        target: A file to write.

    Raises:
        ImportError: onnx and onnxscript are not installed (the extra ``[onnx]``).
        FileNotFoundError: there is no folder for the target.
    """
    check_onnx(target)
    dense = torch.zeros(_EXAMPLES, model.manifest.num_dense)
    pooled = {
        path: torch.zeros(_EXAMPLES, sum(len(x.feature_names) for x in rows.tables), rows.tables[0].embedding_dim)
        for path, rows in model.rows.items()
    }
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.dense_part,
            (dense,),
            target,
            kwargs={"pooled": pooled},  # a dictionary that came last would be taken for keywords
            dynamo=True,
            dynamic_shapes={"dense": {0: batch}, "pooled": {path: {0: batch} for path in pooled}},
            input_names=["dense", *pooled],
            output_names=["logits"],
            external_data=False,
            verbose=False,
        )
