"""Codecs: bounds of errors, bytes, error feedback, and arrays that no encoder has written."""

import numpy as np
import pytest
import torch

from lightning_recsys.compression import (
    BFloat16,
    Compression,
    FrameError,
    Int8,
    TopK,
    Uncompressed,
    make_codec,
)

CODECS = [Uncompressed(), BFloat16(), Int8(), TopK(0.1)]
SHAPES = [(64, 33), (7,), (3, 5, 17), (4, 2), (0, 8), (1, 1)]


def values(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** torch.empty(shape).uniform_(-3, 3, generator=generator)


def roundtrip(codec, tensor):
    return codec.decode(codec.encode(tensor, torch.zeros(tensor.shape)), tuple(tensor.shape))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_encode_when_of_any_shape_then_arrays_follow_the_layout_and_its_bytes(codec, shape):
    arrays = codec.encode(values(shape), torch.zeros(shape))
    assert [(array.dtype, tuple(array.shape)) for array in arrays] == codec.layout(shape)
    assert sum(array.nbytes for array in arrays) == codec.encoded_bytes(shape)
    assert codec.decode(arrays, shape).shape == shape


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_encode_when_the_tensor_is_transposed_then_it_is_as_of_its_copy(codec):
    tensor = values((9, 40)).T
    for got, expected in zip(
        codec.encode(tensor, torch.zeros(40, 9)), codec.encode(tensor.contiguous(), torch.zeros(40, 9)), strict=True
    ):
        assert got.is_contiguous()
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_none_when_decoded_then_bits_are_the_same():
    tensor = values((16, 8))
    assert torch.equal(roundtrip(Uncompressed(), tensor), tensor)


def test_bf16_when_decoded_then_relative_error_is_half_a_unit_and_infinity_stays():
    tensor = values((1000, 10))
    error = (roundtrip(BFloat16(), tensor) - tensor).abs() / tensor.abs()
    assert 2**-10 < error.max() <= 2**-8  # 8 bits of mantissa, one of them implied
    assert roundtrip(BFloat16(), torch.tensor([float("inf")])).item() == float("inf")


def test_int8_when_decoded_then_error_is_half_a_level_of_its_own_row():
    tensor = values((500, 24)) * torch.logspace(-20, 20, 500).unsqueeze(1)
    error = (roundtrip(Int8(), tensor) - tensor).abs()
    half_level = tensor.abs().amax(1, keepdim=True) / 254
    assert (error <= half_level * (1 + 1e-5)).all()
    assert (error.amax(1) > half_level.squeeze(1) / 4).all()  # and not of anything finer


def test_int8_when_rows_are_zero_or_tiny_then_they_are_finite_and_near():
    tensor = torch.tensor([[0.0] * 8, [1e-38] * 8, [3e38] * 8])
    decoded = roundtrip(Int8(), tensor)
    assert torch.equal(decoded[0], tensor[0])
    assert decoded[1].abs().max() < 1e-30
    torch.testing.assert_close(decoded[2], tensor[2])


def test_int8_when_rows_are_narrow_then_they_take_no_more_than_bf16():
    for width in range(1, 10):
        assert Int8().encoded_bytes((32, width)) <= BFloat16().encoded_bytes((32, width))


@pytest.mark.parametrize("codec", [Int8(), TopK()], ids=lambda codec: codec.name)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_encode_when_a_value_is_not_finite_then_it_says_so(codec, bad):
    tensor = values((4, 16))
    tensor[2, 3] = bad
    with pytest.raises(ValueError, match=f"compression={codec.name} holds a value that is not finite"):
        codec.encode(tensor, torch.zeros(4, 16))


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("coarse", [False, True], ids=["distinct", "ties"])
def test_topk_when_encoded_then_the_largest_are_sent_and_the_rest_stays(fraction, coarse):
    tensor = values((37, 29))
    if coarse:
        tensor = tensor.round().clamp(-3, 3)
    residual, kept = torch.zeros(37, 29), int(np.ceil(fraction * tensor.numel()))
    sent = TopK(fraction).decode(TopK(fraction).encode(tensor, residual), (37, 29))
    order = np.argsort(-tensor.abs().flatten().numpy(), kind="stable")[:kept]
    expected = torch.zeros(tensor.numel())
    expected[order.copy()] = tensor.flatten()[order.copy()].to(torch.bfloat16).float()
    assert torch.equal(sent.flatten(), expected)
    assert torch.equal(sent + residual, tensor)  # exact: what rounding took is a float32
    before = tensor.clone()
    alone = TopK(fraction).decode(TopK(fraction).encode(tensor), (37, 29))
    assert torch.equal(alone, sent)
    assert torch.equal(tensor, before)  # what is sent is not taken out of the caller's gradient


def test_topk_when_many_gradients_are_sent_then_their_sum_is_that_of_all_but_the_residual():
    codec, residual = TopK(0.05), torch.zeros(50, 20)
    total, sent = torch.zeros(50, 20, dtype=torch.float64), torch.zeros(50, 20, dtype=torch.float64)
    steady = values((50, 20), seed=100).clamp(-1, 1)
    for step in range(400):
        gradient = steady + 0.1 * torch.randn(50, 20, generator=torch.Generator().manual_seed(step))
        total += gradient
        sent += codec.decode(codec.encode(gradient, residual), (50, 20))
        torch.testing.assert_close(sent + residual, total, rtol=1e-4, atol=1e-3)
    # Without feedback, 19 of 20 elements would never be sent. With it the residual stays that of some 20 gradients.
    assert ((sent - total).norm() / total.norm()).item() < 0.1


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, float("nan")])
def test_topk_when_the_fraction_is_none_then_it_says_what_is_allowed(fraction):
    with pytest.raises(ValueError, match=r"topk's fraction must be in \(0, 1\]"):
        TopK(fraction)


