"""The cut model beside the whole one, before it is trained: outputs, gradients, and steps of the optimizer."""

from __future__ import annotations

import copy
import inspect
import logging
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_recsys.parameter_server.parts.trained_part import Graph, TrainedPart
from lightning_recsys.partition.lookups import is_lookup, trains_rows
from lightning_recsys.partition.parts import PartitionedModel
from lightning_recsys.strategies.hierarchical.cut.cut_layers import CutLayers
from lightning_recsys.strategies.hierarchical.cut.remote_forward import Net
from lightning_recsys.strategies.hierarchical.cut.sample_call import forward_replaced
from lightning_recsys.strategies.hierarchical.cut.watching import Same, fingerprint
from lightning_recsys.strategies.hierarchical.servers.group_parts import GroupParts, ServedPart
from lightning_recsys.strategies.replicas.replica import own_attributes, twin_of

# Another order of summation changes float32 numbers by some 1e-6 of the largest.
RELATIVE, OF_WEIGHTS = 1e-3, 1e-6
# It also moves a few of the millions of sums before a ReLU across zero, each of which changes gradients of its own
# example as a whole: gradients are held by their lengths. A gradient may be what is left of larger ones that cancel
# out, as that of a bias behind which a batch is normalised: the longest of all counts, too.
OF_GRADIENT, OF_LONGEST = 1e-2, 1e-5
# What gradients are multiplied by, parameter by parameter, in five steps: an optimizer that divides by a norm of many
# parameters divides by another number for each choice of them, and one that clips does so above, or below, some norm.
# The smallest come first, as nothing would be seen of them behind larger ones.
_FACTORS = ((1e-6, 1e-5, 1e-7), (1.0, 1.0, 1.0), (0.1, 1.0, 10.0), (10.0, 0.1, 1.0), (1e6, 1e5, 1e7))
_CHECKED = "_need_device_dtype_check_for_fused"  # what fused optimizers of torch set in their first step
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward"}
_OF_LIGHTNING = frozenset(vars(pl.LightningModule())) | _OF_EVERY_MODULE

log = logging.getLogger(f"pytorch_lightning.{__name__}")  # which has a handler in worker processes, too


def hold_against_whole(
    model: nn.Module,
    sample: Sequence[Any],
    *,
    layers: CutLayers,
    partitioned: PartitionedModel,
    parts: Mapping[str, GroupParts],
    optimizer: Optimizer,
    folder: Path | None = None,
    updates: bool = True,
) -> None:
    """Compute one batch by the parts, as group servers do, and by the whole model; and update copies of the parameters.

    The parts go through a file, as they do on their way to the servers, so this takes the memory of a second dense part
    with its optimizer's state, for a moment. Rows are looked up once for both. Nothing of the model, the optimizer, the
    rows and the random generators changes. Random numbers are the same on both sides; layers in pieces draw others, so
    dropouts do nothing where there are such. Compression and products in 8 bits, which round, are left out.

    Args:
        model: The whole model.
        sample: Arguments of its first call.
        layers: Its layers, of which some may be in pieces.
        partitioned: The model in parts.
        parts: The parts of each server, by device.
        optimizer: The optimizer of the run, over the whole model.
        folder: Where the file is for a moment, with as many bytes as the parts; by default the system's for such files.
        updates: Take steps of the optimizer, too.

    Raises:
        ValueError: a module's output, a parameter's gradient or its update differs, or a module or the optimizer
            changes what group servers would not bring back; says which.
    """
    began = time.monotonic()
    gradients: dict[str, Tensor] = {}
    copies = {device: _as_sent(own, folder) for device, own in parts.items()}
    served = nn.ModuleList(part.module for own in copies.values() for part in own.parts.values())
    with _unchanged(model), ExitStack() as stack:
        for module in (*model.modules(), *served.modules()) if layers.is_split else ():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                stack.callback(module.train, module.training)
                module.eval()
        rows = stack.enter_context(_rows_once(model))
        stack.enter_context(_SameDraws())  # type: ignore[no-untyped-call]
        stack.enter_context(torch.enable_grad())
        signature = inspect.signature(model.forward)
        whole, cut = _Pass(model, rows, signature), _Pass(served, rows, signature)
        trained = {name: x for name, x in model.named_parameters() if x.requires_grad and x.numel()}
        before = _attributes(model)
        expected = whole.run(model.forward, sample, trained)
        _refuse_written(before, _attributes(model))
        found = cut.run(_in_this_process(partitioned, copies, optimizer, gradients), sample, {})
    first = _first_names(model)
    found |= layers.whole_state({first.get(name, name): x for name, x in gradients.items()})
    _compare_passes(expected, found, whole.outputs, cut.outputs)
    if updates:
        steps = {name: x for name, x in expected.items() if name in trained and x is not None}
        served_parameters = (pair for own in copies.values() for pair in own.parameters.items())
        pieces = {first.get(name, name): x for name, x in served_parameters}
        shares = [part.optimizer for own in copies.values() for part in own.parts.values() if part.optimizer]
        _compare_updates(trained, steps, layers, optimizer, pieces, shares)
    log.info("A batch gives the same in parts and in the whole model (%.2f s).", time.monotonic() - began)


