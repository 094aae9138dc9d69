"""Work between steps: its share of the time, its order, its end; and graphs as such work."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from lm_engine.backlog import FIRST_REST_S, SHARE, Backlog, capture_later
from lm_engine.graphs import stand_in


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1) as threads:
        yield threads


class Time:
    """Seconds that pieces take and that the backlog rests, during which a step comes."""

    def __init__(self, executor, done):
        self.now_s, self.rests, self._executor, self._done = 0.0, [], executor, done

    def clock(self):
        return self.now_s

    def rest(self, closing, seconds):
        self.rests.append(seconds)
        self._executor.submit(self._done.append, "step").result()
        return closing.is_set()


def test_steps_have_nine_tenths_of_the_time_and_go_first(executor):
    done, lengths, threads = [], [0.2, 0.5], set()
    time = Time(executor, done)

    def piece():
        threads.add(threading.current_thread())
        if not lengths:
            return False
        time.now_s += lengths.pop(0)
        done.append("piece")
        return True

    Backlog(executor, piece, rest=time.rest, clock=time.clock).join()
    assert done == ["step", "piece", "step", "piece", "step"]
    assert time.rests == pytest.approx([FIRST_REST_S, 0.2 * (1 / SHARE - 1), 0.5 * (1 / SHARE - 1)])
    assert threads == {executor.submit(threading.current_thread).result()}


def test_closed_while_it_rests_it_begins_nothing(executor):
    begun = []
    backlog = Backlog(executor, lambda: begun.append(1), rest=lambda closing, _: closing.wait())
    backlog.close()
    backlog.close()
    assert not begun


def test_a_piece_that_fails_is_the_last_and_spoils_no_step(executor, caplog):
    tried = []

    def fail():
        tried.append(1)
        raise RuntimeError("no memory for a graph")

    Backlog(executor, fail, rest=lambda closing, _: closing.is_set()).join()
    assert tried == [1]
    assert "no memory for a graph" in caplog.text
    assert executor.submit(lambda: "a step").result() == "a step"


class Kind:
    def __init__(self, name, sizes, captured):
        self._name, self._sizes, self._captured = name, list(sizes), captured

    def capture_next(self):
        if self._sizes:
            self._captured.append((self._name, self._sizes.pop()))
            return True
        return False


def test_the_largest_of_each_kind_is_captured_at_once_and_the_others_later(executor, monkeypatch, caplog):
    monkeypatch.setattr("lm_engine.backlog.FIRST_REST_S", threading.TIMEOUT_MAX)
    captured = []
    kinds = [Kind("decode", (1, 2, 4), captured), Kind("pass", (16, 32), captured)]
    resting = capture_later(executor, *kinds)
    assert captured == [("decode", 4), ("pass", 32)]
    resting.close()
    monkeypatch.setattr("lm_engine.backlog.FIRST_REST_S", 0.0)
    monkeypatch.setattr("lm_engine.backlog.SHARE", 1.0)
    captured.clear()
    kinds = [Kind("decode", (1, 2, 4), captured), Kind("pass", (16, 32), captured)]
    with caplog.at_level(logging.INFO):
        capture_later(executor, *kinds).join()
    assert captured[2:] == [("decode", 2), ("decode", 1), ("pass", 16)]
    assert "all graphs are captured" in caplog.text
    assert capture_later(executor, None, None) is None


@pytest.mark.parametrize(
    ("size", "captured", "expected"),
    [(2, (), 2), (2, (8, 4), 4), (2, (8, 2), 2), (4, (2, 1), 4), (4, (8,), 8)],
)
def test_what_is_not_captured_yet_runs_as_the_next_larger(size, captured, expected):
    assert stand_in(size, captured) == expected
