"""A worker of one's own around an encoder: hang-ups, deadlines and a clean shutdown.

Run it:  python examples/asyncio_worker.py

The worker is a TCP service on this machine. A caller sends one line, a deadline in milliseconds and the names
of its images ("500 cat dog"), and gets one line back, a status and its artifacts ("200 CAT DOG"). Three
things are worth copying:

-   ``answer``: while it encodes, a worker must notice that its caller hangs up. Cancelling the ``encode`` is
    all that there is to do: what no batch has claimed never reaches the encoder.
-   ``encode``: a deadline is ``asyncio.wait_for`` (or ``asyncio.timeout``), which cancels too.
-   ``main``: ``async with`` loads the encoder without blocking the event loop, and at its end closes it. A
    batch that runs by then is still delivered; what waits gets ``EncoderUnavailable``.
"""

import asyncio
import threading

from retinue import AsyncVisionEncoder, RetinueError, VisionEncoderBackend
from retinue.errors import HTTP_STATUS, DeadlineExceeded


class Shout(VisionEncoderBackend[str, str, str]):
    """Encodes an image, which is a word here, as capitals; holds on to a batch for as long as it is told."""

    max_batch_items = 4

    def __init__(self) -> None:
        self.encoded: list[str] = []
        self.busy, self.go_on = threading.Event(), threading.Event()

    def build(self, model_id: str) -> None:
        print(f"loading {model_id}")

    def forward_batch(self, items: list[str], target_bucket: int | None = None) -> list[str]:
        self.busy.set()
        self.go_on.wait()
        self.encoded += items
        return [item.upper() for item in items]

    def close(self) -> None:
        print(f"closed, having encoded: {' '.join(self.encoded)}")


class Worker:
    """Answers callers with the help of an encoder."""

    def __init__(self, encoder: AsyncVisionEncoder[str, str, str]) -> None:
        self._encoder = encoder
        self.connections = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: one line in, one line out."""
        deadline_ms, *images = (await reader.readline()).decode().split()
        self.connections += 1
        encoding = asyncio.create_task(self.encode(images, int(deadline_ms) / 1000))
        leaving = asyncio.create_task(reader.read())  # ends when the caller hangs up
        try:
            await asyncio.wait({encoding, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if encoding.done():
                writer.write(f"{encoding.result()}\n".encode())
            else:
                print(f"the caller of {' '.join(images)} hung up")
        finally:
            encoding.cancel()
            leaving.cancel()
            writer.close()
            self.connections -= 1

    async def encode(self, images: list[str], deadline_s: float) -> str:
        """The line to answer with."""
        try:
            artifacts = await asyncio.wait_for(self._encoder.encode(images), deadline_s)
        except asyncio.TimeoutError:
            return f"{HTTP_STATUS[DeadlineExceeded]} {' '.join(images)} took too long"
        except RetinueError as error:
            return f"{HTTP_STATUS[type(error)]} {error}"
        return f"200 {' '.join(artifacts)}"


class Caller:
    """A client of the worker."""

    def __init__(self, port: int, line: str) -> None:
        self._port, self._line = port, line

    async def call(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(f"{self._line}\n".encode())
        await self._writer.drain()

    async def hear(self) -> str:
        answer = (await self._reader.readline()).decode().strip()
        print(f"{self._line!r} was answered: {answer!r}")
        await self.hang_up()
        return answer

    async def hang_up(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def until(worker: Worker, *, connections: int) -> None:
    """Wait until the worker has so many: what callers do takes a moment to arrive."""
    while worker.connections != connections:  # noqa: ASYNC110  # a poll, to keep the worker plain
        await asyncio.sleep(0.01)


async def main() -> None:
    backend = Shout()
    async with AsyncVisionEncoder(backend, "shout-1") as encoder:
        worker = Worker(encoder)
        server = await asyncio.start_server(worker.answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        first = Caller(port, "60000 cat dog")
        await first.call()
        await asyncio.to_thread(backend.busy.wait)  # from here on a batch runs, and all others wait

        hasty = Caller(port, "20 bee")  # its deadline passes while it waits
        await hasty.call()
        await hasty.hear()

        fickle = Caller(port, "60000 fox")  # does not wait for its answer
        await fickle.call()
        await until(worker, connections=2)
        await fickle.hang_up()
        await until(worker, connections=1)

        backend.go_on.set()
        await first.hear()
        backend.busy.clear()
        backend.go_on.clear()

        last = Caller(port, "60000 elk")
        await last.call()
        await asyncio.to_thread(backend.busy.wait)  # again
        patient = Caller(port, "60000 owl")  # will still wait when the encoder is closed
        await patient.call()
        await until(worker, connections=2)

        server.close()  # takes no more connections; the ``async with`` ends when the encoder is closed
        asyncio.get_running_loop().call_later(0.2, backend.go_on.set)
    await patient.hear()
    await last.hear()


if __name__ == "__main__":
    asyncio.run(main())
