"""Token ids into text as they come: never half a character, never part of a stop string.

Both classes give text as soon as it is settled, and what is left at the end as ``rest``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["Detokenizer", "StopFilter"]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a decoded text ends in while a character lacks bytes


class Detokenizer:
    """Decodes a small window of ids, which begins with those of the last settled piece.

    That piece is the context in which a tokenizer decides about spaces: the new ids alone would lose
    it, all ids each time would take quadratic time. (text-generation-inference does the same.)
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._context = 0  # so many ids of the window are the last settled piece
        self._settled = ""  # their text

    def add(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_INCOMPLETE) or len(text) <= len(self._settled):
            return ""
        piece = text[len(self._settled) :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._settled = self._decode(self._window)
        return piece

    def rest(self) -> str:
        """Return what was held back; of a character that lacks bytes, its replacement."""
        return self._decode(self._window)[len(self._settled) :]


class StopFilter:
    """Ends a text at its first stop string and holds back what may become one.

    The first is the one that is complete first (of several that end together, the longest), so the
    result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """Return what is settled of the text so far; after ``stopped``, nothing more may be added."""
        self._held += piece
        found = [(at + len(string), at) for string in self._stop if (at := self._held.find(string)) >= 0]
        if found:
            self.stopped = True
            return self._release(min(found)[1], drop=True)
        return self._release(len(self._held) - self._length_of_beginning())

    def rest(self) -> str:
        """Return what was held back: it became no stop string."""
        return self._release(len(self._held))

    def _length_of_beginning(self) -> int:
        """How long the longest end of the held text is that begins a stop string."""
        longest = max((len(string) for string in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(string.startswith(self._held[-length:]) for string in self._stop):
                return length
        return 0

    def _release(self, length: int, *, drop: bool = False) -> str:
        released, self._held = self._held[:length], "" if drop else self._held[length:]
        return released
