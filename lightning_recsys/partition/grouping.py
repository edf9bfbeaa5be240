"""Calls of a traced model that must be on one device, as operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from torch import Tensor, fx, nn

_Links = dict[fx.Node, fx.Node]


def group_nodes(
    model: nn.Module, graph: fx.Graph, *, tensors: Mapping[fx.Node, Tensor]
) -> dict[str, tuple[fx.Node, ...]]:
    """Operators of a traced model, in an order in which they can run.

    Args:
        model: The model that was traced.
        graph: The calls that tracing recorded.
        tensors: Results of those that give tensors; others hand on a number, a shape, a tuple.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    links: _Links = {node: node for node in nodes}
    _join_around_parameters(model, nodes, links)
    for node in nodes:
        if node not in tensors:
            _join(links, node, *_users(node))
    _join_around_changes(model, nodes, links, tensors)
    groups = _without_cycles(nodes, links)
    names = _names(model, groups)
    return dict(zip(names, groups, strict=True))


def _users(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.op != "output"]


def _find(links: _Links, node: fx.Node) -> fx.Node:
    while links[node] is not node:
        links[node] = links[links[node]]
        node = links[node]
    return node


def _join(links: _Links, first: fx.Node, *others: fx.Node) -> None:
    for other in others:
        links[_find(links, other)] = _find(links, first)


def _join_around_parameters(model: nn.Module, nodes: Iterable[fx.Node], links: _Links) -> None:
    """Whatever is made of parameters alone stays with them, and so do all calls that read the same parameter."""
    only_parameters: set[fx.Node] = set()
    first_of: dict[int, fx.Node] = {}
    for node in nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" or (inputs and all(x in only_parameters for x in inputs)):
            only_parameters.add(node)
            _join(links, node, *_users(node))
        for tensor in tensors_of(model, [node]).values():
            _join(links, first_of.setdefault(id(tensor), node), node)


def _join_around_changes(
    model: nn.Module, nodes: Sequence[fx.Node], links: _Links, tensors: Mapping[fx.Node, Tensor]
) -> None:
    """A call that overwrites a tensor stays with all that was made in that memory, and that read it, before."""
    for number, node in enumerate(nodes):
        changed = _changed_in_place(model, node)
        if changed is None or changed not in tensors:
            continue
        before = dict.fromkeys(nodes[:number])
        memory = tensors[changed].untyped_storage().data_ptr()
        for view in before:
            if view in tensors and tensors[view].untyped_storage().data_ptr() == memory:
                _join(links, node, view, *(user for user in view.users if user in before))


def tensors_of(model: nn.Module, group: Sequence[fx.Node]) -> dict[str, Tensor]:
    """Parameters and buffers of an operator, each once, by their names in the model."""
    found: dict[str, Tensor] = {}
    for node in group:
        path = str(node.target)
        if node.op == "call_module":
            module = model.get_submodule(path)
            found.update((f"{path}.{name}", tensor) for name, tensor in module.named_parameters())
            found.update((f"{path}.{name}", tensor) for name, tensor in module.named_buffers())
        elif node.op == "get_attr":
            parent, _, name = path.rpartition(".")
            found[path] = getattr(model.get_submodule(parent), name)
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def _changed_in_place(model: nn.Module, node: fx.Node) -> fx.Node | None:
    """The node whose tensor this call overwrites, by torch's conventions for names and arguments."""
    in_place = bool(node.kwargs.get("inplace"))
    if node.op == "call_module":
        in_place = bool(getattr(model.get_submodule(str(node.target)), "inplace", False))
    elif node.op == "call_method":
        in_place = in_place or (str(node.target).endswith("_") and not str(node.target).endswith("__"))
    elif node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        module = getattr(node.target, "__module__", "")
        in_operator = (
            module == "_operator" and name.startswith("i") and name not in ("index", "invert", "is_", "is_not")
        )
        in_place = in_place or in_operator or (name.endswith("_") and not name.endswith("__") and "torch" in module)
    changed = node.args[0] if in_place and node.args else None
    return changed if isinstance(changed, fx.Node) else None


def _without_cycles(nodes: list[fx.Node], links: _Links) -> list[tuple[fx.Node, ...]]:
    """Groups in an order in which they can run; those that lie on a cycle become one.

    Joining two calls can put a third between them, which reads the one and is read by the other.
    """
    while True:
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            members.setdefault(_find(links, node), []).append(node)
        before = {
            root: {_find(links, x) for node in group for x in node.all_input_nodes if x in links} - {root}
            for root, group in members.items()
        }
        try:
            return [tuple(members[root]) for root in TopologicalSorter(before).static_order()]
        except CycleError as error:
            _join(links, *error.args[1])


def _names(model: nn.Module, groups: Iterable[Sequence[fx.Node]]) -> list[str]:
    """The path of the module that is called, or that owns the parameters that are read; then the function's name."""
    names: list[str] = []
    for group in groups:
        calls = [node for node in group if node.op == "call_module"]
        owner = next((node for node in calls if tensors_of(model, [node])), calls[0] if calls else None)
        name = str(owner.target) if owner else _name_of_function(group)
        taken = sum(other == name or other.startswith(f"{name}:") for other in names)
        names.append(f"{name}:{taken + 1}" if taken else name)
    return names


def _name_of_function(group: Sequence[fx.Node]) -> str:
    read = next((str(node.target) for node in group if node.op == "get_attr"), None)
    path = module_of(group[-1]) if read is None else read.rpartition(".")[0]
    return f"{path}.{group[-1].name}" if path else group[-1].name


def module_of(node: fx.Node) -> str:
    """Path of the module in whose forward a call stands; of a module's call, the module's own path."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed([path for path, _ in stack.values()]), ""))
