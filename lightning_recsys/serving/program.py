"""The program of a model's dense part, as whoever answers requests loads it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

_LOADING = threading.Lock()  # torch reads one program at a time, and says so by a failed assertion


def load_program(path: Path) -> nn.Module:
    """The module that a file of :func:`~lightning_recsys.serving.dense.export_apart` has.

    It comes without the program's own checks of its input, which take a tenth of a millisecond of each request: what a
    model takes is known from its manifest, and an encoder makes nothing else.
    """
    with _LOADING, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: nn.Module = torch.export.load(path).module(check_guards=False)
    return program


def with_weights(program: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a program with other weights.

    Raises:
        ValueError: the weights are not those that the program takes.
    """
    other = _with_tensors_of_its_own(program)
    try:
        other.load_state_dict({f"model.{name}": value for name, value in weights.items()})
    except RuntimeError as error:
        raise ValueError(f"the dense part does not fit its program: {error}") from error
    return other


def _with_tensors_of_its_own(module: nn.Module) -> nn.Module:
    """A module with the same code: a deep copy would take its graph apart, while requests wait for Python's lock."""
    other: nn.Module = object.__new__(type(module))  # a graph's module has a class of its own, which this one shares
    other.__dict__.update(module.__dict__)
    own = {name: x if x is None else nn.Parameter(x.detach().clone(), False) for name, x in module._parameters.items()}
    buffers = {name: x if x is None else x.clone() for name, x in module._buffers.items()}
    inner = {name: x if x is None else _with_tensors_of_its_own(x) for name, x in module._modules.items()}
    other.__dict__.update(_parameters=own, _buffers=buffers, _modules=inner)
    return other
