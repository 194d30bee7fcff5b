"""An event loop whose clock a test puts forward, so that no test waits for a time limit to pass."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

__all__ = ["Clock", "forward", "later", "on_a_clock"]

P = ParamSpec("P")
T = TypeVar("T")


class Clock(asyncio.SelectorEventLoop):
    """Its time is the system's, and what was put forward."""

    forward_s = 0.0

    def time(self) -> float:
        """In seconds."""
        return super().time() + self.forward_s


def on_a_clock(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test on a ``Clock``."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        clock = Clock()
        try:
            clock.run_until_complete(test(*args, **kwargs))
            clock.run_until_complete(clock.shutdown_default_executor())
        finally:
            clock.close()

    return run


def forward(seconds: float) -> None:
    """Put the running loop's clock forward."""
    clock = asyncio.get_running_loop()
    assert isinstance(clock, Clock)
    clock.forward_s += seconds


async def later(work: Awaitable[T], most_s: float) -> T:
    """The result of ``work``, while time flies; it must be there before ``most_s`` seconds have flown by.

    A second goes by only after some turns of the loop, for what is on its way through a socket to arrive.
    """
    result = asyncio.ensure_future(work)
    for turn in range(20 * round(most_s)):
        if result.done():
            break
        if turn % 20 == 0:
            forward(1.0)
        await asyncio.sleep(0)
    else:
        result.cancel()
        raise AssertionError(f"not there after {most_s:g} s")
    return await result
