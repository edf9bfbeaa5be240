"""A server's handler without a socket: each push once and in order, each wrong request refused and nothing changed."""

import re

import pytest
import torch
from server_helpers import CLIENT, LAYOUT, ask, digest

from lightning_recsys.optim import RowAdagrad, RowSGD
from lightning_recsys.parameter_server.handler import RequestHandler
from lightning_recsys.parameter_server.messages.wire import Limits
from lightning_recsys.stores.plain import layout_to_plain, optimizer_to_plain

ONE_ROW = torch.tensor([2]), torch.full((1, 4), -1.0)
IDS = torch.tensor([0, 5, 1, 4, 2, 0])  # x, y of table a and z of table b, two examples
GRADS = torch.ones(2, 3, 4)


@pytest.fixture
def handler(tmp_path):
    handler = RequestHandler(tmp_path, limits=Limits(message_bytes=1 << 16, rows=1000))
    handler.stores.mapped.create_embedding_store("users", LAYOUT, RowAdagrad(lr=0.1), seed=0)
    handler.stores.mapped.create_dense_store("center", torch.zeros(3), optimizer=RowSGD(lr=0.1))
    assert ask(handler, "hello").status == "ok"
    yield handler
    handler.close()


def push(handler, sequence, *, rate=1.0, arrays=ONE_ROW):
    return ask(handler, "apply_row_gradients", *arrays, sequence=sequence, store="users", lr=rate)


def row_2(handler):
    return ask(handler, "lookup", torch.tensor([2]), store="users").arrays[0].clone()


def test_push_when_it_comes_again_then_is_acknowledged_and_not_applied(handler):
    assert push(handler, 1).status == "ok"
    once = row_2(handler)
    assert [push(handler, 1).status for _ in range(3)] == ["ok"] * 3
    assert torch.equal(row_2(handler), once)
    assert push(handler, 2).status == "ok"
    assert not torch.equal(row_2(handler), once)
    assert (handler.counts.pushes, handler.counts.duplicates, handler.counts.refused) == (2, 3, 0)
    assert ask(handler, "counter", store="users").value == 2


def test_push_when_an_earlier_one_is_missing_then_says_where_to_begin(handler):
    push(handler, 1)
    before = row_2(handler)
    reply = push(handler, 3)
    assert (reply.status, reply.value) == ("gap", 1)
    assert torch.equal(row_2(handler), before)


def test_push_when_refused_then_the_next_one_follows_and_it_stays_refused(handler):
    refused = push(handler, 1, arrays=(torch.tensor([9]), torch.ones(1, 4)))
    assert (refused.status, refused.value) == ("refused", "rows must be in [0, 9), got 9 to 9")
    assert push(handler, 1).value == "this push was refused before"
    assert push(handler, 2).status == "ok"
    assert handler.counts.pushes == 1


@pytest.mark.parametrize(
    ("operation", "arrays", "changes", "reason"),
    [
        ("create_dense_store", (torch.ones(3),), {"store": ".x", "optimizer": None}, "a store's name must be"),
        ("create_dense_store", (torch.ones(1 << 15),), {"store": "x", "optimizer": None}, "at most 65536 bytes"),
        ("nothing_of_the_kind", (), {"store": "users"}, "there is no operation 'nothing_of_the_kind'"),
        ("lookup", (torch.tensor([0]),), {"store": "users"}, "takes no sequence number"),
    ],
)
def test_push_when_it_cannot_be_read_then_its_number_is_used_in_its_turn(handler, operation, arrays, changes, reason):
    early = ask(handler, operation, *arrays, sequence=2, **changes)
    assert (early.status, early.value) == ("gap", 0)
    assert push(handler, 1).status == "ok"
    refused = ask(handler, operation, *arrays, sequence=2, **changes)
    assert (refused.status, refused.id) == ("refused", 1)
    assert reason in refused.value
    assert ask(handler, operation, *arrays, sequence=2, **changes).value == "this push was refused before"
    assert push(handler, 3).status == "ok"


