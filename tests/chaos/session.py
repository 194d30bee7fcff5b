"""The chaos: three processes, a load, what goes wrong meanwhile, and what is left at the end.

Clients ask two servers, each with trouble in its encoder: one with the embedded decoder, and a proxy. Between
that and its upstream, the demo's own server, is a rude relay; the upstream is killed and started again; and
the backend of the first breaks for a while.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from retinue.demo.run import pictures

from ..media import origin
from .faults import Call, Journal
from .load import Load, Site, Sure, by_openai, chat, data_url
from .origins import Gallery
from .process import Process, Watch
from .server import FAILURES, LIMITS, MEDIA
from .upstream import Relay, Trouble
from .verdict import Circumstances, judge, lies_about_readiness

__all__ = ["Report", "Session"]

#: What a server may hold at the end beyond what it held after the warm-up: memory of the process, which what
#: libraries do with it makes uneven, and blocks of Python's own.
MAX_BYTES_GROWN = 48 * 2**20
MAX_BLOCKS_GROWN = 10_000

_CLIENTS = 24
_FLOOD = 100  # requests at once, where 64 are taken
_RUDE = 0.05  # share of the relay's connections
_CANDIDATES = 64  # questions, of which the sure ones are asked
_CALM = 8  # of them at once
_SETTLE_S = 15.0  # until all is still, once the clients have gone
_SHOWS_S = 30.0  # until a broken backend shows: a success counts for 10 s, and a probe takes 5 s at most

_GAUGE = re.compile(
    r"^(retinue_(?:requests_in_flight|pending_\w+|running_cost|oldest_wait_seconds)) (\S+)$", re.MULTILINE
)
_COUNTED = re.compile(r'^retinue_batches_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)
_LATE_S = FAILURES.forward_timeout_s or 0.0
_AS_NEEDED = re.compile(r"(asyncio|uvloop)_\d+")  # of the event loop, up to a bound


@dataclass
class Report:
    """What was found; ``problems`` are broken promises."""

    seed: str
    problems: list[str] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)  # by status
    left: Counter[str] = field(default_factory=Counter)  # by stage
    calls: int = 0
    failed_calls: int = 0
    losses: int = 0  # of a backend, which was built again
    stuck_calls: int = 0
    deaths: int = 0  # of the upstream
    cuts: int = 0
    unready_s: float = 0.0  # from the first failing call of a broken backend until readiness said so
    health_ms: list[float] = field(default_factory=list)
    resident_bytes: dict[str, list[int]] = field(default_factory=dict)  # after each round, by server
    blocks: dict[str, list[int]] = field(default_factory=dict)  # of Python's memory, likewise

    def figures(self) -> dict[str, Any]:
        """For a table."""
        health_ms = sorted(self.health_ms)
        return {
            "seed": self.seed,
            "answers": dict(sorted(self.answers.items())),
            "left": dict(sorted(self.left.items())),
            "calls": self.calls,
            "failed_calls": self.failed_calls,
            "losses": self.losses,
            "stuck_calls": self.stuck_calls,
            "deaths": self.deaths,
            "cuts": self.cuts,
            "health_asked": len(health_ms),
            "health_median_ms": health_ms[len(health_ms) // 2],
            "health_p99_ms": health_ms[int(0.99 * (len(health_ms) - 1))],
            "health_max_ms": health_ms[-1],
            "resident_bytes": self.resident_bytes,
            "blocks": self.blocks,
            "problems": self.problems,
        }

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {len(self.problems)} broken promises", *self.problems[:10]]
        return "\n".join([*lines, f"answers: {dict(self.answers)}", f"left: {dict(self.left)}"])


@dataclass
class Subject:
    """A server under chaos: the process, the site that it is to clients, what its journal says."""

    process: Process
    site: Site
    journal: Path
    read: int = 0  # lines of it
    outcomes: Counter[str] = field(default_factory=Counter)  # of the calls in these
    last: Sequence[Call] = ()  # of the round before
    counted: Mapping[str, int] = field(default_factory=dict)  # the same by its own metrics
    before: Mapping[str, Any] = field(default_factory=dict)  # its vital signs after the warm-up


class Session:
    """The processes, for the length of the ``async with``. ``folder`` gets logs and journals."""

    def __init__(self, seed: str, folder: Path) -> None:
        self.report = Report(seed)
        self._seed = seed
        self._folder = folder
        self._life = AsyncExitStack()
        self._relay = Relay(seed, share=0)
        demo = ("-m", "retinue.cli", "serve", "--demo", "--port", "0", "--client-embeds")
        self._upstream = Process("upstream", folder / "upstream.log", *demo)
        self._subjects: list[Subject] = []
        self._sure: list[Sure] = []
        self._rounds = 0

    async def __aenter__(self) -> Session:
        try:
            await self._life.enter_async_context(self._relay.open())
            embedded = self._process("embedded")
            proxy = self._process("proxy", "--upstream", f"http://127.0.0.1:{self._relay.port}")
            processes = (self._upstream, embedded, proxy)
            for process in processes:
                self._life.push_async_callback(process.end, signal.SIGKILL)
            await asyncio.gather(*(process.start() for process in processes))
            self._relay.target = self._upstream.port
            for process in (embedded, proxy):
                site = Site(process.url, through_proxy=process is proxy)
                self._subjects.append(Subject(process, site, self._journal(process.name)))
            await self._ask_in_calm()
        except BaseException:
            await self._life.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._life.aclose()

    def _process(self, name: str, *options: str) -> Process:
        journal = str(self._journal(name))
        arguments = ("-m", "tests.chaos.server", "--seed", f"{self._seed}/{name}", "--journal", journal)
        return Process(name, self._folder / f"{name}.log", *arguments, *options)

    def _journal(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    # ---- what happens

    async def round(
        self, seconds: float, *, dies: bool = False, breaks: bool = False, orders: Sequence[str] = ()
    ) -> None:
        """Load all for so long, judge what came of it, and see that nothing of it is left.

        ``dies``: the upstream, once. ``breaks``: the embedded server's backend, until its readiness shows it.
        ``orders``: what goes wrong with one call each of both servers, when the load is half through.
        """
        self._rounds += 1
        self._relay.share = _RUDE
        async with AsyncExitStack() as stack:
            gallery = Gallery(await stack.enter_async_context(origin.serving()))
            sites = [await stack.enter_async_context(one.site.open()) for one in self._subjects]
            watches = [stack.enter_context(Watch(one.process)) for one in self._subjects]
            load = Load(self._seed, str(self._rounds), sites, gallery, self._sure)
            await asyncio.gather(
                load.run(_CLIENTS, seconds),
                *(self._flood(load, site, seconds * 0.8) for site in sites),
                *([self._kill_upstream(seconds * 0.2)] if dies else []),
                *([self._break_backend(seconds * 0.1)] if breaks else []),
                *(self._order(one, orders, seconds / 2) for one in self._subjects),
            )
        for one, watch in zip(self._subjects, watches, strict=True):
            await self._settle(one)
            self._judge(one, watch)

    async def _ask_in_calm(self) -> None:
        """Find out which questions the model is sure of; its digits are those of the pictures' names."""
        rng = random.Random(self._seed)
        album = pictures()
        candidates = [Sure.drawn(rng, album) for _ in range(_CANDIDATES)]
        at_once = asyncio.Semaphore(_CALM)
        async with self._subjects[0].site.open() as site:

            async def is_right(sure: Sure) -> bool:
                body = chat([data_url(picture.data) for picture in sure.pictures], sure.question)
                async with at_once:
                    return (await by_openai(site, body)).text == sure.answer

            verdicts = await asyncio.gather(*(is_right(sure) for sure in candidates))
        self._sure = [sure for sure, right in zip(candidates, verdicts, strict=True) if right]
        if len(self._sure) < 0.8 * _CANDIDATES:
            self._problem(f"in calm only {len(self._sure)} of {_CANDIDATES} answers were right")

    async def _flood(self, load: Load, site: Site, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await load.flood(site, _FLOOD)

    async def _kill_upstream(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        trouble = Trouble("killed", time.monotonic())
        self._relay.troubles.append(trouble)
        await self._upstream.end(signal.SIGKILL)
        self._relay.target = 0
        await self._upstream.start()
        self._relay.target = self._upstream.port
        trouble.ended_s = time.monotonic()
        self.report.deaths += 1

    async def _order(self, one: Subject, orders: Sequence[str], after_s: float) -> None:
        await asyncio.sleep(after_s)
        for trouble in orders:
            async with one.site.session.post(f"{one.process.url}/chaos/order", params={"trouble": trouble}):
                pass

    async def _break_backend(self, after_s: float) -> None:
        """Let every call fail until readiness says so; then let it see that they succeed again."""
        await asyncio.sleep(after_s)
        url = self._subjects[0].process.url
        began_s = time.monotonic()
        async with aiohttp.ClientSession() as session:

            async def says(status: int) -> bool:
                while time.monotonic() - began_s < _SHOWS_S:
                    async with session.get(f"{url}/ready") as answer:
                        if answer.status == status:
                            return True
                    await asyncio.sleep(0.2)
                return False

            async with session.post(f"{url}/chaos/broken"):
                pass
            if not await says(503):
                self._problem(f"ready, though nothing has succeeded for {_SHOWS_S:g} s")
            self.report.unready_s = time.monotonic() - began_s
            async with session.delete(f"{url}/chaos/broken"):
                began_s = time.monotonic()
            if not await says(200):
                self._problem("not ready, though all is well again")

    # ---- what is found

    def _problem(self, what: str) -> None:
        self.report.problems.append(what)

    def _judge(self, one: Subject, watch: Watch) -> None:
        """Judge all that was answered in this round."""
        report, site = self.report, one.site
        calls = Journal.read(one.journal, skip=one.read)
        during = Circumstances(
            calls=[*one.last, *calls],
            floods=site.floods,
            upstream=self._relay.troubles if site.through_proxy else (),
            request_timeout_s=LIMITS.request_timeout_s,
            fetch_timeout_s=MEDIA.fetch_timeout_s,
            forward_timeout_s=_LATE_S,
        )
        found = [judge(asked, answer, during) for asked, answer in site.ended]
        found += lies_about_readiness(watch.looks, during)
        report.problems += [f"{one.process.name}: {problem}" for problem in found if problem]
        report.problems += watch.problems
        report.health_ms += watch.health_ms
        report.answers.update(str(answer.status or "none") for _, answer in site.ended)
        report.left += site.left
        one.read, one.last = one.read + len(calls), calls
        one.outcomes.update(_outcome(call) for call in calls)
        troubles = Counter(call.trouble for call in calls)
        report.losses += troubles["lost"]
        report.stuck_calls += troubles["stuck"]
        site.forget()

    async def _settle(self, one: Subject) -> None:
        """Wait until nothing of a request is left in the server; what is left then is a problem."""
        until_s = time.monotonic() + _SETTLE_S
        async with aiohttp.ClientSession(one.process.url) as session:
            while True:
                async with session.get("/metrics") as answer:
                    figures = await answer.text()
                async with session.get("/chaos/vitals") as answer:
                    vitals = await answer.json()
                left = _left(figures, vitals, one.before)
                if not left or time.monotonic() > until_s:
                    break
                await asyncio.sleep(0.2)
        self.report.problems += [f"{one.process.name} still holds {what}" for what in left]
        self.report.resident_bytes.setdefault(one.process.name, []).append(vitals["resident_bytes"])
        self.report.blocks.setdefault(one.process.name, []).append(vitals["blocks"])
        one.before = one.before or vitals
        one.counted = {outcome: int(float(count)) for outcome, count in _COUNTED.findall(figures)}

    async def end(self) -> Report:
        """Stop the servers and look at what they leave behind; what was found in all."""
        report = self.report
        for one in self._subjects:
            if +Counter(one.counted) != one.outcomes:
                self._problem(f"{one.process.name} counts calls as {one.counted}, its journal {one.outcomes}")
            report.calls += one.read
            report.failed_calls += one.read - one.outcomes["ok"]
        report.cuts = len(self._relay.troubles) - report.deaths
        for process in (*(one.process for one in self._subjects), self._upstream):
            if status := await process.end():
                self._problem(f"{process.name} exited with {status}")
            report.problems += process.complaints()
        return report


def _outcome(call: Call) -> str:
    """As metrics count it."""
    if call.lasts(_LATE_S):
        return "late"
    return {"": "ok", "memory": "out_of_memory", "lost": "lost"}.get(call.trouble, "failed")


def _left(figures: str, vitals: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """What is left of a load, in words: of ``/metrics``, and of the vital signs beyond those ``before``."""
    left = [f"{name}={value}" for name, value in _GAUGE.findall(figures) if float(value)]
    if before:
        for sign in ("tasks", "descriptors"):
            if vitals[sign] > before[sign]:
                left.append(f"{vitals[sign]} {sign}, after the warm-up {before[sign]}")
        more = Counter(vitals["threads"]) - Counter(before["threads"])
        left += [f"thread {name}" for name in more if not _AS_NEEDED.fullmatch(name)]
        for sign, most in (("resident_bytes", MAX_BYTES_GROWN), ("blocks", MAX_BLOCKS_GROWN)):
            if vitals[sign] > before[sign] + most:
                left.append(f"{vitals[sign]} {sign}, after the warm-up {before[sign]}")
    return left
