"""Parts of a model behind requests: one backward pass for a forward pass, the optimizer's own updates, no mixing."""

import copy
import threading
import time

import pytest
import torch
from torch import nn

from lightning_recsys.compression import Compression, Receiver, Sender
from lightning_recsys.parameter_server.client import Connection
from lightning_recsys.parameter_server.connections import Peer
from lightning_recsys.parameter_server.handler import RequestHandler, Unfinished
from lightning_recsys.parameter_server.messages.wire import Limits, Request, decode_reply, encode_request
from lightning_recsys.parameter_server.parts.operator_wire import pack, unpack
from lightning_recsys.parameter_server.parts.operators import (
    GRACE_SECONDS,
    MAX_AGE_SECONDS,
    MAX_TOKENS,
    OperatorRequests,
)
from lightning_recsys.parameter_server.parts.remote_parts import RemoteParts, TokenLostError
from lightning_recsys.parameter_server.parts.trained_part import TrainedPart
from lightning_recsys.parameter_server.server import Server

NET, OTHER = bytes(range(1, 17)), bytes(range(2, 18))
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, fused=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, betas=(0.8, 0.9)),
}


class Layer(nn.Module):
    """A part: a tuple out."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x):
        y = self.layers(x)
        return y.squeeze(1), y * 2


class Slow(nn.Module):
    """Waits for leave before it answers."""

    def __init__(self):
        super().__init__()
        self.begun, self.leave = threading.Event(), threading.Event()

    def forward(self, x):
        self.begun.set()
        assert self.leave.wait(20)
        return (x + 1,)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def handler(tmp_path, clock):
    made = []

    def offer(folder, limits, peer):
        made.append(OperatorRequests(limits, peer, num_threads=2, clock=clock))
        return made[0]

    handler = RequestHandler(tmp_path, offer=offer)
    handler.operators = made[0]
    layer = Layer()
    handler.operators.parts["top"] = TrainedPart(layer, OPTIMIZERS["sgd"](layer.parameters()))
    yield handler
    handler.close()


def ask(handler, operation, *arrays, client=NET, peer=None, **arguments):
    request = Request(operation, 1, client, 0, "", arguments, list(arrays))
    reply = handler.handle([bytearray(frame) for frame in encode_request(request)], peer)
    if isinstance(reply, Unfinished):
        reply.future.exception(20)
        reply = handler.finish(reply)
    return decode_reply([bytearray(frame) for frame in reply], Limits())


def forward(handler, **others):
    arguments = {"part": "top", "keep": True, "wanted": [True], "tensors": [["f4", [6, 4]]]} | others
    return ask(handler, "forward", X.view(-1), **arguments)


def backward(handler, token, **others):
    grads = torch.ones(6), torch.zeros(6)
    arguments = {"token": token, "settings": [{"lr": 0.1}], "tensors": [["f4", [6]], ["f4", [6, 1]]]} | others
    return ask(handler, "backward", *grads, **arguments)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_part_when_trained_then_outputs_gradients_and_parameters_are_those_of_torch_bit_by_bit(name):
    own, there = Layer(), Layer()
    optimizer = OPTIMIZERS[name](own.parameters())
    part = TrainedPart(there, OPTIMIZERS[name](there.parameters()))
    for step in range(4):
        optimizer.param_groups[0]["lr"] = lr = 0.1 / (step + 1)
        x = X.clone().requires_grad_()
        optimizer.zero_grad()
        y, doubled = own(x)
        (y.sin().sum() + doubled.square().sum()).backward()
        optimizer.step()
        graph = part.forward([X.clone()], wanted=[True], keep=True)
        assert torch.equal(graph.outputs[0], y)
        with torch.no_grad():
            grads = [y.cos(), 2 * doubled]
        (grad,), staleness = part.backward(graph, grads, [{"lr": lr}])
        assert torch.equal(grad, x.grad)
        assert staleness == 0
        for mine, theirs in zip(own.parameters(), there.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    assert int(part.version) == 4


class Masked(nn.Module):
    """Takes truth values, and computes in double precision."""

    def forward(self, x, mask):
        return x.double() * 3, x.to(torch.complex64) * 2j, mask.logical_not(), x.half(), x.bfloat16()


def test_tensors_when_of_other_dtypes_then_they_cross_with_their_gradients(tmp_path):
    with Server(tmp_path, offer=lambda *arguments: OperatorRequests(*arguments[1:])) as server:
        server.handler._offer.parts["masked"] = TrainedPart(Masked(), None)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            connection = Connection(server.endpoint)
            remote, mask = RemoteParts(connection), torch.tensor([True, False])
            token, outputs = remote.forward("masked", [torch.ones(2), mask], wanted=[True, False], keep=True)()
            assert [x.dtype for x in outputs] == [
                torch.float64,
                torch.complex64,
                torch.bool,
                torch.float16,
                torch.bfloat16,
            ]
            assert outputs[2].tolist() == [False, True]
            grads = [torch.full((2,), 5.0, dtype=torch.float64), None, None, None, torch.ones(2, dtype=torch.bfloat16)]
            (grad, _), _ = remote.backward("masked", token, grads, settings=[])()
            assert grad.tolist() == [16.0, 16.0]
            connection.close()
        finally:
            server.stop()
            thread.join()


def test_part_when_others_update_between_then_both_passes_work_and_staleness_is_what_was_missed():
    layer = Layer()
    part = TrainedPart(layer, OPTIMIZERS["adam"](layer.parameters()))
    graphs = [part.forward([X.clone()], wanted=[False], keep=True) for _ in range(4)]
    grads = [torch.ones(6), None]
    assert [part.backward(graph, grads, [{}])[1] for graph in graphs] == [0, 1, 2, 3]
    assert part.backward(part.forward([X], wanted=[False], keep=True), [None, None], [{}]) == ([None], 0)
    assert int(part.version) == 4  # without a gradient there is no update


def test_part_when_several_threads_train_it_then_no_update_is_lost():
    layer, threads = nn.Linear(4, 1, bias=False), 4
    nn.init.zeros_(layer.weight)

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return (self.layer(x),)

    part = TrainedPart(Sum(), torch.optim.SGD(layer.parameters(), lr=1.0))

    def train():
        for _ in range(50):
            graph = part.forward([torch.ones(1, 4)], wanted=[False], keep=True)
            part.backward(graph, [torch.ones(1, 1)], [{}])

    running = [threading.Thread(target=train) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert torch.equal(layer.weight, torch.full((1, 4), -50.0 * threads))
    assert int(part.version) == 50 * threads


def test_token_when_used_twice_then_one_update_and_the_same_answer(handler):
    reply = forward(handler)
    assert [list(x.shape) for x in reply.arrays] == [[6], [6]]
    assert reply.value["tensors"] == [["f4", [6]], ["f4", [6, 1]]]
    once = backward(handler, reply.value["token"])
    again = backward(handler, reply.value["token"])
    assert once.value == again.value == {"staleness": 0, "tensors": [["f4", [6, 4]]]}
    assert torch.equal(once.arrays[0], again.arrays[0])
    assert int(handler.operators.parts["top"].version) == 1
    assert forward(handler).status == "ok"  # it has gone on, so it has the answer
    assert backward(handler, reply.value["token"]).status == "missing"


def test_token_when_another_net_uses_it_then_refused_and_still_its_own_nets(handler):
    token = forward(handler).value["token"]
    assert backward(handler, token, client=OTHER).status == "missing"
    assert backward(handler, token).status == "ok"
    assert handler.status()["refused"] == 1


def test_tokens_when_a_net_forgets_its_connection_is_lost_or_they_are_old_then_they_go(handler, clock):
    first = forward(handler).value["token"]
    tokens = [forward(handler).value["token"] for _ in range(MAX_TOKENS)]
    assert handler.status()["tokens"] == MAX_TOKENS
    assert backward(handler, first).status == "missing"
    peer = Peer(0, 0)
    lost = forward(handler, client=OTHER, peer=peer).value["token"]
    back = forward(handler, client=OTHER, peer=peer).value["token"]
    peer.is_alive = False
    assert handler.status()["tokens"] == MAX_TOKENS + 2
    clock.now = GRACE_SECONDS - 1
    another = Peer(1, 1)
    assert backward(handler, back, client=OTHER, peer=another).status == "ok"  # in time
    clock.now = GRACE_SECONDS + 1
    assert handler.status()["tokens"] == MAX_TOKENS + 1
    another.is_alive = False
    handler.status()
    clock.now += GRACE_SECONDS + 1
    assert handler.status()["tokens"] == MAX_TOKENS
    assert backward(handler, lost, client=OTHER).status == "missing"
    clock.now = MAX_AGE_SECONDS + 1
    assert handler.status()["tokens"] == 0
    assert handler.status()["expired"] == 1 + MAX_TOKENS + 1
    assert backward(handler, tokens[-1]).status == "missing"


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"part": "bottom"}, "there is no part 'bottom'"),
        ({"wanted": []}, "whether its gradient is wanted"),
        ({"wanted": [1]}, "whether its gradient is wanted"),
        ({"tensors": [["f4", [5, 4]]]}, r"for the shape \[5, 4\]"),
        ({"tensors": [None]}, "1 arrays came for"),
        ({"tensors": [["f4", [-6, -4]]]}, "sizes from 0"),
        ({"tensors": [["f9", [6, 4]]]}, "dtype must be one of"),
        ({"tensors": [["f4", [4, 6]]]}, "mat1 and mat2"),
        ({"keep": 1}, "keep must be bool"),
        ({"more": 1}, "takes the arguments"),
    ],
)
def test_forward_when_wrong_then_refused_counted_and_the_next_one_served(handler, others, reason):
    reply = forward(handler, **others)
    assert reply.status != "ok"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(reply.value)
    assert handler.counts.refused == 1
    assert forward(handler).status == "ok"


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"settings": []}, "optimizer has 1 groups"),
        ({"settings": [{"speed": 1.0}]}, r"no settings \['speed'\]"),
        ({"settings": [{"params": 1.0}]}, r"no settings \['params'\]"),
        ({"settings": [{"lr": "fast"}]}, "must be numbers"),
        ({"settings": [[0.1]]}, "must be numbers"),
        ({"tensors": [["f4", [6]], ["f4", [1, 6]]]}, r"of shape \[6, 1\], got"),
        ({"tensors": [None, ["f4", [6]]]}, "2 arrays came"),
    ],
)
def test_backward_when_wrong_then_refused_and_nothing_is_updated(handler, others, reason):
    before = [x.clone() for x in handler.operators.parts["top"]._parameters]
    reply = backward(handler, forward(handler).value["token"], **others)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(reply.value)
    assert all(torch.equal(a, b) for a, b in zip(before, handler.operators.parts["top"]._parameters, strict=True))
    assert handler.counts.refused == 1


def test_gradients_when_some_are_sent_then_what_is_kept_back_is_one_nets_and_parts_and_goes_with_it(handler, clock):
    handler.operators.compression = Compression.from_option({"gradients": "topk"}, top_k_fraction=0.1)
    peer = Peer(0, 0)
    sender, receiver = (kind(handler.operators.compression.gradients) for kind in (Sender, Receiver))
    sums = torch.zeros(2, 6, 4)
    for _ in range(40):
        for number, (client, scale) in enumerate([(NET, 1.0), (OTHER, -1.0)]):
            token = forward(handler, client=client, peer=peer).value["token"]
            described, arrays = pack(sender, [torch.full((6,), scale), None])
            arguments = {"token": token, "settings": [{"lr": 0.0, "weight_decay": 0.0}], "tensors": described}
            reply = ask(handler, "backward", *arrays, client=client, peer=peer, **arguments)
            sums[number] += unpack(receiver, reply.value["tensors"], reply.arrays)[0]
            sender.forget()
    # Of 24 elements 2 or 3 go at a time; what is kept back is one net's, and makes up for what was not sent.
    expected = handler.operators.parts["top"].forward([X.clone()], wanted=[True], keep=True)
    (sent,) = unpack(receiver, *pack(sender, [torch.ones(6)]))  # few elements of this, too
    (whole,), _ = handler.operators.parts["top"].backward(expected, [sent, None], [{"lr": 0.0}])
    kept_back = handler.operators._nets[NET].senders["top"]._residuals[0]
    torch.testing.assert_close(sums[0] + kept_back, 40 * whole)
    assert torch.equal(sums[0], -sums[1])
    assert len(handler.operators._nets) == 2
    peer.is_alive = False
    handler.status()
    clock.now = GRACE_SECONDS + 1
    handler.status()
    assert handler.operators._nets == {}


def test_forward_when_nothing_is_to_be_kept_then_no_token(handler):
    reply = forward(handler, keep=False)
    assert reply.value["token"] == 0
    assert handler.status()["tokens"] == 0


def test_passes_when_they_keep_too_many_bytes_then_refused(handler):
    handler.operators._max_kept_bytes = 100
    token = forward(handler).value["token"]
    assert "wait for their backward passes" in forward(handler).value
    assert backward(handler, token).status == "ok"
    assert forward(handler).status == "ok"


def test_server_when_a_part_takes_long_then_answers_others_and_this_one_later(tmp_path):
    tmp_path.chmod(0o700)
    slow, made = Slow(), []

    def offer(folder, limits, peer):
        made.append(OperatorRequests(limits, peer))
        made[0].parts["slow"] = TrainedPart(slow, None)
        return made[0]

    server = Server(tmp_path, offer=offer)
    thread = threading.Thread(target=server.run)
    thread.start()
    nets = [Connection(server.endpoint, timeout=20) for _ in range(2)]
    try:
        pending = nets[0].begin(
            "forward",
            arguments={"part": "slow", "keep": True, "wanted": [True], "tensors": [["f4", [3]]]},
            arrays=[torch.zeros(3)],
        )
        assert slow.begun.wait(20)
        assert nets[1].request("status").value["forwards"] == 1  # the loop is free
        slow.leave.set()
        reply = nets[0].wait(pending)
        assert torch.equal(reply.arrays[0], torch.ones(3))
        remote = RemoteParts(nets[0])
        token, (output,) = remote.forward("slow", [torch.zeros(2, 1)], wanted=[True], keep=True)()
        assert output.shape == (2, 1)
        grads, staleness = remote.backward("slow", token, [torch.full((2, 1), 3.0)], settings=[])()
        assert torch.equal(grads[0], torch.full((2, 1), 3.0))
        assert staleness == 0
        with pytest.raises(TokenLostError, match="part slow"):
            RemoteParts(nets[1]).backward("slow", token, [torch.ones(2, 1)], settings=[])()
        with pytest.raises(TypeError, match="float8_e5m2"):
            remote.forward("slow", [torch.zeros(2, dtype=torch.float8_e5m2)], wanted=[True], keep=True)
        # A server that is told to stop answers what it is at.
        slow.leave.clear()
        slow.begun.clear()
        arguments = {"part": "slow", "keep": False, "wanted": [False], "tensors": [["f4", [3]]]}
        pending = nets[0].begin("forward", arguments=arguments, arrays=[torch.zeros(3)])
        assert slow.begun.wait(20)
        server.stop()
        time.sleep(0.05)
        slow.leave.set()
        assert torch.equal(nets[0].wait(pending).arrays[0], torch.ones(3))
    finally:
        slow.leave.set()
        server.stop()
        thread.join()
        for net in nets:
            net.close()
        server.close()


def test_trained_part_when_copied_from_then_the_optimizer_keeps_its_state():
    layer = Layer()
    optimizer = OPTIMIZERS["adam"](layer.parameters())
    sum(y.sum() for y in layer(X)).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = copy.deepcopy([optimizer.state[x] for x in layer.parameters()])
    part = TrainedPart(layer, optimizer)
    for state, parameter in zip(before, part._written, strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], state["exp_avg"])
    part.backward(part.forward([X], wanted=[False], keep=True), [torch.ones(6), None], [{}])
    assert all(optimizer.state[x]["step"] == 2 for x in part._written)
