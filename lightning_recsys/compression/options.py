"""From an option of a strategy to codecs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_recsys.compression.bfloat16 import BFloat16
from lightning_recsys.compression.codec import Carries, Codec
from lightning_recsys.compression.int8 import Int8
from lightning_recsys.compression.top_k import TopK
from lightning_recsys.compression.uncompressed import Uncompressed

CODECS: dict[str, type[Codec]] = {kind.name: kind for kind in (Uncompressed, BFloat16, Int8, TopK)}
_KEYS = ("activations", "gradients")


def make_codec(
    name: str,
    carries: Carries,
    *,
    top_k_fraction: float = 0.1,
    error_feedback: bool = True,
    setting: str = "strategy.compression",
) -> Codec:
    """The codec of a name, for what it is to carry.

    Args:
        name: ``none``, ``bf16``, ``int8`` or ``topk``.
        carries: Whether the codec is for activations or for gradients, as not every codec is good for both.
        top_k_fraction: Share of the elements that ``topk`` sends.
        error_feedback: Whether ``topk`` adds what it has not sent to the next gradient.
        setting: What a user calls the option, for messages.

    Raises:
        ValueError: there is no codec of that name, or it is not for this.

    >>> make_codec("int8", "activations")
    Int8()
    """
    kind = CODECS.get(name)
    fit = [other for other, codec in CODECS.items() if carries in codec.carries]
    if kind is None:
        raise ValueError(f"{setting} must be one of {fit} for {carries}, got {name!r}.")
    if carries not in kind.carries:
        each = (
            ""
            if carries == "rows"
            else f"; give each its own, such as {setting}={{activations: int8, gradients: bf16}}"
        )
        raise ValueError(
            f"{setting}={name} is for {' and '.join(kind.carries)} only, and {carries} were to be sent with it."
            f" Allowed for {carries} are {fit}{each}."
        )
    return TopK(top_k_fraction, error_feedback) if kind is TopK else kind()


@dataclass(frozen=True)
class Compression:
    """The codecs by which tensors travel between operators.

    Args:
        activations: Codec of what goes forward.
        gradients: Codec of what comes back.
    """

    activations: Codec
    gradients: Codec

    @classmethod
    def from_option(
        cls, option: str | Mapping[str, str], *, top_k_fraction: float = 0.1, error_feedback: bool = True
    ) -> Compression:
        """From a name for all, or a name for each.

        Args:
            option: ``none`` or ``bf16``; or a mapping with ``activations`` (none, bf16, int8) and ``gradients`` (none,
                bf16, topk), of which one that is missing is ``none``.
            top_k_fraction: As in :func:`make_codec`.
            error_feedback: As in :func:`make_codec`.

        Raises:
            ValueError: the option is none of these names, or a codec is not fit for what it is to carry.

        >>> Compression.from_option({"activations": "int8", "gradients": "bf16"})
        Compression(activations=Int8(), gradients=BFloat16())
        """
        if isinstance(option, str):
            option = dict.fromkeys(_KEYS, option)
        if not isinstance(option, Mapping) or not option.keys() <= set(_KEYS):
            raise ValueError(
                f"strategy.compression must be a codec's name or a mapping with the keys {', '.join(_KEYS)}, got"
                f" {option!r}. Embedding rows have strategy.row_compression."
            )
        names = {**dict.fromkeys(_KEYS, "none"), **option}
        return cls(
            make_codec(names["activations"], "activations"),
            make_codec(names["gradients"], "gradients", top_k_fraction=top_k_fraction, error_feedback=error_feedback),
        )
