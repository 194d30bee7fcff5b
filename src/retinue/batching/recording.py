"""A trace: a file of JSON lines, one for each request and each batch as it ended.

It has their times, costs and outcomes, and their keys as text; nothing of the items. Each run of a batcher
begins with a line of its own, which has the limits and what turns monotonic times into those of the calendar.

Thread rules
    ``on_batch`` and ``on_request`` may run on any thread, several at once: they put the record into a queue.
    The file belongs to the writer thread. ``_lock`` guards that a stop is said once.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Hashable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from retinue.batching.outcome import describe
from retinue.batching.planner import Limits
from retinue.batching.records import BatchRecord, RequestRecord

__all__ = ["Recorder", "Trace", "read_trace"]

logger = logging.getLogger("retinue")

_VERSION = 1
_MOST_WAITING = 65_536  # records that the disk may be behind
_PAUSE_S = 0.05  # between two looks at what is to be written, so that it is many
_PATIENCE_S = 5.0  # with the disk, at the end


class Recorder:
    """An observer that appends what happens to the file at ``path``; ``OSError`` if it cannot be opened.

    ``limits``: the batcher's, for whoever reads it. ``max_bytes``: of the file. When it has so many, when
    writing fails, or when the disk does not keep up, recording ends, which is logged; serving goes on.
    Whoever made it closes it, after the batcher.
    """

    def __init__(
        self, path: str | os.PathLike[str], limits: Limits | None = None, *, max_bytes: int = 2**30
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._limits = limits or Limits()
        self._file = open(path, "ab")  # noqa: SIM115  # the writer thread closes it
        self._bytes = os.fstat(self._file.fileno()).st_size  # a pipe cannot tell
        self._records: queue.SimpleQueue[BatchRecord | RequestRecord | None] = queue.SimpleQueue()
        self._is_recording = True
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._write, name="recorder", daemon=True)
        self._thread.start()

    def on_batch(self, record: BatchRecord) -> None:
        """Of ``retinue.Observer``."""
        self._put(record)

    def on_request(self, record: RequestRecord) -> None:
        """Of ``retinue.Observer``."""
        self._put(record)

    def close(self) -> None:
        """Record no more, and wait until all is written; for 5 s at most."""
        self._records.put(None)
        self._closing.set()
        self._thread.join(_PATIENCE_S)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _put(self, record: BatchRecord | RequestRecord) -> None:
        if self._is_recording:
            if self._records.qsize() < _MOST_WAITING:
                self._records.put(record)
            else:
                self._stop("the disk does not keep up")

    def _write(self) -> None:
        """The writer thread's whole life."""
        try:
            with self._file:
                self._append(_header(self._limits))
                while self._is_recording and (fields := self._next()) is not None:
                    self._append(fields)
                    if self._records.empty():
                        self._file.flush()
                        self._closing.wait(_PAUSE_S)
        except Exception as error:
            self._stop(describe(error))
        finally:
            self._is_recording = False
            self._records = queue.SimpleQueue()

    def _next(self) -> dict[str, Any] | None:
        """What to write next; None at the end. No record is kept while there is nothing to write."""
        record = self._records.get()
        return None if record is None else _fields(record)

    def _append(self, fields: dict[str, Any]) -> None:
        line = json.dumps(fields, separators=(",", ":")).encode() + b"\n"
        if fields["kind"] == "trace" and self._bytes:
            line = b"\n" + line  # the line before may be torn
        if self._bytes + len(line) > self._max_bytes:
            self._stop(f"the file has reached max_bytes={self._max_bytes}")
            return
        self._file.write(line)
        self._bytes += len(line)

    def _stop(self, why: str) -> None:
        with self._lock:
            is_first, self._is_recording = self._is_recording, False
        if is_first:
            logger.error("recording to %s has ended: %s", self._path, why)


class Trace(NamedTuple):
    """What a file says. Times of arrival are in seconds since 1970."""

    limits: Limits  #: of the last run
    requests: list[RequestRecord]  #: as they ended
    batches: list[BatchRecord]
    torn: int  #: lines that could not be read, as a crash leaves them


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace; ``OSError`` if there is none, ``ValueError`` if the file is something else."""
    limits: Limits | None = None
    requests: list[RequestRecord] = []
    batches: list[BatchRecord] = []
    torn, epoch_s = 0, 0.0
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if line == b"\n":
                continue
            try:
                fields = json.loads(line)
            except ValueError:
                torn += 1
                continue
            try:
                kind = fields.pop("kind")
                if kind == "trace" and fields.pop("version") == _VERSION:
                    epoch_s = fields.pop("epoch_s")
                    limits = Limits(**fields)
                elif kind == "batch" and limits is not None:
                    batches.append(BatchRecord(**fields))
                elif kind == "request" and limits is not None:
                    requests.append(_request(fields, epoch_s))
                else:
                    raise ValueError("it has no place there")
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: line {number} is not of a trace: {describe(error)}") from None
    if limits is None:
        raise ValueError(f"{path} is no trace")
    return Trace(limits, requests, batches, torn)


def _header(limits: Limits) -> dict[str, Any]:
    epoch_s = time.time() - time.monotonic()
    return {"kind": "trace", "version": _VERSION, "epoch_s": epoch_s, **asdict(limits)}


def _fields(record: BatchRecord | RequestRecord) -> dict[str, Any]:
    if isinstance(record, BatchRecord):
        return {"kind": "batch", **record._asdict(), "key": _text(record.key)}
    return {"kind": "request", **record._asdict(), "keys": [_text(key) for key in record.keys]}


def _text(key: Hashable) -> str | None:
    return None if key is None else str(key)


def _request(fields: dict[str, Any], epoch_s: float) -> RequestRecord:
    fields["arrived_s"] += epoch_s
    return RequestRecord(**fields | {name: tuple(fields[name]) for name in ("batches", "costs", "keys")})
