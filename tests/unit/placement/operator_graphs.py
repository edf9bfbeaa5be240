"""Graphs of operators, by hand and by hypothesis."""

from hypothesis import strategies as st

from lightning_recsys.placement.operators import Operator, OperatorGraph, Value


def graph_of(operators, *, results=(), batch_size=1, sizes=None, inputs=("x",)):
    """Each operator makes one value with its own name; ``x`` is the model's input."""
    sizes = sizes or {}
    values = [Value(name, sizes.get(name, 100), None, has_gradient=False) for name in inputs]
    values += [Value(operator.name, sizes.get(operator.name, 100), operator.name) for operator in operators]
    return OperatorGraph(tuple(operators), tuple(values), tuple(results), batch_size)


def layer(name, *inputs, flops=1e6, weights=1000, activations=100):
    return Operator(
        name,
        "Linear",
        inputs,
        forward_flops=flops,
        backward_flops=2 * flops,
        weight_bytes=weights,
        activation_bytes=activations,
        owns_parameters=True,
    )


def cheap(name, *inputs, flops=1e3):
    return Operator(name, "cat", inputs, forward_flops=flops, backward_flops=flops, activation_bytes=100)


def lookup(name):
    return Operator(name, "EmbeddingBagCollection", ("x",), activation_bytes=100, trainer_only=True)


def dlrm():
    """Two towers around an interaction."""
    return graph_of(
        [
            lookup("rows"),
            layer("bottom.0", "x", flops=3e6, weights=3000),
            cheap("bottom.1", "bottom.0"),
            layer("bottom.2", "bottom.1", weights=2000),
            cheap("interaction", "rows", "bottom.2"),
            layer("top.0", "interaction", flops=5e6, weights=6000),
            layer("top.1", "top.0", weights=500),
            cheap("squeeze", "top.1"),
        ],
        results=("squeeze",),
    )


@st.composite
def graphs(draw, max_operators=10):
    """Random graphs without cycles, some operators with parameters, some for trainers only."""
    count = draw(st.integers(1, max_operators))
    operators = []
    for number in range(count):
        before = ["x", *(operator.name for operator in operators)]
        inputs = tuple(draw(st.lists(st.sampled_from(before), min_size=1, max_size=3, unique=True)))
        kind = draw(st.sampled_from([layer, layer, cheap, None]))
        if kind is layer:
            flops, weights = draw(st.integers(1, 9)) * 1e6, draw(st.integers(1, 9)) * 1000
            operators.append(layer(f"op{number}", *inputs, flops=flops, weights=weights))
        else:
            operators.append(cheap(f"op{number}", *inputs) if kind else lookup(f"op{number}"))
    sizes = {operator.name: draw(st.integers(0, 40)) * 1000 for operator in operators}
    read = {name for operator in operators for name in operator.inputs}
    results = [operator.name for operator in operators if operator.name not in read]
    return graph_of(operators, results=results, sizes=sizes)