def test_pushes_when_several_are_refused_then_each_stays_refused_and_the_others_applied(handler, tmp_path):
    wrong = torch.tensor([9]), torch.ones(1, 4)
    for sequence in range(1, 65):
        assert push(handler, sequence, arrays=wrong if sequence % 3 else ONE_ROW).status in ("ok", "refused")
    second = RequestHandler(tmp_path)
    for server in (handler, second):
        again = [push(server, sequence).status for sequence in range(1, 65)]
        assert again == ["refused" if sequence % 3 else "ok" for sequence in range(1, 65)]
    assert push(second, 65).status == "ok"  # in the place of the first, which was refused
    assert push(second, 65).status == "ok"
    second.close()


def test_push_when_of_a_client_that_is_unknown_then_is_refused(handler):
    reply = ask(handler, "apply_row_gradients", *ONE_ROW, sequence=1, store="users", client=b"z" * 16, lr=1.0)
    assert (reply.status, "has not said hello here" in reply.value) == ("refused", True)
    ask(handler, "goodbye")
    assert push(handler, 1).status == "refused"


def test_push_when_the_server_starts_anew_then_its_number_is_known(handler, tmp_path):
    push(handler, 1)
    before = row_2(handler)
    second = RequestHandler(tmp_path)
    assert push(second, 1).status == "ok"
    assert torch.equal(row_2(second), before)
    assert push(second, 3).status == "gap"
    assert push(second, 2).status == "ok"
    second.close()


def test_elastic_average_when_it_comes_again_then_moves_once_and_tells_the_centre(handler):
    replies = [
        ask(handler, "elastic_average", torch.ones(3), sequence=1, store="center", alpha=0.5).arrays[0].tolist()
        for _ in range(2)
    ]
    assert replies == [[0.5] * 3] * 2
    replies = [ask(handler, "push_gradient", torch.ones(3), sequence=2, store="center", lr=0.5) for _ in range(2)]
    assert [[x.tolist() for x in reply.arrays] for reply in replies] == [[[[1, 1]]], []], "its staleness counts once"
    assert ask(handler, "pull", store="center").arrays[0].tolist() == [0.0] * 3


def sparse(operation, handler, *arrays, bags=False, weighted=False, sequence=0, **more):
    return ask(handler, operation, *arrays, store="users", sequence=sequence, bags=bags, weighted=weighted, **more)


