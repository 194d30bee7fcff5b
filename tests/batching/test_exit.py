"""The interpreter can always exit: each test runs a script and looks at how it ends.

Another interpreter may run the scripts, for how threads end differs between versions of Python:
    PYTHONPATH=src RETINUE_EXIT_PYTHON=/path/to/python3.13 python -m pytest tests/batching/test_exit.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass

PYTHON = os.environ.get("RETINUE_EXIT_PYTHON", sys.executable)
LIMIT_S = 20.0

PRELUDE = """
import asyncio, gc, os, signal, sys, threading, time, warnings
from retinue.batching import ThreadedMicroBatcher, exit_hook
from retinue.batching.actor import Actor
from retinue.batching.planner import Limits

warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it

def say(*words):
    print(*words, flush=True)

def on_start():
    global owner
    owner = threading.get_ident()

def on_stop():
    say("stopped" if threading.get_ident() == owner else "stopped on another thread")

def fn(items):
    return items

inside = threading.Semaphore(0)  # one for each call

def slow(items):
    say("inside")
    inside.release()
    time.sleep(1)
    say("outside")
    return items

def stuck(items):
    say("inside")
    inside.release()
    threading.Event().wait()

def batcher_of(fn, **options):
    return ThreadedMicroBatcher(fn, on_start=on_start, on_stop=on_stop, name="eyes", **options)
"""


@dataclass(frozen=True)
class Ending:
    code: int
    said: list[str]
    errors: str
    took_s: float  #: since the script said its first word


def run(script: str, *, interrupt_at: str | None = None) -> Ending:
    """Run ``script`` after the prelude; with ``interrupt_at``, press Ctrl-C when it says that."""
    said: list[str] = []
    with tempfile.TemporaryFile("w+") as errors:
        command = [PYTHON, "-c", PRELUDE + script]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            too_long = threading.Timer(LIMIT_S, process.kill)
            too_long.start()
            began_s = time.monotonic()
            assert process.stdout is not None
            for line in process.stdout:
                if not said:
                    began_s = time.monotonic()
                said.append(line.rstrip())
                if said[-1] == interrupt_at:
                    process.send_signal(signal.SIGINT)
            process.wait()
            took_s = time.monotonic() - began_s
            too_long.cancel()
        errors.seek(0)
        return Ending(process.returncode, said, errors.read(), took_s)


def is_the_scripts_own(errors: str, last_line: str) -> bool:
    """Whether ``errors`` is the traceback of one exception, with nothing of a teardown or of a thread."""
    return errors.splitlines()[-1] == last_line and not any(
        line.startswith(("Exception ignored", "Exception in", "eyes")) for line in errors.splitlines()
    )


def test_a_script_that_forgets_to_shut_down_exits() -> None:
    ending = run("""
batcher = batcher_of(fn)
batcher.start()
say(asyncio.run(batcher.submit([1])))
""")
    assert (ending.code, ending.said, ending.errors) == (0, ["[1]", "stopped"], "")


def test_a_script_whose_batcher_was_collected_exits() -> None:
    ending = run("""
def forget():
    batcher = batcher_of(fn)
    batcher.start()
    say(asyncio.run(batcher.submit([1])))

forget()
gc.collect()
""")
    assert (ending.code, ending.said, ending.errors) == (0, ["[1]", "stopped"], "")


def test_a_script_that_raises_exits_with_its_own_traceback_alone() -> None:
    ending = run("""
batcher = batcher_of(fn)
batcher.start()
raise KeyError("main")
""")
    assert (ending.code, ending.said) == (1, ["stopped"])
    assert is_the_scripts_own(ending.errors, "KeyError: 'main'")


def test_sys_exit_inside_the_loop_keeps_its_code() -> None:
    ending = run("""
async def main():
    batcher = batcher_of(fn)
    await batcher.astart()
    await batcher.submit([1])
    sys.exit(3)

asyncio.run(main())
""")
    assert (ending.code, ending.said, ending.errors) == (3, ["stopped"], "")


def test_what_waits_at_the_exit_does_not_delay_it() -> None:
    ending = run("""