def hostile(codec, shape):
    """Arrays that no encoder writes for this shape, one way after another."""
    good = codec.encode(values(shape), torch.zeros(shape))
    yield "one too few", good[:-1]
    yield "one too many", [*good, good[0]]
    for i, array in enumerate(good):
        yield "shorter", [*good[:i], array.flatten()[:-1], *good[i + 1 :]]
        yield "longer", [*good[:i], torch.cat([array.flatten(), array.flatten()[:1]]), *good[i + 1 :]]
        yield "another dtype", [*good[:i], array.to(torch.float64), *good[i + 1 :]]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_decode_when_arrays_do_not_follow_the_layout_then_they_are_refused(codec):
    for what, arrays in hostile(codec, (16, 24)):
        with pytest.raises(FrameError, match=rf"tensor of shape \[16, 24\] in {codec.name} is"):
            pytest.fail(f"{what}: {codec.decode(arrays, (16, 24))}")


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("shape", [(2**40, 2**20), (-1, 8), (2.0, 4), (True, 4)], ids=str)
def test_decode_when_the_shape_is_not_one_then_nothing_is_allocated(codec, shape):
    with pytest.raises(FrameError, match="a shape has sizes from 0"):
        codec.decode([torch.zeros(1)], shape)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_int8_when_a_scale_is_not_finite_then_it_is_refused(scale):
    levels, scales = Int8().encode(values((4, 16)))
    scales[1] = scale
    with pytest.raises(FrameError, match="scale in int8 must be finite"):
        Int8().decode([levels, scales], (4, 16))


def test_topk_when_bits_do_not_match_the_values_then_they_are_refused():
    bits, sent = TopK(0.1).encode(values((5, 11)), torch.zeros(5, 11))
    more, behind, infinite = bits.clone(), bits.clone(), sent.clone()
    more[:] = 255
    first = int(np.unpackbits(bits.numpy()).argmax())
    behind[first // 8] ^= 128 >> first % 8
    behind[-1] |= 1  # of 56 bits, the tensor has 55
    infinite[0] = float("inf")
    for arrays in ([more, sent], [behind, sent]):
        with pytest.raises(FrameError, match="as many bits among the first 55"):
            TopK(0.1).decode(arrays, (5, 11))
    with pytest.raises(FrameError, match="values of topk must be finite"):
        TopK(0.1).decode([bits, infinite], (5, 11))


def test_decode_when_bytes_are_random_then_it_decodes_or_refuses():
    generator, refused = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        for codec in CODECS:
            arrays = [
                torch.randint(0, 256, (dtype.itemsize * int(np.prod(sizes)),), dtype=torch.uint8, generator=generator)
                .view(dtype)
                .view(sizes)
                for dtype, sizes in codec.layout((6, 9))
            ]
            try:
                assert codec.decode(arrays, (6, 9)).shape == (6, 9)
            except FrameError:
                refused += 1
    assert refused >= 300  # of topk nearly all


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("int8", "strategy.compression=int8 is for activations only, and gradients"),
        ("topk", "strategy.compression=topk is for gradients only, and activations"),
        ({"activations": "topk"}, "topk is for gradients only"),
        ({"gradients": "int8"}, "int8 is for activations only"),
        ("zip", r"must be one of \['none', 'bf16', 'int8'\] for activations, got 'zip'"),
        ({"states": "bf16"}, "the keys activations, gradients, got"),
        ({"rows": "bf16"}, "Embedding rows have strategy.row_compression"),
        (None, "the keys activations, gradients, got"),
    ],
)
def test_compression_when_a_codec_is_not_fit_then_it_is_refused_by_name(option, message):
    with pytest.raises(ValueError, match=message):
        Compression.from_option(option)


def test_compression_when_one_name_is_given_then_it_is_for_both_ways():
    assert Compression.from_option("bf16") == Compression(BFloat16(), BFloat16())
    assert Compression.from_option({"gradients": "topk"}, top_k_fraction=0.5) == Compression(Uncompressed(), TopK(0.5))
    without_feedback = Compression.from_option({"gradients": "topk"}, error_feedback=False)
    assert without_feedback == Compression(Uncompressed(), TopK(0.1, error_feedback=False))
    assert make_codec("int8", "activations") == Int8()