# --- Two passes ------------------------------------------------------------------------------------------------------


class _Pass:
    """A forward and a backward pass with the same rows, the same draws and the same gradients of the outputs.

    Args:
        modules: Has the modules whose outputs are kept, for a name of what differs.
        rows: What lookups find.
        signature: Signature of the model's ``forward``.

    Attributes:
        outputs: What each module without submodules has given, by path, in the order of the first calls.
    """

    def __init__(self, modules: nn.Module, rows: _Rows, signature: inspect.Signature) -> None:
        self.outputs: dict[str, list[Tensor]] = {}
        self._modules, self._rows, self._signature = modules, rows, signature

    def run(
        self, forward: Callable[..., Any], sample: Sequence[Any], parameters: Mapping[str, nn.Parameter]
    ) -> dict[str, Tensor | None]:
        """Outputs and gradients by names that can be told."""
        inputs: list[Tensor] = []

        def own(x: Tensor) -> Tensor:  # which a forward may change in place
            copied = x.detach().clone()
            if x.requires_grad:
                inputs.append(copied.requires_grad_())
            return copied

        self._rows.begin()
        with self._noted():
            bound = _bind(self._signature, tree_map_only(Tensor, own, list(sample)))
            outputs = tree_leaves(forward(*bound.args, **bound.kwargs))
        tensors = [x for x in outputs if isinstance(x, Tensor)]
        found: dict[str, Tensor | None] = {f"output {i}": x.detach() for i, x in enumerate(tensors)}
        ends = [x for x in tensors if x.requires_grad]
        generator = torch.Generator().manual_seed(0)
        grads = [torch.randn(x.shape, generator=generator).to(x) for x in ends]
        starts = {f"input {i}": x for i, x in enumerate(inputs)} | self._rows.given | dict(parameters)
        if ends and parameters:
            found |= dict(
                zip(starts, torch.autograd.grad(ends, list(starts.values()), grads, allow_unused=True), strict=True)
            )
        elif ends:  # parts note the gradients of their parameters when the backward pass comes to them
            torch.autograd.backward(ends, grads)
            found |= {name: x.grad for name, x in starts.items()}
        return found

    @contextmanager
    def _noted(self) -> Iterator[None]:
        def note(path: str, module: nn.Module, args: Any, output: Any) -> None:
            tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
            if tensors:
                self.outputs.setdefault(path, []).append(tensors[0].detach().clone())

        with ExitStack() as stack:
            roots = self._modules if isinstance(self._modules, nn.ModuleList) else [self._modules]
            for path, module in (x for root in roots for x in root.named_modules()):
                if next(module.children(), None) is None and path:
                    hook = module.register_forward_hook(_bound(note, path))
                    stack.callback(hook.remove)
            yield


def _bound(note: Callable[..., None], path: str) -> Callable[..., None]:
    return lambda module, args, output: note(path, module, args, output)


