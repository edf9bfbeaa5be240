"""The wire: what is encoded comes back; what is not as it should be is refused with a reason, and without a copy."""

import msgpack
import pytest
import torch
import zmq

from lightning_recsys.compression.dtypes import DTYPES
from lightning_recsys.parameter_server.messages.wire import (
    VERSION,
    Limits,
    MessageError,
    Reply,
    Request,
    Status,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    receive_frames,
    send_frames,
)

CLIENT = bytes(range(1, 17))
LIMITS = Limits(header_bytes=4096, message_bytes=1 << 16, rows=100)


def good(**changes):
    fields = {
        "version": VERSION,
        "operation": "lookup",
        "id": 1,
        "client": CLIENT,
        "sequence": 0,
        "store": "users",
        "arguments": {},
        "arrays": [["i8", [3]]],
    }
    return list((fields | changes).values())


def frames_of(header, *arrays):
    return [msgpack.packb(header), *(bytearray(x.numpy().tobytes()) for x in arrays)]


def test_request_when_sent_then_comes_back_with_its_arrays():
    arrays = [torch.arange(6).view(2, 3), torch.rand(4), torch.empty(0, 5)]
    request = Request("apply", 7, CLIENT, 3, "users", {"lr": 0.5, "bags": True}, arrays)
    received = decode_request([bytearray(frame) for frame in encode_request(request)], LIMITS)
    assert (received.operation, received.id, received.client, received.sequence) == ("apply", 7, CLIENT, 3)
    assert (received.store, received.arguments) == ("users", {"lr": 0.5, "bags": True})
    assert all(torch.equal(x, y) for x, y in zip(received.arrays, arrays, strict=True))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_array_when_of_any_dtype_of_the_wire_then_comes_back_with_its_bits(dtype):
    array = (4 * torch.rand(7, 3)).floor().to(dtype)
    frames = encode_reply(Reply(9, Status.OK, None, [array]))
    assert len(frames[1]) == array.nbytes
    (received,) = decode_reply([bytearray(frame) for frame in frames], LIMITS).arrays
    assert received.dtype == dtype
    assert torch.equal(received.view(torch.uint8), array.view(torch.uint8))


def test_truth_values_when_a_stranger_sends_other_bytes_then_they_are_some():
    frames = [msgpack.packb([VERSION, 9, Status.OK, None, [["b1", [3]]]]), bytearray([0, 1, 7])]
    assert decode_reply(frames, LIMITS).arrays[0].view(torch.uint8).tolist() == [0, 1, 1]


def test_reply_when_sent_then_comes_back_with_its_arrays():
    reply = Reply(9, Status.OK, {"rows": 3}, [torch.rand(3, 2)])
    received = decode_reply([bytearray(frame) for frame in encode_reply(reply)], LIMITS)
    assert (received.id, received.status, received.value) == (9, Status.OK, {"rows": 3})
    assert torch.equal(received.arrays[0], reply.arrays[0])


def test_array_when_encoded_and_decoded_then_shares_the_memory_of_its_frame():
    rows = torch.arange(3)
    encoded = encode_request(Request("lookup", 1, CLIENT, arrays=[rows]))
    rows[0] = 41
    frame = bytearray(encoded[1])
    array = decode_request([encoded[0], frame], LIMITS).arrays[0]
    frame[0] = 42
    assert array.tolist() == [42, 1, 2]


def test_array_when_its_frame_is_not_aligned_then_is_right_and_aligned():
    memory = memoryview(bytearray(3 * 8 + 1))[1:]
    memory[:] = torch.tensor([5, 6, 7]).numpy().tobytes()
    array = decode_request([msgpack.packb(good()), memory], LIMITS).arrays[0]
    assert array.tolist() == [5, 6, 7]
    assert array.data_ptr() % 8 == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"version": VERSION - 1},
            rf"{VERSION}, and the client's start with \[{VERSION - 1}\]: install the same",
        ),
        ({"version": True}, "install the same version"),
        ({"more": 1}, "8 fields"),
        ({"operation": 5}, "operation must be a short string"),
        ({"operation": "x" * 65}, "operation must be a short string"),
        ({"id": 0}, "id must be a positive integer"),
        ({"id": -1}, "id must be a positive integer"),
        ({"id": True}, "id must be a positive integer"),
        ({"id": 2**62 + 1}, "id must be a positive integer"),
        ({"client": b"short"}, "client id must be 16 bytes"),
        ({"client": bytes(16)}, "not all 0"),
        ({"client": "x" * 16}, "client id must be 16 bytes"),
        ({"sequence": -1}, "sequence number must be an integer"),
        ({"sequence": 1.0}, "sequence number must be an integer"),
        ({"store": 3}, "name must be a string"),
        ({"store": "../etc"}, "name must be 1 to 128 letters"),
        ({"store": ".hidden"}, "name must be 1 to 128 letters"),
        ({"store": "x" * 129}, "name must be 1 to 128 letters"),
        ({"arguments": []}, "arguments must be a map"),
        ({"arguments": {b"x": 1}}, "arguments must be a map"),
        ({"arrays": None}, "1 arrays follow the header"),
        ({"arrays": []}, "1 arrays follow the header"),
        ({"arrays": [["i8", [3]], ["i8", [3]]]}, "1 arrays follow the header"),
        ({"arrays": [["i8", [4]]]}, "does not have 24 bytes"),
        ({"arrays": [["i8", [2]]]}, "does not have 24 bytes"),
        ({"arrays": [["i8", [-3]]]}, "list of 1 to 3 sizes"),
        ({"arrays": [["i8", [2**61, 2**61, 2**61]]]}, "does not have 24 bytes"),
        ({"arrays": [["i8", []]]}, "list of 1 to 3 sizes"),
        ({"arrays": [["i8", [3, 1, 1, 1]]]}, "list of 1 to 3 sizes"),
        ({"arrays": [["i8", [3.0]]]}, "list of 1 to 3 sizes"),
        ({"arrays": [["O", [3]]]}, "dtype must be one of"),
        ({"arrays": [[["i8"], [3]]]}, "dtype must be one of"),
        ({"arrays": [["i8"]]}, r"described by \[dtype, shape\]"),
    ],
)
def test_request_when_a_field_is_wrong_then_is_refused_with_the_reason(changes, reason):
    with pytest.raises(MessageError, match=reason):
        decode_request(frames_of(good(**changes), torch.arange(3)), LIMITS)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "at least one frame"),
        ([b""], "not msgpack"),
        ([b"\xc1"], "not msgpack"),
        ([b"\x91" * 2000], "not msgpack"),
        ([msgpack.packb([1]) + b"x"], "not msgpack"),
        ([b"\xdd\xff\xff\xff\xff"], "not msgpack"),
        ([msgpack.packb({"a": 1})], "must be a list"),
        ([msgpack.packb("x" * 5000)], "header has at most 4096 bytes"),
    ],
)
def test_request_when_its_header_is_none_then_is_refused(frames, reason):
    with pytest.raises(MessageError, match=reason) as caught:
        decode_request(frames, LIMITS)
    assert caught.value.request_id == 0


