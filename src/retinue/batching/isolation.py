"""What to run again after a batch failed: pure, fed by the actor with how each call ended.

A failed batch is halved, and so is each half that fails, larger pieces first, until items fail on their own:
group testing, as in Dorfman, "The Detection of Defective Members of Large Populations" (1943), by halves. One
culprit among n items costs 2 * ceil(log2 n) further calls at most. With several of them a batch gets
4 * ceil(log2 n) + 4; after that, what no call has shown to be good fails as well.

Where whole batches fail in a row it is the backend that is broken, and splitting stops until a call succeeds.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable
from typing import NamedTuple

from retinue.batching.planner import Work

#: So many batches in a row may be split in vain; the next that fail are not split.
MAX_SPLIT_IN_VAIN = 2


class Isolation:
    """The search for what made one batch fail."""

    __slots__ = ("calls_left", "error")

    def __init__(self, items: int, error: BaseException) -> None:
        self.calls_left = 4 * (items - 1).bit_length() + 4
        self.error = error  # the last


class Piece(NamedTuple):
    """Works that one call runs: a batch, or a part of one that failed."""

    key: Hashable
    works: list[Work]
    cost: int
    is_retry: bool = False
    isolation: Isolation | None = None
    was_lost: bool = False  # the backend was, with these in flight

    def of(self, works: list[Work]) -> Piece:
        """A part of it."""
        return self._replace(works=works, cost=sum(work[1] for work in works))


class Retries:
    """The pieces that are to be run again, before anything that waits."""

    def __init__(self) -> None:
        self._pieces: collections.deque[Piece] = collections.deque()
        self._in_vain = 0  # batches in a row that were split, without a success since

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def __len__(self) -> int:
        return sum(len(piece.works) for piece in self._pieces)

    @property
    def cost(self) -> int:
        """Summed cost of all pieces."""
        return sum(piece.cost for piece in self._pieces)

    def drop(self) -> list[Work]:
        """Let nothing be run again; return what was to be."""
        works = [work for piece in self._pieces for work in piece.works]
        self._pieces.clear()
        return works

    def forget(self, request: object) -> None:
        """``request`` has ended: none of its works is to be run again."""
        pieces, self._pieces = self._pieces, collections.deque()
        for piece in pieces:
            works = [work for work in piece.works if work[2] is not request]
            if works:
                self._pieces.append(piece if len(works) == len(piece.works) else piece.of(works))

    def again(self, piece: Piece) -> None:
        """Run ``piece`` next, once more."""
        self._pieces.appendleft(piece._replace(is_retry=True))

    def take(self, is_live: Callable[[Work], bool], cap: Callable[[Hashable], int | None]) -> Piece | None:
        """The next piece, without the works that are not live; None if none of it is.

        Of works that cost more than ``cap`` of their key together, it has the first ones that do not, one at
        the least.
        """
        piece = self._pieces.popleft()
        works = [work for work in piece.works if is_live(work)]
        if not works:
            return None
        room = cap(piece.key)
        if room is not None:
            fitting = _fitting(works, room)
            if fitting < len(works):
                self._pieces.appendleft(piece.of(works[fitting:]))
                works = works[:fitting]
        if piece.isolation is not None:
            piece.isolation.calls_left -= 1
        return piece.of(works)

    def take_unproven(self) -> list[Piece]:
        """The pieces whose isolation has no calls left: they have failed."""
        unproven = [piece for piece in self._pieces if piece.isolation and not piece.isolation.calls_left]
        for piece in unproven:
            self._pieces.remove(piece)
        return unproven

    def split(self, piece: Piece, error: BaseException) -> bool:
        """Run the halves of ``piece``, which failed with ``error``, later; False if it is not to be split."""
        isolation, works = piece.isolation, piece.works
        if isolation is None:
            if self._in_vain >= MAX_SPLIT_IN_VAIN or len({work[2] for work in works}) < 2:
                return False  # nobody to save
            self._in_vain += 1
            isolation = Isolation(len(works), error)
        isolation.error = error
        if len(works) == 1 or not isolation.calls_left:
            return False
        half = (len(works) + 1) // 2
        for part in (works[:half], works[half:]):
            self._pieces.append(piece._replace(is_retry=True, isolation=isolation).of(part))
        return True

    def succeeded(self) -> None:
        """A call did, so the backend is not broken."""
        self._in_vain = 0


def _fitting(works: list[Work], room: int) -> int:
    """How many of the first works cost no more than ``room``; one at the least."""
    for count, work in enumerate(works):
        room -= work[1]
        if room < 0:
            return count or 1
    return len(works)