async def main():
    batcher = batcher_of(slow, max_batch_items=1)
    await batcher.astart()
    tasks = [asyncio.ensure_future(batcher.submit([number])) for number in range(100)]
    await asyncio.to_thread(inside.acquire)
    sys.exit(3)

asyncio.run(main())
""")
    assert (ending.code, ending.said, ending.errors) == (3, ["inside", "outside", "stopped"], "")


def test_an_interrupt_during_a_forward_lets_it_finish_and_exits() -> None:
    ending = run(
        """
batcher = batcher_of(slow)
batcher.start()
asyncio.run(batcher.submit([1]))
""",
        interrupt_at="inside",
    )
    assert (ending.code, ending.said) == (-signal.SIGINT, ["inside", "outside", "stopped"])
    assert is_the_scripts_own(ending.errors, "KeyboardInterrupt")


def test_an_interrupt_during_a_forward_leaves_the_context_manager_in_order() -> None:
    ending = run(
        """
async def main():
    async with batcher_of(slow) as batcher:
        await batcher.submit([1])

asyncio.run(main())
""",
        interrupt_at="inside",
    )
    assert (ending.code, ending.said) == (-signal.SIGINT, ["inside", "outside", "stopped"])
    assert is_the_scripts_own(ending.errors, "KeyboardInterrupt")


def test_an_interrupt_during_a_slow_start_stops_what_was_started_and_exits() -> None:
    ending = run(
        """
def slow_start():
    on_start()
    say("starting")
    time.sleep(1)
    say("started")

ThreadedMicroBatcher(fn, on_start=slow_start, on_stop=on_stop).start()
""",
        interrupt_at="starting",
    )
    assert (ending.code, ending.said) == (-signal.SIGINT, ["starting", "started", "stopped"])
    assert is_the_scripts_own(ending.errors, "KeyboardInterrupt")


def test_an_interrupt_during_a_slow_astart_stops_what_was_started_and_exits() -> None:
    ending = run(
        """
def slow_start():
    on_start()
    say("starting")
    time.sleep(1)
    say("started")

asyncio.run(ThreadedMicroBatcher(fn, on_start=slow_start, on_stop=on_stop).astart())
""",
        interrupt_at="starting",
    )
    assert (ending.code, ending.said) == (-signal.SIGINT, ["starting", "started", "stopped"])
    assert is_the_scripts_own(ending.errors, "KeyboardInterrupt")


def test_a_forward_that_is_stuck_for_ever_is_left_after_the_grace_with_one_log_line() -> None:
    ending = run("""
async def main():
    batcher = batcher_of(stuck, join_timeout_s=0.5)
    await batcher.astart()
    task = asyncio.ensure_future(batcher.submit([1]))
    await asyncio.to_thread(inside.acquire)
    task.cancel()

asyncio.run(main())
""")
    assert (ending.code, ending.said) == (0, ["inside"])
    assert ending.errors == "eyes: a call still runs 0.5 s after the exit began; leaving it\n"
    assert ending.took_s >= 0.5


def test_a_stuck_forward_that_was_shut_down_without_success_is_left_too() -> None:
    ending = run("""
async def main():
    async with batcher_of(stuck, join_timeout_s=0.2) as batcher:
        task = asyncio.ensure_future(batcher.submit([1]))
        await asyncio.to_thread(inside.acquire)
        sys.exit(3)

asyncio.run(main())
""")
    assert (ending.code, ending.said) == (3, ["inside"])
    assert ending.errors.splitlines() == [
        "eyes: a call still runs 0.2 s after shutdown began (join_timeout_s); leaving it",
        "eyes: a call still runs 0.2 s after the exit began; leaving it",
    ]


def test_several_stuck_forwards_share_the_grace() -> None:
    ending = run("""
def start_one():
    batcher = batcher_of(stuck, join_timeout_s=1)
    batcher.start()
    threading.Thread(target=lambda: asyncio.run(batcher.submit([1])), daemon=True).start()

