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
import weakref
from typing import Any, Protocol

logger = logging.getLogger("retinue")


class _Closable(Protocol):
    stopped: concurrent.futures.Future[None]

    def close(self) -> None: ...


_lock = threading.Lock()
_live: weakref.WeakKeyDictionary[threading.Thread, tuple[_Closable, float]] = weakref.WeakKeyDictionary()
_registered = False


def register(thread: threading.Thread, actor: _Closable, *, grace_s: float) -> None:
    """Close ``actor`` when the interpreter exits, and wait ``grace_s`` for its ``thread`` to end."""
    global _registered
    with _lock:
        _live[thread] = (actor, grace_s)
        if not _registered:
            threading._register_atexit(_end_all)  # type: ignore[attr-defined]
            _registered = True


def _end_all() -> None:
    with _lock:
        live = list(_live.items())
    began_s = time.monotonic()
    for _, (actor, _) in live:
        actor.close()
    for thread, (actor, grace_s) in live:
        remaining_s = max(0.0, began_s + grace_s - time.monotonic())
        if not concurrent.futures.wait([actor.stopped], timeout=remaining_s).done:
            logger.error("%s: a call still runs %g s after the exit began; leaving it", thread.name, grace_s)
            _let_go(thread)


def _let_go(thread: Any) -> None:
    """Make the interpreter not wait for ``thread``; it has no public way to say so after the start."""
    try:
        if hasattr(thread, "_tstate_lock"):  # up to Python 3.12
            with threading._shutdown_locks_lock:  # type: ignore[attr-defined]
                threading._shutdown_locks.discard(thread._tstate_lock)  # type: ignore[attr-defined]
        else:
            thread._handle._set_done()
    except AttributeError:
        os._exit(70)  # EX_SOFTWARE: an exit, where the alternative is none
