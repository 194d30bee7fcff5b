"""One request whose images may be known already, or on their way for another.

Each image is a job of the pool: look it up, and preprocess it if it must be encoded. ``Flights`` says what
follows, and guards the fields that have no underscore.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

from retinue.batching import ThreadedMicroBatcher
from retinue.batching.outcome import describe, forget_frames
from retinue.batching.planner import Limits
from retinue.encoder.cache import copy_of
from retinue.encoder.flights import Flight, Flights
from retinue.encoder.pool import Pool
from retinue.encoder.preparation import blame, checked
from retinue.errors import EncoderFailed, EncoderUnavailable, RetinueError

__all__ = ["Sharing"]

T = TypeVar("T")

# Up to here copying takes less of an event loop's time than handing it to a thread and back.
_SOON_COPIED_BYTES = 2**16


class Sharing:
    """What ``Preparation`` is, for an encoder with a cache; ``run`` belongs to the caller's event loop."""

    def __init__(
        self,
        flights: Flights,
        cache_key: Callable[[Any], Hashable | None],
        preprocess: Callable[[Any], Any],
        limits: Limits,
        raws: list[Any],
        batcher: ThreadedMicroBatcher[Any, Any],
        pool: Pool,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self.loop.create_future()
        self.batcher = batcher
        self.count = len(raws)
        self.unprepared = self.count  # images that may still be refused
        self.missing = self.count  # images without an artifact
        self.raws = raws  # None where it has been preprocessed for this request
        self.artifacts: list[Any] = [None] * self.count
        self.borrowed: list[int] = []  # the places of those that are others' too, to be copied
        self.flights: set[Flight] = set()  # that it waits for
        self.is_over = False
        self.error: BaseException | None = None
        self._all_flights = flights
        self._cache_key = cache_key
        self._preprocess = preprocess
        self._limits = limits
        self._pool = pool
        self._context: contextvars.Context | None = contextvars.copy_context()  # while it runs

    async def run(self) -> list[Any]:
        """The artifacts, in order; raises the error of the first image that fails."""
        try:
            for place in range(self.count):
                self._submit(place)
            await self.future
        except GeneratorExit:
            self._all_flights.abandon(self)
            raise
        except BaseException:
            self._all_flights.leave(self)
            raise
        finally:
            self._context = None
        error, self.error = self.error, None
        if error is None:
            return await self._own_artifacts()
        try:
            raise error
        finally:
            del error, self  # they would close a cycle with the traceback

    def end(self, error: RetinueError) -> None:
        """Fail with ``error`` unless all images are prepared."""
        self._all_flights.end(self, error)

    def begin_again(self, place: int) -> None:
        """Have this image encoded for this request alone."""
        try:
            self._submit(place, alone=True)
        except EncoderUnavailable as error:
            self._all_flights.fail(self, error)

    def _submit(self, place: int, *, alone: bool = False) -> None:
        context = self._context
        if context is not None:
            self._pool.submit(partial(context.copy().run, self._do, place, alone))

    async def _own_artifacts(self) -> list[Any]:
        artifacts, self.artifacts = self.artifacts, []
        shared = [artifacts[place] for place in self.borrowed]
        if sum(artifact.nbytes for artifact in shared) <= _SOON_COPIED_BYTES:
            copies = _copies(shared)
        else:
            try:
                copies = await self.loop.run_in_executor(None, _copies, shared)
            except BaseException:
                del artifacts, shared  # a traceback through here must not keep them
                raise
        for place, own in zip(self.borrowed, copies, strict=True):
            artifacts[place] = own
        return artifacts

    # ---- on a thread of the pool, where no frame keeps a raw: a traceback keeps the frames that led to it

    def _do(self, place: int, alone: bool) -> None:
        key, error = (None, None) if alone else _outcome(self._key_at, place)
        if error is not None:
            self._all_flights.fail(self, blame(error, place, self.count, "cache_key"))
            return
        found, error = _outcome(self._all_flights.look_up, self, place, key)
        if isinstance(found, Flight):
            self._prepare(found)
            return
        if found is not None:
            found, error = _outcome(copy_of, found)
        if error is not None:  # out of a key's __hash__ or __eq__, or there is no memory
            what = f"image {place + 1} of {self.count}"
            failed = EncoderFailed(f"{what}: looking it up raised {describe(error)}", position=place)
            failed.__cause__ = error
            self._all_flights.fail(self, failed)
        elif found is not None:
            self._all_flights.give(self, place, found)

    def _key_at(self, place: int) -> Hashable | None:
        return self._cache_key(self.raws[place]) if self.raws else None

    def _prepare(self, flight: Flight) -> None:
        prepared, error = _outcome(self._preprocess, flight.take_raw())
        if error is not None:
            self._all_flights.refused(flight, blame(error, 0, 1), self)
            return
        prepared, error = _outcome(checked, prepared, self._limits, 0, 1)
        if prepared is None:
            assert isinstance(error, RetinueError)
            self._all_flights.refused(flight, error, self)
        else:
            self._all_flights.prepared(flight, prepared)


def _outcome(function: Callable[..., T], *args: Any) -> tuple[T | None, BaseException | None]:
    """What it returns, or what it raises, whose frames then keep nothing."""
    try:
        return function(*args), None
    except BaseException as error:  # SystemExit too: the process is not a backend's to end
        forget_frames(error)
        return None, error
    finally:
        del args


def _copies(artifacts: list[Any]) -> list[Any]:
    return [copy_of(artifact) for artifact in artifacts]
