"""Why DES is faster than servers: what the link takes of a step, and what servers and encryption take of processors.

Both hosts of the suite share one machine's processors. A variant with servers runs twice as many processes on them as
one without, and encrypts what it sends. Clusters with processors to spare would not see that time, so it is counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import zmq
from benchmarks.harness.report import Columns
from benchmarks.suites.des.prediction import DES, PS

PAPER = {"LR": 1.55, "W&D": 4.52, "DeepFM": 3.91}  # DES over servers, Rong et al. 2019, Table 5
_MESSAGE_BYTES = 1 << 20
_MESSAGES = 100
_ROUNDS = 3


@dataclass(frozen=True)
class Share:
    """Where the milliseconds of a step over servers go, on one host.

    Args:
        workload: Model and rows.
        steps: DES and PS -> milliseconds of a step, measured.
        link: DES and PS -> milliseconds of a step that the link takes, by the cost model.
        servers: Milliseconds of processor time that the host's server takes in a step, its encryption included.
        encryption: Milliseconds of processor time that the host's worker takes in a step to encrypt and decrypt.
        paper: DES over servers as the paper has it; ``None`` where it has no such rows.
    """

    workload: str
    steps: Mapping[str, float]
    link: Mapping[str, float]
    servers: float
    encryption: float
    paper: float | None

    def ratios(self) -> dict[str, float]:
        """DES over PS, in examples per second.

        ``measured``; ``link alone``, if a step over servers were one of DES with other bytes on the link; and ``without
        servers' time``, if servers and encryption had processors of their own, of which the step waited for nothing.
        """
        des, servers = (self.steps[name] for name in (DES, PS))
        return {
            "measured": servers / des,
            "link alone": (des - self.link[DES] + self.link[PS]) / des,
            "without servers' time": (servers - self.servers - self.encryption) / des,
        }


def table_of_shares(shares: Sequence[Share]) -> Columns:
    """Milliseconds of a step over servers, and what ratio is left of what was measured."""
    lines, details = [], {}
    for share in shares:
        ratios = share.ratios()
        numbers = (f"{number:.1f}" for number in (share.steps[PS], share.servers, share.encryption))
        paper = "" if share.paper is None else f"{share.paper:.2f}"
        lines.append([share.workload, *numbers, *(f"{ratio:.2f}" for ratio in ratios.values()), paper])
        details[share.workload] = {**asdict(share), "ratios": ratios}
    title = "ms of a step over servers, of it processor time of servers and of encryption in workers"
    times = ("step", "servers", "encryption")
    header = ("", *times, "DES / PS", "by the link alone", "without servers and encryption", "the paper's")
    return Columns(title, header, lines, {"processors": details})


def encryption_seconds() -> float:
    """Processor time to encrypt and decrypt a byte with CURVE, both together: what ZeroMQ takes more than without."""
    rounds = [(_transfer_seconds(encrypted=True), _transfer_seconds(encrypted=False)) for _ in range(_ROUNDS)]
    encrypted, plain = (min(times) for times in zip(*rounds, strict=True))
    return max(0.0, encrypted - plain) / (_MESSAGES * _MESSAGE_BYTES)


def _transfer_seconds(*, encrypted: bool) -> float:
    """Processor time of this process for messages from one socket of its own to another."""
    message = bytes(_MESSAGE_BYTES)
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver, context.socket(zmq.PUSH) as sender:
        sender.linger = 0
        if encrypted:
            sender.curve_serverkey, receiver.curve_secretkey = zmq.curve_keypair()
            sender.curve_publickey, sender.curve_secretkey = zmq.curve_keypair()
            receiver.curve_server = True
        port = receiver.bind_to_random_port("tcp://127.0.0.1")
        sender.connect(f"tcp://127.0.0.1:{port}")
        began = time.process_time()
        for _ in range(_MESSAGES):
            sender.send(message)
            receiver.recv(copy=False)
        return time.process_time() - began
