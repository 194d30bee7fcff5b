"""The demo: dozens of concurrent requests about pictures of digits, and the batches that they form.

``run`` is what ``retinue demo`` calls: a server, and OpenAI's client in front of it. It reads the pictures
that are shipped, whose names begin with the digit that they show, and so knows what the answers should be.
"""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table

from retinue.batching import BatchRecord, RequestRecord
from retinue.demo.prompt import QUESTION
from retinue.demo.serving import MODEL_NAME, demo_stack
from retinue.server.limits import ServerLimits
from retinue.server.serving import listening

__all__ = ["PICTURES", "Picture", "Service", "pictures", "run"]

PICTURES = Path(__file__).parent / "pictures"

_LEAVES = 8  # every so manieth caller leaves half-way
_SHOWN = 24  # batches of the table
_NO_CACHE = ServerLimits(artifact_cache_bytes=0)  # every picture is encoded, each time that it is shown


@dataclass(frozen=True)
class Picture:
    """A picture file as it came, and the digit that it shows."""

    name: str
    data: bytes
    digit: str

    @property
    def url(self) -> str:
        """As a data URL. Its type is left out: the server judges by content."""
        return f"data:;base64,{base64.b64encode(self.data).decode()}"


def pictures() -> list[Picture]:
    """The pictures that are shipped, by name: PNG, JPEG and WebP of many sizes."""
    files = sorted(path for path in PICTURES.iterdir() if path.suffix in (".png", ".jpg", ".webp"))
    return [Picture(path.name, path.read_bytes(), path.name[0]) for path in files]


class Service:
    """The demo's server and a client of it: what every request of the demo goes through."""

    def __init__(self) -> None:
        self.batches: list[BatchRecord] = []
        self._life = AsyncExitStack()

    async def __aenter__(self) -> Service:
        url = await self._life.enter_async_context(listening(demo_stack(limits=_NO_CACHE, observer=self)))
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._client = await self._life.enter_async_context(client)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._life.aclose()

    async def ask(self, shown: Sequence[Picture], question: str = QUESTION) -> str:
        """The model's answer to ``question`` about the pictures ``shown``."""
        images = [{"type": "image_url", "image_url": {"url": picture.url}} for picture in shown]
        content: Any = [*images, {"type": "text", "text": question}]
        completion = await self._client.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0
        )
        return completion.choices[0].message.content or ""

    def on_batch(self, record: BatchRecord) -> None:
        """Keep it for the table."""
        self.batches.append(record)

    def on_request(self, record: RequestRecord) -> None:
        """Nothing to keep: the demo shows its requests as they are answered."""


def run(requests: int) -> int:
    """Run the demo with so many concurrent requests; 0 if every answer was right, else 1."""
    return asyncio.run(_demo(requests, Console(highlight=False)))


async def _demo(requests: int, console: Console) -> int:
    album = pictures()
    rng = random.Random(42)
    asked = [rng.sample(album, rng.randint(1, 4)) for _ in range(requests)]
    console.print(f"[bold]{QUESTION}[/bold] {requests} requests at once, of one to four pictures each:\n")
    async with Service() as service:
        await service.ask(album[:1])  # the first call of a model is slow, whoever makes it
        service.batches.clear()
        together = await _all_at_once(service, asked, console)
        batches = list(service.batches)
        alone = await _one_at_a_time(service, together.answered)
        wrong = together.wrong + await _the_answer(service, album, console)
    _show(batches, console)
    _compare(together, alone, console)
    if wrong:
        console.print(f"[red]{wrong} wrong answers[/red]")
    return 1 if wrong else 0


@dataclass(frozen=True)
class _Round:
    answered: list[list[Picture]]
    wrong: int
    left: int
    seconds: float


async def _all_at_once(service: Service, asked: Sequence[list[Picture]], console: Console) -> _Round:
    """Ask everything at once; when the first answer is there, every eighth caller leaves."""
    began = time.perf_counter()
    tasks = [asyncio.create_task(service.ask(shown)) for shown in asked]
    numbers = {task: number for number, task in enumerate(tasks)}
    answered: list[list[Picture]] = []
    wrong = 0
    waiting = set(tasks)
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=numbers.__getitem__):
            shown = asked[numbers[task]]
            if task.cancelled():
                console.print(f"  request {numbers[task] + 1:3d}  [dim]left half-way[/dim]")
                continue
            if not answered:
                for leaver in tasks[_LEAVES - 1 :: _LEAVES]:
                    leaver.cancel()
            right = _show_answer(f"request {numbers[task] + 1:3d}", shown, task.result(), console)
            answered.append(shown)
            wrong += not right
    return _Round(answered, wrong, len(asked) - len(answered), time.perf_counter() - began)


async def _one_at_a_time(service: Service, asked: Sequence[list[Picture]]) -> _Round:
    began = time.perf_counter()
    for shown in asked:
        await service.ask(shown)
    return _Round(list(asked), 0, 0, time.perf_counter() - began)


async def _the_answer(service: Service, album: Sequence[Picture], console: Console) -> int:
    """The last request: a picture of a 4 and a picture of a 2."""
    shown = [next(picture for picture in album if picture.digit == digit) for digit in "42"]
    return 0 if _show_answer("\n  and at last", shown, await service.ask(shown), console) else 1


def _show_answer(who: str, shown: Sequence[Picture], answer: str, console: Console) -> bool:
    wanted = "".join(picture.digit for picture in shown)
    names = ", ".join(picture.name for picture in shown)
    verdict = "[green]right[/green]" if answer == wanted else f"[red]wrong, it is {wanted}[/red]"
    console.print(f"  {who}  [bold]{answer:4}[/bold]  {verdict}  [dim]{names}[/dim]", soft_wrap=True)
    return answer == wanted


def _show(batches: Sequence[BatchRecord], console: Console) -> None:
    table = Table(title="\nThe batches that formed in front of the encoder", title_justify="left")
    for heading in ("batch", "images", "of requests", "cost (rows)", "longest wait", "forward"):
        table.add_column(heading, justify="right")
    for batch in batches[:_SHOWN]:
        table.add_row(
            str(batch.id),
            str(batch.items),
            str(batch.requests),
            str(batch.cost),
            f"{batch.oldest_wait_s * 1e3:.1f} ms",
            f"{batch.duration_s * 1e3:.1f} ms",
        )
    console.print(table)
    if len(batches) > _SHOWN:
        console.print(f"  and {len(batches) - _SHOWN} more")


def _compare(together: _Round, alone: _Round, console: Console) -> None:
    at_once = len(together.answered) / together.seconds
    in_turn = len(alone.answered) / alone.seconds
    console.print(
        f"\n  all at once     {at_once:6.1f} requests/s ({together.left} left half-way)\n"
        f"  one at a time   {in_turn:6.1f} requests/s\n"
        f"  together they are answered [bold]{at_once / in_turn:.1f} times[/bold] as fast"
    )
