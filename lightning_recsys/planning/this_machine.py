"""``lightning-recsys machine``: this machine's own entry of a file of machines, measured in some seconds."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import zmq

from lightning_recsys.compression import make_codec
from lightning_recsys.placement.machine_kinds import GIB
from lightning_recsys.runtime import configure_worker

SIDE = 1024  # of the square matrices that are multiplied
ROWS, WIDTH, PICKED = 1 << 22, 16, 1 << 20  # 256 MiB of rows, more than caches hold
MESSAGE = 1 << 20


def float32_gflops(seconds: float = 0.5) -> float:
    """10^9 floating-point operations a second of one thread in products of float32."""
    return _product_gflops(torch.float32, seconds)


def describe(seconds: float = 1.0) -> dict[str, float]:
    """The parts of this machine, and the work of one of its threads in a second.

    Args:
        seconds: Of each of the five measurements.

    Returns:
        ``cores``, ``memory_gib``, ``port_gbit`` where the system tells it, ``gflops`` and ``gflops_bfloat16`` of
        products, ``rows_gb_s`` of random rows of 64 bytes that are read, ``encrypted_mb_s`` of requests, each byte of
        which is encrypted and decrypted here, ``bfloat16_mb_s`` and ``int8_mb_s`` of tensors that are encoded.
    """
    configure_worker()
    found = {"cores": float(os.cpu_count() or 1), "memory_gib": _memory() / GIB}
    if (port := _port_gbit()) is not None:
        found["port_gbit"] = port
    return found | {
        "gflops": float32_gflops(seconds),
        "gflops_bfloat16": _product_gflops(torch.bfloat16, seconds),
        "rows_gb_s": _rows_bytes(seconds) / 1e9,
        "encrypted_mb_s": _encrypted_bytes(seconds) / 1e6,
        **{
            f"{kind}_mb_s": _coded_bytes(name, seconds) / 1e6 for kind, name in (("bfloat16", "bf16"), ("int8", "int8"))
        },
    }


def main(arguments: list[str] | None = None) -> int:
    """Print this machine's entry as YAML."""
    parser = argparse.ArgumentParser(
        prog="lightning-recsys machine",
        description="Measure this machine for some seconds, and print its entry of a file of machines for"
        " `lightning-recsys plan`. Run it while nothing else runs.",
    )
    parser.add_argument("--name", default=platform.node() or "machine", help="name of its kind")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    chosen = parser.parse_args(arguments)
    if not 0 < chosen.seconds <= 10:
        parser.error(f"--seconds must be above 0 and at most 10, got {chosen.seconds:g}.")
    sys.stdout.write(entry(chosen.name, describe(chosen.seconds)))
    return 0


def entry(name: str, found: dict[str, float]) -> str:
    """An entry of a file of machines; figures that a plan does not read are comments."""
    port = found.get("port_gbit")
    lines = [
        f"{name}:",
        "  number: 1            # how many there are",
        f"  cores: {found['cores']:.0f}",
        f"  memory_gib: {found['memory_gib']:.1f}",
        f"  port_gbit: {port:g}" if port is not None else "  port_gbit: 10        # not told by the system: change it",
        "  price: 0             # of an hour, for metric=cost",
        f"  gflops: {found['gflops']:.1f}         # of a core, products of float32",
        f"  # products of bfloat16: {found['gflops_bfloat16']:.1f} GFLOP/s of a core",
        f"  # random rows of 64 bytes: {found['rows_gb_s']:.2f} GB/s of a core",
        f"  # encrypted and decrypted: {found['encrypted_mb_s']:.0f} MB/s",
        f"  # encoded as bfloat16: {found['bfloat16_mb_s']:.0f} MB/s, as int8: {found['int8_mb_s']:.0f} MB/s",
    ]
    return "\n".join(lines) + "\n"


def _rate(work: Callable[[], float], seconds: float) -> float:
    """Units a second: the best of the repetitions that fit, so that what else runs counts little."""
    work()
    best, until = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        units = work()
        best = max(best, units / (time.perf_counter() - began))
    return best


def _product_gflops(dtype: torch.dtype, seconds: float) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        left, right = (torch.rand(SIDE, SIDE).to(dtype) for _ in range(2))

        def multiply() -> float:
            left @ right
            return 2.0 * SIDE**3

        return _rate(multiply, seconds) / 1e9
    finally:
        torch.set_num_threads(threads)


def _rows_bytes(seconds: float) -> float:
    rows = torch.zeros(ROWS, WIDTH)
    picked = torch.randint(0, ROWS, (PICKED,))
    out = torch.empty(PICKED, WIDTH)

    def read() -> float:
        torch.index_select(rows, 0, picked, out=out)
        return 4.0 * WIDTH * PICKED

    return _rate(read, seconds)


def _encrypted_bytes(seconds: float) -> float:
    """Bytes from one socket of this process to another, with the keys that clients of servers have."""
    public, secret = zmq.curve_keypair()
    content = bytes(MESSAGE)
    with zmq.Context() as context, context.socket(zmq.PULL) as end, context.socket(zmq.PUSH) as begin:
        end.curve_secretkey, end.curve_publickey, end.curve_server = secret, public, True
        begin.curve_serverkey = public
        begin.curve_publickey, begin.curve_secretkey = zmq.curve_keypair()
        begin.setsockopt(zmq.LINGER, 0)
        begin.connect(f"tcp://127.0.0.1:{end.bind_to_random_port('tcp://127.0.0.1')}")

        def send() -> float:
            for _ in range(8):
                begin.send(content)
            for _ in range(8):
                end.recv()
            return 8.0 * MESSAGE

        return _rate(send, seconds)


def _coded_bytes(name: str, seconds: float) -> float:
    codec, tensor = make_codec(name, "activations"), torch.rand(8192, 1024)

    def encode() -> float:
        codec.encode(tensor)
        return 4.0 * tensor.numel()

    return _rate(encode, seconds)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _port_gbit() -> float | None:
    """The fastest port that is up and tells its speed, in 10^9 bits a second."""
    speeds: list[int] = []
    interfaces: Sequence[Path] = [*Path("/sys/class/net").glob("*/speed")]
    for path in interfaces:
        with suppress(OSError, ValueError):
            speeds.append(int(path.read_text()))
    return max(speeds) / 1000 if speeds and max(speeds) > 0 else None


if __name__ == "__main__":
    sys.exit(main())
