"""What is interrupted ends like that; a cancellation from elsewhere stays one."""

from __future__ import annotations

import asyncio
import sys

import pytest

from retinue.server.interruption import Interruption


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_an_interruption_ends_what_runs_within_and_nothing_else() -> None:
    with Interruption() as interruption:
        asyncio.get_running_loop().call_soon(interruption.interrupt)
        await for_ever()
    assert interruption.interrupted
    await asyncio.sleep(0)  # would raise if a cancellation were left
    if sys.version_info >= (3, 11):
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0


async def test_without_one_all_passes_through() -> None:
    with pytest.raises(KeyError), Interruption() as interruption:
        raise KeyError
    assert not interruption.interrupted


async def test_after_the_end_an_interruption_is_nothing() -> None:
    with Interruption() as interruption:
        pass
    interruption.interrupt()
    await asyncio.sleep(0)
    assert not interruption.interrupted


async def test_who_cancels_the_task_is_not_mistaken_for_an_interruption() -> None:
    async def work() -> None:
        with Interruption():
            await for_ever()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a task does not count its cancellations before 3.11")
async def test_of_an_interruption_and_a_cancellation_at_once_the_cancellation_counts() -> None:
    interruptions: list[Interruption] = []

    async def work() -> None:
        with Interruption() as interruption:
            interruptions.append(interruption)
            await for_ever()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    interruptions[0].interrupt()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_an_exception_on_the_way_out_is_not_hidden() -> None:
    async def work() -> None:
        with Interruption() as interruption:
            asyncio.get_running_loop().call_soon(interruption.interrupt)
            try:
                await for_ever()
            except asyncio.CancelledError:
                raise KeyError from None

    with pytest.raises(KeyError):
        await work()
