"""Trouble for the demo's encoder: what a picture brings along, and what the seed says of each call.

A client of the chaos writes a ``Mark`` behind the last byte of a picture, where no decoder looks. So the
backend knows whose picture it has and what shall go wrong with it, and its journal who was in which call.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TextIO, TypeAlias

import torch
from torch import Tensor

from retinue.demo.encoder import DigitsEncoder
from retinue.encoder import Preprocessed, VisionEncoderBackend
from retinue.errors import BackendLost
from retinue.media import Image

__all__ = ["FAILING", "STUCK_S", "Call", "Injected", "Journal", "Mark", "Schedule", "Troubled"]

#: How long a stage lasts for a picture that pauses in it: time enough for a client to hear of it and leave.
PAUSE_S = 0.25
#: How long a stuck call takes: longer than it may.
STUCK_S = 6.0

_MARK = b"\0chaos:"
_Item: TypeAlias = "tuple[Mark, Tensor]"


class Injected(RuntimeError):
    """Raised because the seed says so."""


@dataclass(frozen=True)
class Mark:
    """Whose picture this is, and its ``trouble``: what it does in here, mostly nothing.

    ``place``: which of its request's. So no two pictures are the same, and each comes to the backend.

    In preprocess: "value error", "key error", "pause in preprocess". In a forward: what ``FAILING`` names;
    "greedy memory", which is enough for it alone; "nan"; "pause in forward". "followed", like a pause, makes
    the backend tell how far it has come.
    """

    tag: str = "probe"  # what readiness sends has no mark
    trouble: str = ""
    place: str = ""

    def on(self, data: bytes) -> bytes:
        """``data`` with this mark."""
        return data + _MARK + "/".join((self.tag, self.trouble, self.place)).encode()

    @classmethod
    def of(cls, data: bytes) -> Mark:
        """The mark on ``data``."""
        _, found, text = data.rpartition(_MARK)
        return cls(*text.decode().split("/")) if found else cls()


@dataclass(frozen=True)
class Call:
    """One line of the journal: a call of ``forward_batch``. Times are those of ``time.monotonic``.

    ``tags``: of its pictures, in order. ``trouble``: what went wrong, if anything. ``culprits``: the tags of
    those of its pictures that brought it; none if the schedule did.
    """

    tags: tuple[str, ...]
    began_s: float
    ended_s: float
    trouble: str = ""
    culprits: tuple[str, ...] = ()

    def lasts(self, seconds: float) -> bool:
        """Whether it took so long."""
        return self.ended_s - self.began_s >= seconds


class Journal:
    """The calls of one server, a line each, for another process to read."""

    def __init__(self, lines: TextIO) -> None:
        self._lines = lines

    def note(self, call: Call) -> None:
        """Write it down."""
        self._lines.write(json.dumps(asdict(call)) + "\n")

    @staticmethod
    def read(path: Path, skip: int = 0) -> list[Call]:
        """All calls but the first ``skip``; a line that is being written is for the next time."""
        with path.open() as lines:
            new = itertools.islice(lines, skip, None)
            return [_call(json.loads(line)) for line in new if line.endswith("\n")]


def _call(fields: dict[str, Any]) -> Call:
    return Call(**fields | {"tags": tuple(fields["tags"]), "culprits": tuple(fields["culprits"])})


class Schedule:
    """What goes wrong with the n-th call, whoever is in it: a function of the seed. ``rates`` are shares."""

    def __init__(self, seed: str, rates: Mapping[str, float]) -> None:
        self._seed = seed
        self._rates = rates

    def trouble(self, number: int) -> str:
        """Of the call with this number; mostly nothing."""
        rng = random.Random(f"{self._seed}/{number}")
        kinds = [*self._rates, ""]
        return rng.choices(kinds, [*self._rates.values(), 1 - sum(self._rates.values())])[0]


def _raise(error: BaseException) -> NoReturn:
    raise error


#: What makes a call fail, and how it does: each gets the artifacts and returns what the backend returns.
#: "broken" is "raise" of a backend that does nothing else for a while.
FAILING: Mapping[str, Callable[[list[Tensor]], list[Tensor]]] = MappingProxyType(
    {
        "raise": lambda _: _raise(Injected("raised by schedule")),
        "broken": lambda _: _raise(Injected("broken by schedule")),
        "lost": lambda _: _raise(BackendLost("lost by schedule")),
        "exit": lambda _: _raise(SystemExit("raised by schedule")),
        "short": lambda artifacts: artifacts[:-1],
        "memory": lambda _: _raise(MemoryError("raised by schedule")),
    }
)

_PREPROCESS: Mapping[str, Callable[[], BaseException]] = MappingProxyType(
    {
        "value error": lambda: ValueError("raised by schedule: no word of this may reach a client"),
        "key error": lambda: KeyError("raised by schedule"),
    }
)


class Troubled(VisionEncoderBackend[Image, _Item, Tensor]):
    """``DigitsEncoder``, with trouble. ``reach`` is told how far a picture comes that is ``followed``.

    While ``broken`` is set, every call fails. ``orders``: what goes wrong with the next calls: "lost", or
    "stuck" for ``STUCK_S``.
    """

    max_batch_cost = 256  # some ten pictures
    preprocess_concurrency = 4  # a picture that pauses keeps nobody waiting

    def __init__(self, schedule: Schedule, journal: Journal, reach: Callable[[str, str], None]) -> None:
        self.broken = threading.Event()
        self.orders: deque[str] = deque()
        self._schedule = schedule
        self._journal = journal
        self._reach = reach
        self._digits = DigitsEncoder()
        self._calls = 0

    def build(self, model_id: str) -> None:
        """Load the demo's encoder."""
        self._digits.build(model_id)

    def preprocess(self, raw: Image) -> Preprocessed[_Item]:
        """As the demo's, unless the mark says otherwise."""
        mark = Mark.of(raw.data)
        self._follow(mark, "preprocess")
        if mark.trouble == "pause in preprocess":
            time.sleep(PAUSE_S)
        if mark.trouble in _PREPROCESS:
            raise _PREPROCESS[mark.trouble]()
        prepared = self._digits.preprocess(raw)
        self._follow(mark, "queue")
        return Preprocessed((mark, prepared.item), prepared.cost)

    def forward_batch(self, items: Sequence[_Item], target_bucket: int | None = None) -> list[Tensor]:
        """As the demo's, unless a mark, an order or the schedule says otherwise."""
        began_s = time.monotonic()
        marks = [mark for mark, _ in items]
        self._calls += 1
        for mark in marks:
            self._follow(mark, "forward")
        trouble, culprits = self._trouble(marks)
        pauses = trouble == "slow" or any(mark.trouble == "pause in forward" for mark in marks)
        time.sleep(STUCK_S if trouble == "stuck" else PAUSE_S if pauses else 0)
        artifacts = self._spoilt(marks, self._digits.forward_batch([item for _, item in items]))
        noted = "" if trouble == "slow" else trouble
        self._journal.note(Call(_tags(marks), began_s, time.monotonic(), noted, _tags(culprits)))
        return FAILING[trouble](artifacts) if trouble in FAILING else artifacts

    def _trouble(self, marks: Sequence[Mark]) -> tuple[str, list[Mark]]:
        """What goes wrong with a call, and the pictures that bring it."""
        if self.orders:
            return self.orders.popleft(), []
        if self.broken.is_set():
            return "broken", []
        culprits = [mark for mark in marks if _fails(mark, len(marks))]
        if culprits:
            return culprits[0].trouble.removeprefix("greedy "), culprits
        return self._schedule.trouble(self._calls), []

    def close(self) -> None:
        """Let the weights go."""
        self._digits.close()

    def _follow(self, mark: Mark, stage: str) -> None:
        if mark.trouble.startswith(("followed", "pause")):
            self._reach(mark.tag, stage)

    @staticmethod
    def _spoilt(marks: Sequence[Mark], artifacts: list[Tensor]) -> list[Tensor]:
        return [
            torch.full_like(artifact, torch.nan) if mark.trouble == "nan" else artifact
            for mark, artifact in zip(marks, artifacts, strict=True)
        ]


def _fails(mark: Mark, count: int) -> bool:
    """Whether this picture makes a call with so many of them fail."""
    return mark.trouble in FAILING or (mark.trouble == "greedy memory" and count > 1)


def _tags(marks: Sequence[Mark]) -> tuple[str, ...]:
    return tuple(mark.tag for mark in marks)
