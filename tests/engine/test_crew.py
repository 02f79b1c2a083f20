"""Crews: what is put comes to an end, in order, with one thread and none left."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from streamkv.engine.crew import Crew
from streamkv.errors import EngineDeadError, OverloadedError


def held(crew: Crew) -> threading.Event:
    """Keep one of its threads busy until that is set."""
    begun, release = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert release.wait(20)

    crew.put(wait)
    assert begun.wait(20)
    return release


def test_things_are_done_in_order_and_then_no_thread_is_left():
    crew, done = Crew("crew"), []
    release = held(crew)
    futures = [crew.put(lambda i=i: done.append(i) or i) for i in range(50)]
    release.set()
    assert [future.result(20) for future in futures] == list(range(50)) == done
    crew.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "crew"]


def test_there_is_one_thread_and_none_while_nothing_is_to_be_done():
    crew = Crew("crew")
    release = held(crew)
    futures = [crew.put(threading.current_thread) for _ in range(20)]
    release.set()
    (thread,) = {future.result(20) for future in futures}
    thread.join(20)
    assert not thread.is_alive()
    assert crew.put(threading.current_thread).result(20) is not thread
    crew.close()


def test_what_is_given_up_before_its_turn_is_not_begun():
    crew, done = Crew("crew"), []
    release = held(crew)
    first, second = crew.put(lambda: done.append(1)), crew.put(lambda: done.append(2))
    assert first.cancel()
    release.set()
    second.result(20)
    assert done == [2]
    crew.close()


def test_whatever_goes_wrong_is_told_and_the_next_is_done():
    crew = Crew("crew")

    def fail() -> None:
        raise SystemExit("no")

    with pytest.raises(SystemExit):
        crew.put(fail).result(20)
    assert crew.put(lambda: 7).result(20) == 7
    crew.close()


def test_at_the_end_what_waits_fails_and_what_runs_is_waited_for():
    crew = Crew("crew")
    release = held(crew)
    waiting, given_up = crew.put(lambda: 1), crew.put(lambda: 2)
    given_up.cancel()
    closing = threading.Thread(target=crew.close)
    closing.start()
    with pytest.raises(EngineDeadError):
        waiting.result(20)
    with pytest.raises(CancelledError):
        given_up.result(20)
    assert closing.is_alive()
    release.set()
    closing.join(20)
    assert not closing.is_alive()
    with pytest.raises(EngineDeadError):
        crew.put(lambda: 1)


def test_where_no_thread_can_be_started_nothing_stays_behind(monkeypatch):
    crew = Crew("crew")

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("streamkv.engine.threads.EngineThread.start", refuse)
        with pytest.raises(OverloadedError, match="can't start new thread; try again"):
            crew.put(lambda: 1)
    release = held(crew)
    with monkeypatch.context() as patch:
        patch.setattr("streamkv.engine.threads.EngineThread.start", refuse)
        later = crew.put(lambda: 2)  # the one there is does it
    release.set()
    assert later.result(20) == 2
    crew.close()
