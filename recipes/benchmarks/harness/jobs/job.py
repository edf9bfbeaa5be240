"""Trainings in processes of their own, measured in turns: between its turns a job is stopped whole, by signals.

So variants that need several processes, servers and links are compared as others are inside one process
(:mod:`benchmarks.harness.turns`): all of them are up, one at a time runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import numpy as np
from benchmarks.harness import processes

from lightning_recsys.monitoring.processes import descendants, processor_seconds

START_SECONDS = 300.0  # for a job to make its first steps on a busy machine
END_SECONDS = 60.0  # for a job to end when it is asked to


class Job:
    """Some processes that train together, and what they tell. A context manager: none of them is left after it.

    Args:
        name: For errors.
        launchers: What to put before ``-m benchmarks.harness.jobs.training``, for each process to start.
        training: The module whose ``train`` the processes call.
        settings: What that takes, for each process to start.
        folder: An empty folder of the job's own.
        workers: Processes that will train.
        environment: Variables on top of this process's own, for each process to start.
        warm_steps: Steps that each worker makes before the first turn.

    Attributes:
        telemetry: What each worker's strategy told in the end, by rank; known after the job.
    """

    def __init__(
        self,
        name: str,
        launchers: Sequence[Sequence[str]],
        *,
        training: str,
        settings: Sequence[Mapping[str, Any]],
        folder: Path,
        workers: int,
        environment: Sequence[Mapping[str, str]] = ({},),
        warm_steps: int = 5,
    ) -> None:
        self.name = name
        self._warm_steps = warm_steps
        self.folder = folder
        self.workers = workers
        self.telemetry: dict[int, dict[str, float]] = {}
        told = {"folder": str(folder), "asker": os.getpid()}
        self._commands = [
            [*launcher, "-m", "benchmarks.harness.jobs.training", training, json.dumps({**told, **own})]
            for launcher, own in zip(launchers, settings, strict=True)
        ]
        self._environments = [dict(x) for x in environment] * (len(self._commands) // len(environment))
        self._main: list[subprocess.Popen[bytes]] = []
        self._runs: list[tuple[float, float]] = []  # when it ran: its start, then each turn
        self._resumed = 0.0
        # Processor time at both ends of each: of the processes that were started, and of all that those started.
        self._processor: list[tuple[np.ndarray, np.ndarray]] = []
        self._processor_before = np.zeros(2)

    def __enter__(self) -> Job:
        self._resumed = time.monotonic()
        try:
            for i, (command, own) in enumerate(zip(self._commands, self._environments, strict=True)):
                with (self.folder / f"output-{i}").open("wb") as output:
                    process = subprocess.Popen(  # noqa: S603
                        command,
                        env={**processes.environment(), **own},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        process_group=0,  # if we are killed, the system wakes a stopped group and hangs up on it
                    )
                self._main.append(process)
            self._await(
                lambda: min(map(len, self._step_times()), default=0) >= self._warm_steps, START_SECONDS, "train"
            )
        except BaseException:
            self._kill()
            raise
        self.pause()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.resume()
                (self.folder / "stop").touch()
                self._await(lambda: all(process.poll() == 0 for process in self._main), END_SECONDS, "end")
                self._runs.append((self._resumed, time.monotonic()))
                for path in self.folder.glob("telemetry-*.json"):
                    self.telemetry[int(path.stem.partition("-")[2])] = json.loads(path.read_text())
        finally:
            self._kill()

    def pause(self) -> None:
        """Stop all its processes where they are."""
        for pid in descendants(*(process.pid for process in self._main)):
            _signal(pid, signal.SIGSTOP)
        self._runs.append((self._resumed, time.monotonic()))
        self._processor.append((self._processor_before, self._processor_seconds()))

    def resume(self) -> None:
        """Let them go on."""
        self._processor_before = self._processor_seconds()
        self._resumed = time.monotonic()
        for pid in descendants(*(process.pid for process in self._main)):
            _signal(pid, signal.SIGCONT)

    def rates(self, batch_size: int, *, rank: int | None = None) -> list[float]:
        """Examples per second of all workers, or of one, in each turn that counts; after the job.

        The first turn warms up. A step that is under way when a turn begins or ends counts in part.
        """
        times = self._step_times() if rank is None else self._times_in(f"steps-{rank}-*")
        return [rate * batch_size for rate in steps_per_second(times, self._runs)][1:]

    def told_per_step(self, *names: str) -> float:
        """Sum of some numbers of the workers' telemetry, by their steps; after the job."""
        told = sum(telemetry[name] for telemetry in self.telemetry.values() for name in names)
        return told / sum(map(len, self._step_times()))

    def processor_per_step(self) -> tuple[float, float]:
        """Seconds of processor time that a worker's step takes; after the job, medians over the turns that count.

        The first is that of the processes that this job was given to start, the second that of all that those started.
        """
        rates = steps_per_second(self._step_times(), self._runs)[1:]
        turns = self._runs[2:-1]
        steps = np.array([rate * (end - begin) for rate, (begin, end) in zip(rates, turns, strict=True)])
        seconds = np.array([after - before for before, after in self._processor[2:]])
        main, others = np.median(seconds / steps[:, None], axis=0).tolist()
        return main, others

    def _processor_seconds(self) -> np.ndarray:
        main = [process.pid for process in self._main]
        others = descendants(*main)[len(main) :]
        return np.array([sum(map(processor_seconds, pids)) for pids in (main, others)])

    def _step_times(self) -> list[np.ndarray]:
        times = self._times_in("steps-*")
        return times if len(times) == self.workers else []

    def _times_in(self, pattern: str) -> list[np.ndarray]:
        return [np.fromfile(path) for path in self.folder.glob(pattern)]

    def _await(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            failed = any(process.poll() not in (None, 0) for process in self._main)
            if failed or time.monotonic() > deadline:
                how = "failed" if failed else f"did not {what} within {seconds:.0f} s"
                told = "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("output-*")))
                raise RuntimeError(f"job {self.name!r} {how}:\n{told[-8000:]}")
            time.sleep(0.02)

    def _kill(self) -> None:
        """Ask what still runs to end, then end it."""
        mains = [process for process in self._main if process.poll() is None]
        everybody = descendants(*(process.pid for process in mains))
        for pid in everybody:
            _signal(pid, signal.SIGCONT)
        for process in mains:
            process.terminate()
        for process in mains:
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
        for pid in everybody if mains else ():
            _signal(pid, signal.SIGKILL)
        for process in mains:
            process.wait()


def run_in_turns(
    jobs: Mapping[str, Job],
    *,
    rounds: int,
    seconds: float,
    before: Sequence[Callable[[], None]] = (lambda: None,),
) -> None:
    """Let every job run for ``seconds`` in each of ``rounds`` rounds, one at a time, in rotating order.

    A first, uncounted round warms everything up.

    Args:
        jobs: By name.
        rounds: How many rounds are measured, behind the one that is not counted.
        seconds: How long each job runs in each round.
        before: What changes between two measurements of the same jobs; after each of these all rounds are run, the
            uncounted one as well.

    Raises:
        RuntimeError: a job failed; has its output.
    """
    names = list(jobs)
    with ExitStack() as stack:
        for job in jobs.values():
            stack.enter_context(job)
        for change in before:
            change()
            for i in range(rounds + 1):
                for name in names[i % len(names) :] + names[: i % len(names)]:
                    jobs[name].resume()
                    time.sleep(seconds)
                    jobs[name].pause()


@contextmanager
def ran_in_turns(
    jobs: Mapping[str, Mapping[str, Any]], *, rounds: int, seconds: float, **common: Any
) -> Iterator[dict[str, Job]]:
    """The jobs when they have run, while their folders are there.

    Args:
        jobs: Name -> arguments of the :class:`Job`, but for its folder.
        rounds: How many rounds are measured, behind the one that is not counted.
        seconds: How long each job runs in each round.
        common: Further arguments, which are the same for all of them.

    Raises:
        RuntimeError: a job failed; has its output.
    """
    with ExitStack() as stack:
        made = {
            name: Job(name, folder=Path(stack.enter_context(tempfile.TemporaryDirectory())), **common, **own)
            for name, own in jobs.items()
        }
        run_in_turns(made, rounds=rounds, seconds=seconds)
        yield made


def steps_per_second(workers: Sequence[np.ndarray], runs: Sequence[tuple[float, float]]) -> list[float]:
    """Steps of all workers in each turn.

    Args:
        workers: When each worker's steps were done, in seconds.
        runs: When the job ran, begin and end of each stretch: its start, the turns, its end.

    >>> steps_per_second([np.array([1.0, 2.0, 12.0, 13.0, 14.0, 25.0])], [(0, 2), (10, 14), (24, 25)])
    [0.75]
    """
    began, ended = np.array(runs).T
    active = np.concatenate([[0.0], np.cumsum(ended - began)])  # seconds that it ran before each stretch, and in all
    turns = active[1:-1]
    total = np.zeros(len(turns))
    for times in workers:
        clock = np.interp(times, np.ravel(runs), np.repeat(active, 2)[1:-1])
        total += np.interp(turns, clock, np.arange(len(clock)))
    return list((np.diff(total) / np.diff(turns)).tolist())


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Unwind on SIGTERM as on Ctrl-C: else stopped jobs, network namespaces and folders of rows would stay."""

    def leave(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # who ends a group sends it twice
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
