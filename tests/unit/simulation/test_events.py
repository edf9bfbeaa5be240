"""Virtual time: order of events, meetings, queues."""

from lightning_recsys.simulation.events import Meeting, Signal, Station, VirtualClock


def test_events_of_one_moment_then_come_in_the_order_in_which_they_were_made():
    clock, seen = VirtualClock(), []

    def process(name, wait):
        yield wait
        seen.append((clock.now, name))

    for name, wait in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        clock.start(process(name, wait))
    clock.run()
    assert seen == [(1.0, "first"), (1.0, "second"), (2.0, "late")]


def test_signal_when_fired_then_all_who_wait_go_on_and_others_wait_for_the_next():
    clock, signal, seen = VirtualClock(), Signal(), []

    def waits(name):
        yield signal
        seen.append((clock.now, name))

    def fires():
        yield 3.0
        clock.fire(signal)
        clock.start(waits("too late"))

    for process in (waits("a"), waits("b"), fires()):
        clock.start(process)
    clock.run()
    assert seen == [(3.0, "a"), (3.0, "b")]


def test_meeting_when_all_are_there_then_work_is_done_once_and_who_leaves_is_not_waited_for():
    clock, seen, rounds = VirtualClock(), [], []

    def work():
        yield 10.0
        rounds.append(clock.now)

    meeting = Meeting(clock, 3, work)

    def member(name, pace, times):
        for _ in range(times):
            yield pace
            yield from meeting.wait()
            seen.append((clock.now, name))
        meeting.leave()

    for name, pace, times in (("a", 1.0, 2), ("b", 2.0, 1), ("c", 5.0, 2)):
        clock.start(member(name, pace, times))
    clock.run()
    assert rounds == [15.0, 30.0]  # the second one without b, which has left
    assert seen == [(15.0, "a"), (15.0, "b"), (15.0, "c"), (30.0, "a"), (30.0, "c")]


def test_station_when_requests_come_together_then_they_queue_and_what_takes_no_time_passes():
    clock = VirtualClock()
    station = Station(clock)
    assert [station.serve(2.0), station.serve(1.0), station.serve(0.0)] == [2.0, 3.0, 0.0]
    clock.now = 10.0
    assert station.serve(1.0) == 1.0
    assert station.busy_seconds == 4.0
