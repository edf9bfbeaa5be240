"""Senders and receivers: whole messages, their counts, and whose a residual is."""

import pytest
import torch

from lightning_recsys.compression import BFloat16, FrameError, Int8, Receiver, Sender, TopK, describe, specs


def batch(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, 12, generator=generator),
        torch.arange(size),
        torch.randn(size, 3, 8, generator=generator),
    ]


@pytest.mark.parametrize("codec", [BFloat16(), Int8()], ids=lambda codec: codec.name)
def test_message_when_of_several_dtypes_then_floats_are_coded_and_the_rest_is_as_it_was(codec):
    sender, receiver = Sender(codec), Receiver(codec)
    tensors = batch(16)
    decoded = receiver.decode(sender.encode(tensors), specs(describe(tensors)))
    assert torch.equal(decoded[1], tensors[1])
    for place in (0, 2):
        torch.testing.assert_close(decoded[place], tensors[place], rtol=0.01, atol=0.02)
    encoded = sum(codec.encoded_bytes(tuple(tensors[i].shape)) for i in (0, 2)) + tensors[1].nbytes
    for traffic in (sender.traffic, receiver.traffic):
        assert (traffic.tensors, traffic.encoded_bytes) == (3, encoded)
        assert traffic.raw_bytes == sum(tensor.nbytes for tensor in tensors)
        assert traffic.cpu_seconds > 0


def test_sender_when_feedback_is_off_then_no_batch_has_anything_of_another():
    gradient, other = batch(10)[0], batch(10, seed=1)[0]
    sender = Sender(TopK(0.1, error_feedback=False))
    sender.encode([other])
    fresh = Sender(TopK(0.1)).encode([gradient])
    assert all(torch.equal(got, want) for got, want in zip(sender.encode([gradient]), fresh, strict=True))


def test_training_when_feedback_is_off_then_each_step_is_of_the_largest_gradients_alone():
    """Half the squared distance to a target; with feedback every element would move, and here the rest waits."""
    codec, target = TopK(0.25, error_feedback=False), batch(4)[0]
    sender, receiver, weight = Sender(codec), Receiver(codec), torch.zeros_like(target)
    for _ in range(20):
        gradient = weight - target
        (sent,) = receiver.decode(sender.encode([gradient]), specs(describe([gradient])))
        places = gradient.flatten().abs().topk(gradient.numel() // 4).indices
        expected = torch.zeros(gradient.numel()).index_copy(0, places, gradient.flatten()[places])
        torch.testing.assert_close(sent.flatten(), expected, rtol=0.01, atol=1e-6)
        weight = weight - 0.5 * sent
    assert (weight - target).abs().max() < 0.2 * target.abs().max()


def test_sender_when_two_nets_send_then_neither_gets_what_the_other_kept_back():
    codec, (gradient, *_) = TopK(0.1), batch(10)
    one, other = Sender(codec), Sender(codec)
    for _ in range(5):
        one.encode([gradient])
    fresh = codec.encode(gradient, torch.zeros_like(gradient))
    assert all(torch.equal(got, want) for got, want in zip(other.encode([gradient]), fresh, strict=True))
    assert not torch.equal(one.encode([gradient])[1], fresh[1])


@pytest.mark.parametrize("forget", [lambda sender: sender.encode(batch(7)[:1]), Sender.forget], ids=["size", "forget"])
def test_sender_when_the_batch_size_changes_then_the_residual_is_dropped(forget):
    codec, (gradient, *_) = TopK(0.1), batch(10)
    sender = Sender(codec)
    sender.encode([gradient])
    forget(sender)
    fresh = codec.encode(gradient, torch.zeros_like(gradient))
    assert all(torch.equal(got, want) for got, want in zip(sender.encode([gradient]), fresh, strict=True))


def test_sender_when_a_message_has_several_gradients_then_each_place_has_its_residual():
    sender, receiver = Sender(TopK(0.25)), Receiver(TopK(0.25))
    first, second = torch.ones(2, 8), torch.full((2, 8), 3.0)
    total = [torch.zeros(2, 8), torch.zeros(2, 8)]
    for _ in range(4):  # of equal elements each is sent once in four
        got = receiver.decode(sender.encode([first, second]), specs(describe([first, second])))
        total = [a + b for a, b in zip(total, got, strict=True)]
    assert total[0].sum() + sum_of_residual(sender, 0) == 4 * first.sum()
    assert total[1].sum() + sum_of_residual(sender, 1) == 4 * second.sum()


def sum_of_residual(sender, place):
    return sender._residuals[place].sum()


def test_receiver_when_the_tensor_wants_a_gradient_then_what_is_sent_has_none():
    tensor = torch.ones(2, 8, requires_grad=True) * 2
    (array,) = Sender(BFloat16()).encode([tensor])
    assert not array.requires_grad


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ([], "are more than 0 arrays"),
        ([torch.zeros(4, 8, dtype=torch.bfloat16), torch.arange(4), torch.arange(4)], "are fewer than 3 arrays"),
        ([torch.zeros(4, 8, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int64)], "travels as it is, got"),
    ],
)
def test_receiver_when_arrays_are_not_those_of_the_tensors_then_it_says_so(arrays, message):
    with pytest.raises(FrameError, match=message):
        Receiver(BFloat16()).decode(arrays, [(torch.float32, (4, 8)), (torch.int64, (4,))])


@pytest.mark.parametrize(
    "described", [None, {}, [1], [["f4"]], [["f9", [1]]], [["f4", [-1]]], [["f4", [2**40]]], [["f4", "ab"]], [[1, [2]]]]
)
def test_specs_when_they_are_none_then_they_are_refused(described):
    with pytest.raises(FrameError):
        specs(described)


def test_describe_when_a_dtype_cannot_travel_then_it_says_so():
    with pytest.raises(ValueError, match=r"torch.float8_e5m2 cannot be sent"):
        describe([torch.zeros(1, dtype=torch.float8_e5m2)])