class _Rows:
    """The results of lookups, looked up once: a second pass gets the same rows in the same order.

    Attributes:
        given: The rows of this pass that are trained, by names.
    """

    def __init__(self) -> None:
        self.given: dict[str, Tensor] = {}
        self._found: defaultdict[str, list[Any]] = defaultdict(list)
        self._calls: defaultdict[str, int] = defaultdict(int)

    def begin(self) -> None:
        self._calls.clear()
        self.given = {}

    def look_up(self, path: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number, found = self._calls[path], self._found[path]
        self._calls[path] += 1
        if number == len(found):
            with torch.no_grad():  # a lookup that no gradient follows
                found.append(forward(*args, **kwargs))
        result = found[number]
        if isinstance(result, Tensor) and is_lookup(module) and trains_rows(module):
            result = self.given[f"rows of {path}, call {number + 1}"] = result.detach().requires_grad_()
        return result


@contextmanager
def _rows_once(model: nn.Module) -> Iterator[_Rows]:
    rows = _Rows()
    with ExitStack() as stack:
        for path, module in model.named_modules():
            if is_lookup(module):
                stack.enter_context(forward_replaced(module, _looking_up(rows, path, module, module.forward)))
        yield rows


def _looking_up(rows: _Rows, path: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: rows.look_up(path, module, forward, *args, **kwargs)


class _SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random operations draw the same numbers for the same shape, in whatever order they come."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(0)
        return func(*args, **(kwargs or {}))


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Buffers, attributes and random generators are afterwards what they were."""
    modules = [x for x in model.modules() if not is_lookup(x)]
    attributes = [(x, dict(vars(x))) for x in modules]
    buffers = [(x, x.clone()) for module in modules for x in module.buffers(recurse=False)]
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for module, own in attributes:
            vars(module).clear()
            vars(module).update(own)
        with torch.no_grad():
            for buffer, values in buffers:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)


def _attributes(model: nn.Module) -> dict[str, object]:
    """Prints of what a forward pass must not change: attributes in Python, and which tensors are the buffers."""
    found: dict[str, object] = {}
    apart = set(model.modules())
    of_rows = {x for module in apart if is_lookup(module) for x in module.modules()}
    for path, module in ((path, x) for path, x in model.named_modules() if x not in of_rows):
        of_class = _OF_LIGHTNING if isinstance(module, pl.LightningModule) else _OF_EVERY_MODULE
        start = f"{path}." if path else ""
        found |= {start + name: _print(x, apart=apart) for name, x in vars(module).items() if name not in of_class}
        found |= {start + name: Same(x) for name, x in module.named_buffers(recurse=False)}
    return found


def _print(value: Any, *, apart: Collection[Any]) -> object:
    try:
        return fingerprint(value, apart=apart)
    except ValueError:  # too large, or of a kind that nothing is known of
        return Same(value)


def _refuse_written(before: Mapping[str, object], after: Mapping[str, object]) -> None:
    if written := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
        raise ValueError(
            f"strategy=hierarchical: the forward pass changes {written[0]}, which a part on a group server would do by"
            " itself, for as long as that server lives. Return what is to be kept, or keep it in a buffer that is"
            " changed in place; or use strategy=shadowsync, which keeps models whole."
        )


def _first_names(model: nn.Module) -> dict[str, str]:
    """For each name of a parameter the one by which ``named_parameters`` tells it: tied ones have several."""
    first = {x: name for name, x in model.named_parameters()}
    return {name: first[x] for name, x in model.named_parameters(remove_duplicate=False)}


def _bind(signature: inspect.Signature, arguments: Sequence[Any]) -> inspect.BoundArguments:
    """Arguments in the order of a signature, as ``positional`` gives them."""
    return inspect.BoundArguments(signature, dict(zip(signature.parameters, arguments, strict=True)))


# --- Parts in this process -------------------------------------------------------------------------------------------


def _as_sent(parts: GroupParts, within: Path | None) -> GroupParts:
    with tempfile.TemporaryDirectory(dir=within) as folder:
        parts.save(Path(folder))
        return GroupParts.load(Path(folder))


class _Notes(torch.optim.Optimizer):
    """Takes no step, and keeps the gradients."""

    def __init__(self, part: ServedPart, gradients: dict[str, Tensor]) -> None:
        trained = {x for group in part.optimizer.param_groups for x in group["params"]} if part.optimizer else set()
        self.names = [name for name, x in part.module.named_parameters() if x in trained]
        own = dict(part.module.named_parameters())
        super().__init__([own[name] for name in self.names], {})
        self.gradients = gradients

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        own = zip(self.names, group["params"], strict=True)
        self.gradients.update((name, x.grad.clone()) for name, x in own if x.grad is not None)


class _Here:
    """A group server's parts, computed in this process."""

    def __init__(self, parts: GroupParts, gradients: dict[str, Tensor]) -> None:
        self._parts = {
            name: TrainedPart(part.module, _Notes(part, gradients) if part.optimizer else None)
            for name, part in parts.parts.items()
        }
        self._graphs: dict[int, Graph] = {}

    def forward(self, name: str, inputs: Sequence[Any], *, wanted: Sequence[bool], keep: bool) -> Callable[[], Any]:
        graph = self._parts[name].forward([x.detach().clone() for x in inputs], wanted=wanted, keep=keep)
        self._graphs[token := len(self._graphs)] = graph
        return lambda: (token, [x.detach().clone() for x in graph.outputs])

    def backward(self, name: str, token: int, grads: Sequence[Tensor | None], *, settings: Any) -> Callable[[], Any]:
        part = self._parts[name]
        found = part.backward(self._graphs[token], grads, [{} for _ in settings])
        return lambda: found


def _in_this_process(
    partitioned: PartitionedModel, parts: Mapping[str, GroupParts], optimizer: Optimizer, gradients: dict[str, Tensor]
) -> PartitionedModel:
    groups = {name: [0] if part.optimizer else [] for own in parts.values() for name, part in own.parts.items()}
    servers: Any = {device: _Here(own, gradients) for device, own in parts.items()}
    return partitioned.with_runners(dict.fromkeys(parts, Net(servers, optimizer, groups).run))


# --- What differs ----------------------------------------------------------------------------------------------------


def _compare_passes(
    expected: Mapping[str, Tensor | None],
    found: Mapping[str, Tensor | None],
    modules: Mapping[str, list[Tensor]],
    cut_modules: Mapping[str, list[Tensor]],
) -> None:
    outputs = {name for name in expected if name.startswith("output ")}
    lengths = [_length(x) for name, x in expected.items() if name not in outputs and x is not None]
    longest = max(filter(math.isfinite, lengths), default=0.0)
    for name, one in expected.items():
        other = found.get(name)
        if _is_near(one, other) if name in outputs else _points_alike(one, other, longest):
            continue
        what = f"the gradient of {name}" if name not in outputs else f"its {name}"
        before = ""
        for path, value in modules.items():
            if not len(value) == len(cut_modules.get(path, ())) == 1:
                continue  # it is the trainer's own, or calls of it may have another order
            if not _is_near(value[0], cut_modules[path][0]):
                raise _differs(f"the output of {path}", value[0], cut_modules[path][0])
            before = path
        where = f", where all of its modules compute the same, the last of which is {before}" if before else ""
        raise _differs(what + (where if name in outputs else ""), one, other)


def _differs(what: str, one: Tensor | None, other: Tensor | None) -> ValueError:
    return ValueError(
        f"strategy=hierarchical: {what} is not the same in the cut model as in the whole one: {_sizes(one)} in"
        f" the whole model, {_sizes(other)} in its parts. Its forward may read or change something that is neither an"
        " argument, an attribute, a parameter nor a buffer. Change it, or use strategy=shadowsync, which keeps models"
        " whole."
    )


def _sizes(x: Tensor | None) -> str:
    return "none" if x is None else f"{float(x.double().norm()):.6g} (2-norm)"


def _size(x: Tensor) -> float:
    finite = x[x.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _length(x: Tensor) -> float:
    return float(x.double().norm())


def _is_near(one: Tensor | None, other: Tensor | None, slack: float = 0.0) -> bool:
    """Whether the numbers of two tensors are equal but for rounding, and for so much; none is as good as zeros."""
    if one is None or other is None or one.shape != other.shape:
        return _are_none(one, other)
    one, other = one.double(), other.double()
    return torch.allclose(one, other, rtol=0, atol=RELATIVE * _size(one) + slack, equal_nan=True) or (
        _overflow_alike(one, other)
    )


def _points_alike(one: Tensor | None, other: Tensor | None, longest: float) -> bool:
    """Whether two gradients are equal but for a hundredth of their length; none is as good as zeros."""
    if one is None or other is None or one.shape != other.shape:
        return _are_none(one, other)
    return _length(one.double() - other.double()) <= OF_GRADIENT * _length(one) + OF_LONGEST * longest or (
        _overflow_alike(one, other)
    )


def _are_none(one: Tensor | None, other: Tensor | None) -> bool:
    return (one is None or other is None) and not any(bool(x.count_nonzero()) for x in (one, other) if x is not None)


def _overflow_alike(one: Tensor, other: Tensor) -> bool:
    return not bool(one.isfinite().all()) and torch.equal(one.isfinite(), other.isfinite())


def _compare_updates(
    trained: Mapping[str, nn.Parameter],
    gradients: Mapping[str, Tensor],
    layers: CutLayers,
    optimizer: Optimizer,
    pieces: Mapping[str, nn.Parameter],
    shares: Sequence[Optimizer],
) -> None:
    """Some steps of the optimizer, and of the servers' shares of it, with the same gradients."""
    names = {x: name for name, x in trained.items()}
    own = [x for group in optimizer.param_groups for x in group["params"] if x in names]
    twin, made = twin_of(optimizer, own)
    for x, copied in zip(own, made, strict=True):
        twin.state[copied] = copy.deepcopy(optimizer.state.get(x, {}))
    whole = {names[x]: copied for x, copied in zip(own, made, strict=True)}
    for group in (group for one in (twin, *shares) for group in one.param_groups):
        if not float(group.get("lr", 1.0)):  # as a schedule begins that warms up
            group["lr"] = float(group.get("initial_lr", 0.0)) or 1e-3
    kept = _beside_state(shares, pieces)
    for number, factors in enumerate(_FACTORS, 1):
        scaled = {name: x * factors[i % 3] for i, (name, x) in enumerate(gradients.items()) if name in whole}
        _give(pieces, layers.piece_state(scaled))
        with torch.no_grad(), _SameDraws():  # type: ignore[no-untyped-call]
            twin.step(partial(_give, whole, scaled))  # as Lightning does, whose closure computes the gradients
            for share in shares:
                share.step()
        _compare_weights(trained, whole, layers, pieces, f"{type(optimizer).__name__} moves", f"step {number}")
    _refuse_lost(type(optimizer).__name__, kept, _beside_state(shares, pieces))


def _compare_weights(
    trained: Mapping[str, nn.Parameter],
    whole: Mapping[str, nn.Parameter],
    layers: CutLayers,
    pieces: Mapping[str, nn.Parameter],
    moves: str,
    step: str,
) -> None:
    found = layers.whole_state({name: x.detach() for name, x in pieces.items()})
    for name in sorted(whole.keys() & found.keys()):
        start = trained[name].detach()
        one, other = whole[name].detach() - start, found[name] - start
        if not _is_near(one, other, OF_WEIGHTS * _size(start)):  # which float32 loses of them
            apart = float((one - other).abs().max())
            raise ValueError(
                f"strategy=hierarchical: {moves} {name} otherwise where parts of the model have their own share of it"
                f" ({apart:.3g} apart after {step}, of {_size(one):.3g}): its step reads more than the numbers that it"
                f" updates, as a norm over all gradients{' or over a layer' if layers.is_split else ''} does, or it"
                " looks at gradients before it has called its closure. Use an optimizer that takes each parameter by"
                f" itself,{' strategy.fc_splits=none,' if layers.is_split else ''} or strategy=shadowsync."
            )


def _beside_state(shares: Sequence[Optimizer], pieces: Mapping[str, nn.Parameter]) -> dict[Any, object]:
    """Prints of what optimizers have besides tensors that lie in a server's memory, and of where these lie."""
    names, apart = {x: name for name, x in pieces.items()}, set(pieces.values())
    found: dict[Any, object] = {}
    for i, share in enumerate(shares):
        for name, value in (x for x in own_attributes(share).items() if x[0] != _CHECKED):
            found[f"{i}", f"its attribute {name}"] = _print(value, apart=apart)
        for j, group in enumerate(share.param_groups):
            for name in group.keys() - {"params"}:
                found[f"{i}.{j}", f"{name} of a parameter group"] = _print(group[name], apart=apart)
            for x in group["params"]:
                for key, value in share.state.get(x, {}).items():
                    at = (value.data_ptr(), value.shape) if isinstance(value, Tensor) else _print(value, apart=apart)
                    found["", f"state[{key!r}] of {names.get(x, 'a parameter')}"] = at
    return found


def _refuse_lost(optimizer: str, before: Mapping[Any, object], after: Mapping[Any, object]) -> None:
    """Refuse what the next backward pass would overwrite, or a server that is started anew would not have."""
    changed = sorted(x for x in before.keys() | after.keys() if before.get(x) != after.get(x))
    if changed:
        raise ValueError(
            f"strategy=hierarchical: a step of {optimizer} changes {changed[0][1]}, and group servers keep, beside"
            " the parameters, the tensors that its state has before the first step, as long as steps change them in"
            " place (add_, copy_). Use an optimizer that does so, as torch's own do, or strategy=shadowsync."
        )


def _give(parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        gradient = gradients.get(name)
        parameter.grad = None if gradient is None else gradient.clone()
