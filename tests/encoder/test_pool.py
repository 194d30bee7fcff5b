"""The preprocessing threads: they end when told, all of them, and outlive every job."""

from __future__ import annotations

import threading
import weakref

import pytest

from retinue import EncoderUnavailable
from retinue.encoder.pool import Pool

from .support import LIMIT_S, live_threads


def test_jobs_run_on_the_pools_threads_first_come_first(name: str) -> None:
    pool = Pool(1, name, grace_s=1.0)
    ran: list[tuple[int, str]] = []
    pool.start()
    for number in range(5):
        pool.submit(lambda number=number: ran.append((number, threading.current_thread().name)))  # type: ignore[misc]  # a default binds the loop's variable
    pool.close()
    pool.stopped.result(LIMIT_S)
    pool.join()
    assert ran == [(number, f"{name}-1") for number in range(5)]
    assert live_threads(name) == []


def test_stopped_settles_with_the_last_thread(name: str) -> None:
    pool = Pool(2, name, grace_s=1.0)
    parked, release = threading.Event(), threading.Event()
    busy: list[threading.Thread] = []

    def park() -> None:
        busy.append(threading.current_thread())
        parked.set()
        release.wait(LIMIT_S)

    pool.start()
    pool.submit(park)
    assert parked.wait(LIMIT_S)
    assert not busy[0].daemon  # those may be torn down in the middle of a call
    pool.close()
    for thread in threading.enumerate():
        if thread.name.startswith(name) and thread not in busy:
            thread.join(LIMIT_S)
    assert live_threads(name) == [busy[0].name]
    assert not pool.stopped.done()
    release.set()
    pool.stopped.result(LIMIT_S)
    pool.join()
    assert live_threads(name) == []


def test_a_job_that_raises_is_logged_and_ends_no_thread(name: str, caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool(1, name, grace_s=1.0)
    ran = threading.Event()

    def fail() -> None:
        raise SystemExit(3)

    pool.start()
    pool.submit(fail)
    pool.submit(ran.set)
    assert ran.wait(LIMIT_S)
    pool.close()
    pool.stopped.result(LIMIT_S)
    pool.join()
    assert caplog.messages == ["a preprocessing job raised"]


def test_an_idle_thread_does_not_keep_its_last_job(name: str) -> None:
    class Job:
        def __call__(self) -> None:
            pass

    pool = Pool(1, name, grace_s=1.0)
    died = threading.Event()
    job = Job()
    weakref.finalize(job, died.set)
    pool.start()
    pool.submit(job)
    del job
    assert died.wait(LIMIT_S)
    pool.close()
    pool.stopped.result(LIMIT_S)
    pool.join()


def test_a_closed_pool_refuses_jobs_and_closes_once(name: str) -> None:
    pool = Pool(2, name, grace_s=1.0)
    pool.start()
    pool.close()
    pool.close()
    with pytest.raises(EncoderUnavailable, match="threads have been ended"):
        pool.submit(print)
    pool.stopped.result(LIMIT_S)
    pool.join()


@pytest.mark.parametrize("obtainable", [0, 1, 2])
def test_if_one_thread_cannot_be_had_none_is_left(
    name: str, obtainable: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def scarce(thread: threading.Thread) -> None:
        if thread.name == f"{name}-{obtainable + 1}":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    pool = Pool(3, name, grace_s=1.0)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        pool.start()
    pool.stopped.result(LIMIT_S)
    pool.join()
    assert live_threads(name) == []


def test_a_pool_knows_its_own_threads(name: str) -> None:
    pool = Pool(1, name, grace_s=1.0)
    answers: list[bool] = []
    pool.start()
    pool.submit(lambda: answers.append(pool.owns_current_thread()))
    pool.close()
    pool.stopped.result(LIMIT_S)
    assert answers == [True]
    assert not pool.owns_current_thread()
    pool.join()
