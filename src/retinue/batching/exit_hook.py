"""The interpreter can always exit: every live actor is closed before the interpreter joins its thread.

``atexit`` would be too late: it runs after the interpreter has joined all threads that are not daemons, and
ours would never end. ``threading._register_atexit``, which ``concurrent.futures`` uses for the same purpose,
runs before. A thread that is stuck in a call when its grace is over is left behind.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import time
from typing import Any, Protocol

logger = logging.getLogger("retinue")


class _Closable(Protocol):
    stopped: concurrent.futures.Future[None]

    def close(self) -> None: ...
    def lose_thread(self) -> None: ...


_lock = threading.Lock()
_live: dict[threading.Thread, tuple[_Closable, float]] = {}
_left: list[threading.Thread] = []  # stuck, and not waited for
_registered = False
_exiting = False


def register(thread: threading.Thread, actor: _Closable, *, grace_s: float) -> None:
    """Close ``actor`` when the interpreter exits, and wait ``grace_s`` for its ``thread`` to end.

    ``RuntimeError`` once the interpreter exits: nobody would close it any more.
    """
    global _registered
    with _lock:
        if _exiting:
            raise RuntimeError(f"{thread.name} cannot start: the interpreter is exiting")
        first = all(known is not actor for known, _ in _live.values())
        _live[thread] = (actor, grace_s)
        if not _registered:
            threading._register_atexit(_end_all)  # type: ignore[attr-defined]
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=_after_fork)
            _registered = True
    if first:  # an actor that is built again and again registers many threads
        actor.stopped.add_done_callback(lambda _: _forget_all_of(actor))


def forget(thread: threading.Thread) -> None:
    """``thread`` has ended."""
    with _lock:
        _live.pop(thread, None)


def _forget_all_of(actor: _Closable) -> None:
    with _lock:
        for thread in [thread for thread, (known, _) in _live.items() if known is actor]:
            del _live[thread]


def _after_fork() -> None:
    """The child has none of the threads; it must not wait for them when it exits."""
    global _lock
    _lock = threading.Lock()  # a thread that is not here may hold the other
    for actor, _ in list(_live.values()):
        actor.lose_thread()


def _end_all() -> None:
    global _exiting
    with _lock:
        _exiting = True
        live = list(_live.items())
    began_s = time.monotonic()
    for _, (actor, _) in live:
        actor.close()
    for thread, (actor, grace_s) in live:
        remaining_s = max(0.0, began_s + grace_s - time.monotonic())
        if not concurrent.futures.wait([actor.stopped], timeout=remaining_s).done:
            logger.error("%s: a call still runs %g s after the exit began; leaving it", thread.name, grace_s)
            let_go(thread)


def let_go(thread: Any) -> None:
    """Make the interpreter not wait for ``thread``; it has no public way to say so after the start."""
    _left.append(thread)
    if hasattr(threading, "_shutdown_locks"):  # up to Python 3.12: one for each thread to wait for
        with threading._shutdown_locks_lock:  # type: ignore[attr-defined]
            threading._shutdown_locks.discard(thread._tstate_lock)
    elif hasattr(threading, "_thread_shutdown"):  # waits for all of them
        threading._thread_shutdown = _join_the_others
    else:
        os._exit(70)  # EX_SOFTWARE: an exit, where the alternative is none


def _join_the_others() -> None:
    while others := [thread for thread in threading.enumerate() if _is_to_be_joined(thread)]:
        for thread in others:
            thread.join()


def _is_to_be_joined(thread: threading.Thread) -> bool:
    return not thread.daemon and thread is not threading.current_thread() and thread not in _left