def test_request_when_over_a_limit_then_is_refused_under_its_id():
    large = torch.zeros(1 << 14, dtype=torch.int64)
    with pytest.raises(MessageError, match="at most 65536 bytes, got 131072") as caught:
        decode_request(frames_of(good(id=77, arrays=[["i8", [1 << 14]]]), large), LIMITS)
    assert caught.value.request_id == 77


def test_request_when_of_many_arrays_then_the_size_of_its_header_bounds_their_number():
    one = torch.zeros(1, dtype=torch.int64)
    frames = frames_of(good(arrays=[["i8", [1]]] * 500), *[one] * 500)
    assert len(decode_request(frames, LIMITS).arrays) == 500
    frames = frames_of(good(arrays=[["i8", [1]]] * 1000), *[one] * 1000)
    with pytest.raises(MessageError, match="header has at most 4096 bytes"):
        decode_request(frames, LIMITS)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ([VERSION, 1, "ok", None], "no reply of a server"),
        ([VERSION, -1, "ok", None, []], "no reply of a server"),
        ([VERSION, 1, "yes", None, []], "no reply of a server"),
        ([VERSION + 1, 1, "ok", None, []], rf"{VERSION}, and the server's start with \[{VERSION + 1}\]"),
        ([], "install the same version"),
    ],
)
def test_reply_when_it_is_none_then_is_refused(header, reason):
    with pytest.raises(MessageError, match=reason):
        decode_reply([msgpack.packb(header)], LIMITS)


def test_messages_when_two_wait_then_each_comes_whole_and_alone_and_then_none():
    messages = [[b"a" * 10, b"", b"b" * 1000], [b"c"]]
    with zmq.Context() as context, context.socket(zmq.PAIR) as there, context.socket(zmq.PAIR) as here:
        there.bind("inproc://messages")
        here.connect("inproc://messages")
        for message in messages:
            send_frames(there, message)
        assert [[frame.bytes for frame in receive_frames(here)] for _ in messages] == messages
        with pytest.raises(zmq.Again):
            receive_frames(here)


@pytest.mark.parametrize("before", [0, 1])
def test_message_when_it_has_more_frames_than_its_header_describes_then_few_are_kept_and_it_is_refused(before):
    array = torch.ones(1)
    header, frame = encode_request(Request("pull", 1, bytes(range(16)), arrays=[array]))
    with zmq.Context() as context, context.socket(zmq.PAIR) as there, context.socket(zmq.PAIR) as here:
        there.bind("inproc://messages")
        here.connect("inproc://messages")
        for message in ([header, frame, *[b""] * 100_000], [b""] * 100_000, [header, frame]):
            send_frames(there, [b"sender"] * before + message)
        crowded, empty, good = ([*receive_frames(here, before=before)][before:] for _ in range(3))
        with pytest.raises(zmq.Again):
            receive_frames(here, before=before)
        for frames in (crowded, empty):
            assert len(frames) <= 2 + len(header) // 5
            with pytest.raises(MessageError):
                decode_request(frames, LIMITS)
        assert torch.equal(decode_request(good, LIMITS).arrays[0], array)


def test_header_when_it_describes_as_many_arrays_as_it_can_then_all_of_them_are_received():
    arrays = [torch.ones(1)] * 1000
    with zmq.Context() as context, context.socket(zmq.PAIR) as there, context.socket(zmq.PAIR) as here:
        there.bind("inproc://messages")
        here.connect("inproc://messages")
        send_frames(there, encode_request(Request("p", 1, bytes(range(16)), arrays=arrays)))
        assert len(decode_request(receive_frames(here), Limits()).arrays) == 1000