def test_pooled_lookup_when_asked_over_the_wire_then_equals_the_store_s_own(handler):
    weight = handler.stores.mapped.embedding_store("users").rows
    rows = torch.tensor([[0, 1, 6 + 2], [5, 4, 6 + 0]])
    torch.testing.assert_close(sparse("pooled_lookup", handler, IDS).arrays[0], weight[rows])
    # x: bags of 2 and 0 ids, y: 1 and 1, z: 0 and 2
    offsets, weights = torch.tensor([0, 2, 2, 3, 4, 4, 6]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    pooled = sparse("pooled_lookup", handler, IDS, offsets, weights, bags=True, weighted=True).arrays[0]
    zero = torch.zeros(4)
    first = torch.stack([weight[0] + 2 * weight[5], 3 * weight[1], zero])
    second = torch.stack([zero, 4 * weight[4], 5 * weight[8] + 6 * weight[6]])
    torch.testing.assert_close(pooled, torch.stack([first, second]))


def test_pooled_gradients_when_taken_back_then_every_row_is_as_before(handler, tmp_path):
    before = digest(tmp_path)
    served = handler.stores.embedding(type("R", (), {"store": "users", "operation": "", "arguments": {}}))
    begin = served.store.begin_gradients

    def begin_what_fails(*args, **kwargs):
        rows, apply = begin(*args, **kwargs)
        assert digest(tmp_path) == before
        assert sorted(rows.tolist()) == sorted({0, 1, 4, 5, 6, 8})  # each once

        def apply_and_fail():
            apply()
            assert digest(tmp_path) != before
            raise MemoryError("in the middle")

        return rows, apply_and_fail

    served.store.begin_gradients = begin_what_fails
    reply = sparse("apply_gradients", handler, IDS, GRADS, sequence=1, lr=1.0)
    assert (reply.status, reply.value) == ("failed", "MemoryError: in the middle")
    assert digest(tmp_path) == before


OFFSETS = torch.tensor([0, 1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize(
    ("operation", "arrays", "fields", "status", "reason"),
    [
        ("fly", (), {}, "refused", "no operation 'fly'"),
        ("lookup", (torch.tensor([9]),), {}, "refused", r"rows must be in \[0, 9\), got 9 to 9"),
        ("lookup", (torch.tensor([-1]),), {}, "refused", r"rows must be in \[0, 9\), got -1 to -1"),
        ("lookup", (torch.tensor([1.0]),), {}, "refused", "rows must be torch.int64"),
        ("lookup", (torch.tensor([[1]]),), {}, "refused", "with 1 dimensions"),
        ("lookup", (), {}, "refused", "an array is missing: rows"),
        ("lookup", (torch.tensor([1]),) * 2, {}, "refused", "takes 1 arrays, got 2"),
        ("lookup", (torch.tensor([1]),), {"more": 1}, "refused", "takes the arguments"),
        ("lookup", (torch.tensor([1]),), {"sequence": 1}, "refused", "takes no sequence number"),
        ("lookup", (torch.zeros(1001).long(),), {}, "refused", "at most 1000 rows, got 1001"),
        ("lookup", (torch.tensor([1]),), {"store": "nobody"}, "missing", r"no store 'nobody'; there are \['center'"),
        ("lookup", (torch.tensor([1]),), {"store": ""}, "refused", "name must be 1 to 128"),
        ("lookup", (torch.tensor([1]),), {"store": "center"}, "missing", "'center' is a dense store"),
        ("pull", (), {}, "missing", "'users' is an embedding store"),
        ("pooled_lookup", (IDS,), {}, "refused", "takes the arguments"),
        ("pooled_lookup", (IDS,), {"bags": 0, "weighted": False}, "refused", "bags must be bool"),
        ("pooled_lookup", (IDS[:5],), {"bags": False, "weighted": False}, "refused", "not a multiple of the 3"),
        ("pooled_lookup", (IDS + 1,), {"bags": False, "weighted": False}, "refused", r"ids must be in \[0, \[6, 6, 3"),
        ("pooled_lookup", (IDS - 1,), {"bags": False, "weighted": False}, "refused", "ids must be in"),
        ("pooled_lookup", (IDS, IDS), {"bags": False, "weighted": False}, "refused", "got 1 more arrays"),
        ("pooled_lookup", (IDS, OFFSETS + 1), {"bags": True, "weighted": False}, "refused", "offsets must rise"),
        ("pooled_lookup", (IDS, OFFSETS.flip(0)), {"bags": True, "weighted": False}, "refused", "offsets must rise"),
        ("pooled_lookup", (IDS, OFFSETS.clamp(max=5)), {"bags": True, "weighted": False}, "refused", "offsets must"),
        ("pooled_lookup", (IDS, OFFSETS[:0]), {"bags": True, "weighted": False}, "refused", "not a multiple"),
        ("pooled_lookup", (IDS, OFFSETS[:6]), {"bags": True, "weighted": False}, "refused", "not a multiple"),
        (
            "pooled_lookup",
            (IDS, torch.tensor([0, 2**63 - 1, -(2**63), 3, 4, 5, 6])),
            {"bags": True, "weighted": False},
            "refused",
            "offsets must rise",
        ),
        ("pooled_lookup", (IDS + 1, OFFSETS), {"bags": True, "weighted": False}, "refused", "ids must be in"),
        ("pooled_lookup", (IDS, torch.ones(5)), {"bags": False, "weighted": True}, "refused", "one weight per id"),
        ("read", (), {"array": "weight", "first_row": 8, "num_rows": 2}, "refused", "not within the store's 9"),
        ("read", (), {"array": "weight", "first_row": -1, "num_rows": 2}, "refused", "not within"),
        ("read", (), {"array": "weight", "first_row": 0, "num_rows": -1}, "refused", "-16 bytes"),
        ("read", (), {"array": "weight", "first_row": 0, "num_rows": 2**60}, "refused", "ask in parts"),
        ("read", (), {"array": "counters", "first_row": 0, "num_rows": 1}, "refused", "got 'counters'"),
        ("set_step", (), {"step": 3}, "refused", "needs a sequence number"),
        ("set_step", (), {"step": -3, "sequence": 1}, "refused", "step must be in"),
        (
            "write",
            (torch.ones(2, 4),),
            {"array": "weight", "first_row": 8, "num_rows": 2, "sequence": 1},
            "refused",
            "not within",
        ),
        (
            "write",
            (torch.ones(2, 3),),
            {"array": "weight", "first_row": 0, "num_rows": 2, "sequence": 1},
            "refused",
            "of shape",
        ),
        ("write", (), {"array": "weight", "first_row": 0, "num_rows": 1, "sequence": 1}, "refused", "write takes one"),
        ("write", (torch.ones(2, 4),), {"array": "weight", "sequence": 1}, "refused", "rows must be torch.int64"),
        ("write", (ONE_ROW[0] + 9, ONE_ROW[1]), {"array": "weight", "sequence": 1}, "refused", "rows must be in"),
        ("write", (ONE_ROW[0], torch.ones(1).long()), {"array": "digest", "sequence": 1}, "refused", "cannot be writ"),
        ("read", (torch.tensor([9]),), {"array": "weight"}, "refused", "rows must be in"),
        ("read", (torch.tensor([1]),) * 2, {"array": "weight"}, "refused", "at most 1 array, got 2"),
        ("apply_row_gradients", ONE_ROW, {"lr": float("nan"), "sequence": 1}, "refused", "finite"),
        ("apply_row_gradients", ONE_ROW, {"lr": float("inf"), "sequence": 1}, "refused", "finite"),
        ("apply_row_gradients", ONE_ROW, {"lr": -1.0, "sequence": 1}, "refused", "at least 0"),
        ("apply_row_gradients", ONE_ROW, {"lr": 1, "sequence": 1}, "refused", "must be float"),
        (
            "apply_row_gradients",
            (ONE_ROW[0], torch.ones(1, 3)),
            {"lr": 1.0, "sequence": 1},
            "refused",
            r"shape \[1, 4\], got float32 \[1, 3\]",
        ),
        (
            "apply_gradients",
            (IDS, GRADS[:1]),
            {"bags": False, "weighted": False, "lr": 1.0, "sequence": 1},
            "refused",
            r"float32 array of shape \[2, 3, 4\]",
        ),
        (
            "write_dense",
            (torch.ones(4),),
            {"store": "center", "array": "values", "sequence": 1},
            "refused",
            r"of shape \[3\], got torch.float32 of shape \[4\]",
        ),
        (
            "elastic_average",
            (torch.ones(4),),
            {"store": "center", "alpha": 0.5, "sequence": 1},
            "refused",
            "has 3 elements, got 4",
        ),
        (
            "elastic_average",
            (torch.ones(3),),
            {"store": "center", "alpha": 1.5, "sequence": 1},
            "refused",
            r"alpha must be in \[0, 1\]",
        ),
        (
            "create_dense_store",
            (torch.ones(3),),
            {"store": "new", "optimizer": {"rule": "Evil"}, "sequence": 1},
            "refused",
            "update rule must be",
        ),
        (
            "create_embedding_store",
            (),
            {"store": "new", "tables": [], "optimizer": {}, "seed": 0, "sequence": 1},
            "refused",
            "at least one table",
        ),
        (
            "create_embedding_store",
            (),
            {
                "store": "new",
                "tables": [layout_to_plain(LAYOUT)[0] | {"num_embeddings": 2**50}],
                "optimizer": optimizer_to_plain(RowSGD()),
                "seed": 0,
                "sequence": 1,
            },
            "failed",
            "OSError.*needs .* bytes",
        ),
        (
            "create_embedding_store",
            (),
            {
                "store": "users",
                "tables": layout_to_plain(LAYOUT),
                "optimizer": optimizer_to_plain(RowSGD()),
                "seed": 0,
                "sequence": 1,
            },
            "refused",
            "with other tables or another rule",
        ),
        ("remove", (), {"store": "nobody", "sequence": 1}, "missing", "nobody"),
    ],
)
def test_request_when_wrong_then_is_refused_counted_and_changes_nothing(
    handler, tmp_path, operation, arrays, fields, status, reason
):
    before = digest(tmp_path)
    reply = ask(handler, operation, *arrays, **{"store": "users"} | fields)
    assert reply.status == status
    assert re.search(reason, reply.value), reply.value
    assert handler.counts.refused == 1
    assert digest(tmp_path) == before
    assert ask(handler, "lookup", torch.tensor([0]), store="users").status == "ok"


def test_client_when_its_id_is_used_then_is_counted(handler):
    assert handler.status()["clients"] == 1
    ask(handler, "hello", client=b"y" * 16)
    assert handler.status()["clients"] == 2
    ask(handler, "goodbye", client=CLIENT)
    assert handler.status()["clients"] == 1
    assert handler.status()["rows"] == 9
