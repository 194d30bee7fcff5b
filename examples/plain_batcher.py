"""The batcher alone: any function that is cheaper for many than for one, and no images at all.

Run it:  python examples/plain_batcher.py

Here it is a database: 300 coroutines each want one row, and a handful of queries fetches them all. SQLite's
connections may be used on the thread that opened them only. The batcher has one thread, which runs
``on_start``, every call and ``on_stop``: the place for whatever must stay on one thread.
"""

import asyncio
import sqlite3

from retinue import ThreadedMicroBatcher


class Names:
    """Looks names up by number, many at a time."""

    def __init__(self) -> None:
        self.queries = 0

    def open(self) -> None:
        self.database = sqlite3.connect(":memory:")
        self.database.execute("CREATE TABLE names (id INTEGER PRIMARY KEY, name TEXT)")
        rows = ((number, f"name {number}") for number in range(1000))
        self.database.executemany("INSERT INTO names VALUES (?, ?)", rows)

    def fetch(self, ids: list[int]) -> list[str | None]:
        """One result for each id, in the same order: that is the whole contract."""
        self.queries += 1
        marks = ", ".join("?" * len(ids))
        found = dict(self.database.execute(f"SELECT id, name FROM names WHERE id IN ({marks})", ids))
        return [found.get(number) for number in ids]

    def close(self) -> None:
        self.database.close()


async def main() -> None:
    names = Names()
    batcher = ThreadedMicroBatcher[int, str | None](
        names.fetch,
        max_batch_items=100,  # of the ids in one query
        on_start=names.open,
        on_stop=names.close,
    )
    async with batcher:  # or batcher.start() and batcher.shutdown(), where nothing is asynchronous

        async def caller(number: int) -> str | None:
            [name] = await batcher.submit([number])
            return name

        results = await asyncio.gather(*(caller(number) for number in range(300)))
        assert results == [f"name {number}" for number in range(300)]
        print(f"300 callers, {names.queries} queries")
        print(f"one caller may want several: {await batcher.submit([7, 5000, 7])}")


if __name__ == "__main__":
    asyncio.run(main())
