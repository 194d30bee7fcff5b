"""Cancelling a piece of work from outside of it, without a task of its own for the work.

``asyncio.timeout`` does this for deadlines, from Python 3.11 on; here any event may be the reason.
"""

from __future__ import annotations

import asyncio

__all__ = ["Interruption"]


class Interruption:
    """``with Interruption() as interruption``: until its end, ``interrupt`` cancels what runs within it.

    That cancellation ends with the ``with``, and ``interrupted`` tells of it; any other passes through. What
    runs within must be one task's, and ``interrupt`` is called on its event loop.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._task: asyncio.Task[object] | None = None

    def interrupt(self, *_: object) -> None:
        """Cancel what runs within; the second time, or after its end, nothing happens."""
        if self._task is not None and not self.interrupted:
            self.interrupted = True
            self._task.cancel()

    def __enter__(self) -> Interruption:
        self._task = asyncio.current_task()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        task, self._task = self._task, None
        if not self.interrupted or task is None:
            return False
        # Before 3.11 a task does not count who cancelled it: then the interruption is what is believed.
        others = task.uncancel() if hasattr(task, "uncancel") else 0
        return kind is asyncio.CancelledError and not others