for _ in range(5):
    start_one()
    inside.acquire()
""")
    assert ending.code == 0
    assert ending.errors.count("leaving it") == 5
    assert 1 <= ending.took_s < 4


def test_leaving_one_thread_behind_does_not_cut_off_the_others() -> None:
    ending = run("""
def other():
    time.sleep(1)
    say("other done")

batcher = batcher_of(stuck, join_timeout_s=0.1)
batcher.start()
threading.Thread(target=lambda: asyncio.run(batcher.submit([1])), daemon=True).start()
inside.acquire()
threading.Thread(target=other).start()
""")
    assert (ending.code, ending.said) == (0, ["inside", "other done"])
    assert ending.errors == "eyes: a call still runs 0.1 s after the exit began; leaving it\n"


def test_once_the_exit_began_a_start_and_a_submit_are_refused() -> None:
    ending = run("""
exiting = threading.Event()
batcher = ThreadedMicroBatcher(fn, on_stop=exiting.set)
batcher.start()

def late():
    exiting.wait()
    new = batcher_of(fn)
    for attempt in (lambda: asyncio.run(batcher.submit([1])), new.start, new.shutdown):
        try:
            attempt()
        except RuntimeError as error:
            say(type(error).__name__, error)

threading.Thread(target=late).start()
""")
    assert (ending.code, ending.errors) == (0, "")
    assert ending.said == [
        "EncoderUnavailable submit() after shutdown()",
        "RuntimeError eyes cannot start: the interpreter is exiting",
    ]


def test_a_forked_child_knows_that_nobody_serves_it_and_exits_at_once() -> None:
    ending = run("""
batcher = batcher_of(fn, join_timeout_s=15)
batcher.start()
if child := os.fork():
    _, status = os.waitpid(child, 0)
    say("child ended", status)
    say(asyncio.run(batcher.submit([1])))
else:
    say("child")
    try:
        asyncio.run(batcher.submit([1]))
    except RuntimeError as error:
        say(type(error).__name__)
    batcher.shutdown()
    asyncio.run(batcher.aclose())
    own = batcher_of(fn)
    own.start()
    say(asyncio.run(own.submit([2])))
""")
    assert (ending.code, ending.errors) == (0, "")
    assert ending.said == ["child", "EncoderUnavailable", "[2]", "stopped", "child ended 0", "[1]", "stopped"]
    assert ending.took_s < 10


def test_a_worker_process_forked_by_multiprocessing_ends_at_once() -> None:
    ending = run("""
import multiprocessing

batcher = batcher_of(fn, join_timeout_s=15)
batcher.start()
worker = multiprocessing.get_context("fork").Process(target=say, args=("child",))
worker.start()
worker.join()
say("child ended", worker.exitcode)
""")
    assert (ending.code, ending.errors) == (0, "")
    assert ending.said == ["child", "child ended 0", "stopped"]
    assert ending.took_s < 10


def test_a_child_forked_while_another_thread_holds_the_lock_is_not_stuck() -> None:
    ending = run("""
holding, let_go = threading.Event(), threading.Event()

class Watch:
    def on_batch(self, record): pass
    def on_request(self, record): pass

def clock():  # the queue's lock is held while a request is dated
    if threading.current_thread() is other:
        holding.set()
        let_go.wait()
    return time.monotonic()

actor = Actor(fn, Limits(), observer=Watch(), clock=clock)
actor.begin()
thread = threading.Thread(target=actor.run)
exit_hook.register(thread, actor, grace_s=15)
thread.start()
actor.started.result()
loop = asyncio.new_event_loop()
other = threading.Thread(target=actor.enqueue, args=(loop, [1]))
other.start()
holding.wait()
if child := os.fork():
    os.waitpid(child, 0)
    let_go.set()
    other.join()
    say("parent", actor.state.value)
else:
    signal.alarm(5)
    say("child", actor.state.value)
loop.close()
""")
    assert (ending.code, ending.errors) == (0, "")
    assert ending.said == ["child failed", "parent running"]
