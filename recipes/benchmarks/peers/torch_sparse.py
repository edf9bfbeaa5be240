"""The C++ sampler of torch-sparse, which PyG's loaders use; built from its source.

    pip download --no-deps --no-build-isolation --no-binary :all: torch-sparse==0.6.18 && tar xzf torch_sparse-*.tar.gz
    python recipes/benchmark.py suite=graph suite.sampling.torch_sparse=torch_sparse-0.6.18

All of the package takes more than ten minutes of a compiler, the two files of its sampler less than four.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.cpp_extension import load

from lightning_recsys.data.graph import CSRGraph


def make_sampler(graph: CSRGraph, *, source: str) -> Callable[[NDArray[np.int64], Sequence[int]], int]:
    """A function that samples around some seeds, without replacement, and returns the number of edges.

    Args:
        graph: Where to sample.
        source: Folder of the unpacked source distribution, in which the sampler is built unless it is there.

    Raises:
        FileNotFoundError: it is not that.
    """
    root = Path(source).expanduser().resolve()
    files = [root / "csrc" / "neighbor_sample.cpp", root / "csrc" / "cpu" / "neighbor_sample_cpu.cpp"]
    if missing := [str(path) for path in files if not path.exists()]:
        raise FileNotFoundError(
            f"suite.sampling.torch_sparse={source} is no source of torch-sparse: there is no {missing[0]}."
        )
    folder = root / "build_sampler"
    folder.mkdir(exist_ok=True)
    load(
        "torch_sparse_sampler",
        [str(path) for path in files],
        extra_include_paths=[str(root / "csrc"), str(root / "third_party" / "parallel-hashmap")],
        extra_cflags=["-O3", "-fopenmp", "-Wno-sign-compare"],  # as its setup.py has them
        build_directory=str(folder),
        is_python_module=False,
    )
    colptr, row = torch.from_numpy(np.asarray(graph.indptr)), torch.from_numpy(graph.indices.astype(np.int64))

    def sample(seeds: NDArray[np.int64], num_neighbors: Sequence[int]) -> int:
        _, edges, _, _ = torch.ops.torch_sparse.neighbor_sample(
            colptr, row, torch.from_numpy(seeds), list(num_neighbors), False, True
        )
        return len(edges)

    return sample
