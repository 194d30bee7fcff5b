"""Images on their way to their artifacts: what several requests want is encoded once.

An image that has to be encoded is a *flight*. It belongs to no request, and to the batcher it is a request of
its own; so nobody pays for what befalls another request that wants the same image:

    A request that leaves, fails or is refused by the batcher lets go of its flights. Those that somebody else
    waits for go on; the others end.
    Once all images of a request are prepared, whoever began them, it has the batcher take, in one step, those
    that nobody has handed over before. So no request waits for the preprocessing of images not its own.
    What is the image's fault, or the backend's, fails all who wait for it, each with an error of its own.
    What ``preprocess`` says of the request that it ran for fails that one alone; the others begin anew.

Thread rules
    Everything may be called from any thread. ``_lock`` guards the cache and all fields, of ``Flight`` and
    ``Sharing`` too; it is not held while a backend's method, the batcher or an event loop's callback runs,
    nor for a copy. (A key's ``__eq__`` does run.) It is not re-entrant: what the garbage collector may do in
    a thread that holds it is ``_postponed`` until that thread has released it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import copy
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from retinue.batching import ThreadedMicroBatcher
from retinue.batching.outcome import forget_frames
from retinue.batching.request import Request
from retinue.encoder.backend import Preprocessed
from retinue.encoder.cache import ArtifactCache, Cached, size_of
from retinue.errors import EncoderFailed, InvalidInput, RetinueError

if TYPE_CHECKING:
    from retinue.encoder.sharing import Sharing

__all__ = ["Flight", "Flights"]

_ALONE = "image 1 of 1"


class Flight:
    """One image on its way, for all who wait for it.

    It stands where a request has the future of its caller: the actor asks it whether anybody still waits.
    """

    __slots__ = ("_flights", "key", "prepared", "raw", "request", "waiters")

    def __init__(self, flights: Flights, key: Hashable | None, waiter: Sharing, place: int) -> None:
        self._flights = flights
        self.key = key
        self.waiters = {waiter: [place]}  # and which of their images it is
        self.raw: Any = None  # until it is preprocessed
        self.prepared: Preprocessed[Any] | None = None  # until it is batched
        self.request: Request | None = None  # once it is

    def take_raw(self) -> Any:
        """The raw, which it then lets go of."""
        raw, self.raw = self.raw, None
        return raw

    def get_loop(self) -> Flights:
        """Where the batcher tells that it has ended."""
        return self._flights

    def cancelled(self) -> bool:
        """Whether nobody waits for it any more; then nobody joins it either."""
        return not self.waiters


class _After:
    """What is to be done once the lock is released."""

    def __init__(self) -> None:
        self.ended: list[Sharing] = []  # their callers are to be woken
        self.due: collections.deque[Sharing] = collections.deque()  # their images are all prepared
        self.again: list[tuple[Sharing, int]] = []  # images to be encoded for these requests alone
        self.unwanted: list[tuple[ThreadedMicroBatcher[Any, Any], Request]] = []
        self.dropped: list[Any] = []  # as these die, anything may run


class Flights:
    """What is on its way, and the cache that it goes to, of ``budget_bytes``."""

    def __init__(self, budget_bytes: int) -> None:
        self._lock = threading.Lock()
        self._cache = ArtifactCache(budget_bytes)
        self._by_key: dict[Hashable, Flight] = {}
        self._can_share = True  # the last artifact was an array
        self._postponed: collections.deque[Callable[[_After], object]] = collections.deque()

    def figures(self) -> Cached:
        """Of the cache."""
        return self._cache.figures()

    # ---- one image of a request, on the pool's threads

    def look_up(self, who: Sharing, place: int, key: Hashable | None) -> Any:
        """An artifact, a copy of which is for ``give``; or a ``Flight``, for the caller to preprocess.

        None: ``who`` has ended, or waits from now on for what is under way.
        """
        with self._turn() as after:
            if who.is_over:
                return None
            if key is not None and self._can_share:
                if (artifact := self._cache.get(key)) is not None:
                    return artifact
                flight = self._by_key.get(key)
                if flight is not None and flight.waiters:
                    self._cache.joined += 1
                    flight.waiters.setdefault(who, []).append(place)
                    who.flights.add(flight)
                    if flight.prepared or flight.request:
                        self._count_prepared(who, 1, after)
                    return None
                self._cache.misses += 1
            flight = Flight(self, key, who, place)
            flight.raw, who.raws[place] = who.raws[place], None
            who.flights.add(flight)
            if key is not None:
                self._by_key[key] = flight
            return flight

    def give(self, who: Sharing, place: int, artifact: Any) -> None:
        """The artifact of this image, which was known."""
        with self._turn() as after:
            if not who.is_over:
                self._deliver(who, place, artifact, after)
                self._count_prepared(who, 1, after)

    def prepared(self, flight: Flight, prepared: Preprocessed[Any]) -> None:
        """It was preprocessed."""
        with self._turn() as after:
            if flight.waiters:
                flight.prepared = prepared
                for who, places in flight.waiters.items():
                    self._count_prepared(who, len(places), after)

    def refused(self, flight: Flight, error: RetinueError, origin: Sharing) -> None:
        """Its preprocessing, for ``origin``, failed with ``error``, as of a request of this image alone."""
        is_its_own = isinstance(error, (InvalidInput, EncoderFailed))
        with self._turn() as after:
            for who, places in self._end_flight(flight):
                if is_its_own or who is origin:
                    self._fail(who, _addressed(error, places[0], who.count), after)
                else:
                    after.again += [(who, place) for place in places]

    def fail(self, who: Sharing, error: BaseException) -> None:
        """End a request with an error of its own."""
        with self._turn() as after:
            self._fail(who, error, after)

    def leave(self, who: Sharing) -> None:
        """Its caller has left: what nobody else waits for stops."""
        with self._turn() as after:
            self._let_go(who, after)

    # ---- at any moment, even in a thread that holds the lock

    def abandon(self, who: Sharing) -> None:
        """``leave`` for the garbage collector."""
        self._soon(partial(self._let_go, who))

    def end(self, who: Sharing, error: RetinueError) -> None:
        """``fail``, unless all of its images are prepared."""
        self._soon(lambda after: self._fail(who, error, after) if who.unprepared else None)

    def close(self) -> None:
        """Keep no artifact any more."""
        self._soon(lambda after: self._cache.close(after.dropped))

    def _soon(self, action: Callable[[_After], object]) -> None:
        self._postponed.append(action)
        self._catch_up()

    # ---- the end of a flight: to the batcher, this is the event loop where its caller waits

    def call_soon_threadsafe(self, _: object, flights: Iterable[Flight]) -> None:
        """They have ended; on the actor thread, or that of whoever ended them."""
        with self._turn() as after:
            for flight in flights:
                self._land(flight, after)

    # ---- under the lock

    def _land(self, flight: Flight, after: _After) -> None:
        request = flight.request
        waiters = self._end_flight(flight)
        if request is None or not waiters:
            return
        error = request.error
        if error is not None:
            if isinstance(error, EncoderFailed) and error.__cause__ is None:
                self._cache.clear(after.dropped)  # a broken contract: what came before may be overwritten
            for who, places in waiters:
                self._fail(who, _addressed(error, places[0], who.count), after)
            return
        artifact = request.results[0]
        first, *others = ((who, place) for who, places in waiters for place in places)
        self._can_share = size_of(artifact) is not None
        if not self._can_share:  # it can be only one's
            for who, _ in others:
                who.unprepared += 1
            after.again += others
            others = []
        is_kept = False
        if flight.key is not None:
            with contextlib.suppress(Exception):  # of a key's __eq__
                is_kept = self._cache.put(flight.key, artifact, after.dropped)
        for who, place in (first, *others):
            if is_kept or others:
                who.borrowed.append(place)
            self._deliver(who, place, artifact, after)

    def _deliver(self, who: Sharing, place: int, artifact: Any, after: _After) -> None:
        who.artifacts[place] = artifact
        who.missing -= 1
        if not who.missing:
            who.is_over = True
            after.ended.append(who)

    def _count_prepared(self, who: Sharing, images: int, after: _After) -> None:
        who.unprepared -= images
        if not (who.unprepared or who.is_over):
            after.due.append(who)

    def _fail(self, who: Sharing, error: BaseException, after: _After) -> None:
        if not who.is_over:
            who.error = error
            after.ended.append(who)
            self._let_go(who, after)

    def _let_go(self, who: Sharing, after: _After) -> None:
        after.dropped += (who.raws, who.artifacts)
        who.raws, who.artifacts, who.is_over = [], [], True
        for flight in list(who.flights):
            del flight.waiters[who]
            if not flight.waiters:
                if flight.request is not None:
                    after.unwanted.append((who.batcher, flight.request))
                after.dropped.append(flight.prepared)
                self._end_flight(flight)
        who.flights.clear()

    def _end_flight(self, flight: Flight) -> list[tuple[Sharing, list[int]]]:
        """Nobody waits for it any more; return who did."""
        waiters = list(flight.waiters.items())
        flight.waiters.clear()
        flight.prepared = flight.request = None
        for who, _ in waiters:
            who.flights.discard(flight)
        if flight.key is not None:
            with contextlib.suppress(Exception):  # of a key's __eq__; what nobody waits for is not joined
                if self._by_key.get(flight.key) is flight:
                    del self._by_key[flight.key]
        return waiters

    # ---- without the lock

    @contextlib.contextmanager
    def _turn(self) -> Iterator[_After]:
        """Hold the lock, and then do what there is left to do."""
        after = _After()
        try:
            with self._lock:
                yield after
        finally:
            _wake(after.ended)
            for batcher, request in after.unwanted:
                batcher.withdraw(request)
            for who, place in after.again:
                who.begin_again(place)
            while after.due:
                after.due += self._hand_over(after.due.popleft())
            self._catch_up()

    def _catch_up(self) -> None:
        """Do what was postponed, unless somebody holds the lock, who then does it."""
        while self._postponed and self._lock.acquire(blocking=False):
            after = _After()
            try:
                while self._postponed:
                    self._postponed.popleft()(after)
            finally:
                self._lock.release()
            _wake(after.ended)
            for batcher, request in after.unwanted:
                batcher.abandon(request)  # for this may be the garbage collector's doing

    def _hand_over(self, who: Sharing) -> list[Sharing]:
        """Have the batcher take what is prepared of ``who``; if it will not, return who may try instead."""
        with self._lock:
            flights = [flight for flight in who.flights if flight.prepared is not None]
            flights.sort(key=lambda flight: flight.waiters[who][0])
            images = [cast("Preprocessed[Any]", flight.prepared) for flight in flights]
            requests = [Request.to_wake(cast("asyncio.Future[None]", flight)) for flight in flights]
            for flight, request in zip(flights, requests, strict=True):
                flight.prepared, flight.request = None, request
        if not flights:
            return []
        error = _refusal(who.batcher, requests, images)
        if error is None:
            for flight, request in zip(flights, requests, strict=True):
                if flight.cancelled() and request.remaining:  # before the batcher knew of it
                    who.batcher.withdraw(request)
            return []
        with self._turn() as after:
            for flight, image in zip(flights, images, strict=True):
                if flight.waiters:
                    flight.prepared, flight.request = image, None
            self._fail(who, error, after)
            return [other for flight in flights for other in flight.waiters if not other.unprepared]


def _refusal(
    batcher: ThreadedMicroBatcher[Any, Any], requests: list[Request], images: list[Preprocessed[Any]]
) -> BaseException | None:
    """Have the batcher take them all; what it raised, if it took none."""
    try:
        batcher.enqueue_each(
            requests,
            [image.item for image in images],
            [image.cost for image in images],
            [image.key for image in images],
        )
        return None
    except BaseException as error:
        forget_frames(error)
        return error
    finally:
        del requests, images  # the traceback leads to here


def _addressed(error: RetinueError, place: int, count: int) -> RetinueError:
    """``error``, of a request of one image, for a request of ``count`` where that image is at ``place``."""
    own = copy.copy(error)
    text = error.args[0] if error.args else None
    if isinstance(text, str) and text.startswith(_ALONE):
        own.args = (f"image {place + 1} of {count}" + text.removeprefix(_ALONE), *error.args[1:])
    if isinstance(own, (InvalidInput, EncoderFailed)) and own.position is not None:
        own.position = place
    own.__cause__ = error.__cause__
    return own


def _wake(ended: Iterable[Sharing]) -> None:
    """Wake their callers: one call into each of their event loops."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for who in ended:
        by_loop.setdefault(who.loop, []).append(who.future)
    for loop, futures in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: its callers are gone
            loop.call_soon_threadsafe(_settle, futures)


def _settle(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
