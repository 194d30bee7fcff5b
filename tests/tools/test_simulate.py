"""The batcher on a virtual clock: what its policies promise, and that the clock tells no tales."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from openai import AsyncOpenAI

from retinue.batching import BatchRecord, RequestRecord
from retinue.batching.planner import Limits
from retinue.batching.recording import Trace, read_trace
from retinue.cli import Simulate
from retinue.demo.encoder import DigitsEncoder
from retinue.demo.run import pictures
from retinue.tools.simulate import (
    Callers,
    Device,
    Figures,
    Line,
    Load,
    Poisson,
    Policy,
    Replay,
    Row,
    World,
    capped,
    plain,
    policies,
    recorded,
    simulate,
    table,
)

from ..server.asgi import SOON_S, Mirror
from ..server.processes import started
from ..server.serving import serving
from ..server.test_end_to_end import about

ALBUM = pictures()
SERVE = ("-m", "retinue.cli", "serve", "--port", "0")
CAP = Limits(64)
LINE = Line(2e-3, 0.2e-3)
DEVICE = Device(LINE, jitter_s=0.15e-3)
EXACT = Device(LINE)
CAPACITY = 64 / LINE(64)  # requests per second
WAITS_S = (0.5e-3, 1e-3, 2e-3, 4e-3)
MEASURED, EAGER = Policy(CAP), Policy(CAP, 0.0)


def asked(
    arrived_s: float, *costs: int, keys: Sequence[str] = (), left_s: float | None = None
) -> RequestRecord:
    """A request of a trace."""
    return RequestRecord(
        items=len(costs),
        cost=sum(costs),
        ahead_items=0,
        ahead_cost=0,
        batches=(),
        wait_s=0.0,
        total_s=1.0 if left_s is None else left_s,
        outcome="ok" if left_s is None else "left",
        arrived_s=arrived_s,
        costs=costs,
        keys=tuple(keys or [None] * len(costs)),
    )


def called(cost: int, duration_s: float, key: str | None = None, bucket: int | None = None) -> BatchRecord:
    """A call of a trace."""
    return BatchRecord(
        id=1,
        items=1,
        requests=1,
        cost=cost,
        key=key,
        bucket=bucket,
        oldest_wait_s=0.0,
        duration_s=duration_s,
        outcome="ok",
    )


def replayed(*requests: RequestRecord, limits: Limits = CAP, device: Device = EXACT) -> Figures:
    """What becomes of them without a hold, after one that finds the device idle and does not count."""
    before = asked(min(request.arrived_s for request in requests) - 1.0, 1)
    return simulate(Replay([before, *requests]), device, Policy(limits, 0.0))


# -- what the policies promise -------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("count", "think_ms"), [(1, 0), (2, 0), (8, 0.5), (16, 2), (64, 0), (64, 2), (64, 5)]
)
def test_the_measured_hold_keeps_up_with_eager_and_with_the_best_fixed_wait(
    count: int, think_ms: float
) -> None:
    load = Callers(count=count, think_s=think_ms * 1e-3, for_s=3.0)
    measured, eager, *fixed = (
        simulate(load, DEVICE, policy).requests_per_s for policy in policies([CAP], WAITS_S)
    )
    assert measured >= 0.99 * eager
    assert measured >= 0.98 * max(eager, *fixed)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("load", [0.1, 0.3, 0.5, 0.7, 0.9, 0.95])
def test_whoever_does_not_come_back_loses_nothing_by_the_measured_hold(load: float) -> None:
    rate = load * CAPACITY
    arrivals = Poisson(rate=rate, for_s=10_000 / rate)
    measured, eager = (
        [simulate(arrivals, DEVICE, policy, seed) for seed in range(3)] for policy in (MEASURED, EAGER)
    )
    assert fmean(one.p50_ms for one in measured) <= 1.02 * fmean(one.p50_ms for one in eager)
    assert fmean(one.p99_ms for one in measured) <= 1.02 * fmean(one.p99_ms for one in eager)


@pytest.mark.parametrize("think_ms", [0, 1, 20])
def test_a_lone_caller_is_never_held(think_ms: float) -> None:
    load = Callers(count=1, think_s=think_ms * 1e-3)
    measured, eager = (simulate(load, DEVICE, policy) for policy in (MEASURED, EAGER))
    assert measured.held_ms == 0
    assert measured == eager


# -- what the simulation promises ----------------------------------------------------------------------


@pytest.mark.parametrize("load", [Callers(count=8, think_s=0.5e-3), Poisson(rate=2000)])
def test_the_same_seed_gives_the_same_figures(load: Load) -> None:
    assert simulate(load, DEVICE, MEASURED, seed=1) == simulate(load, DEVICE, MEASURED, seed=1)
    assert simulate(load, DEVICE, MEASURED, seed=1) != simulate(load, DEVICE, MEASURED, seed=2)


@pytest.mark.parametrize(("max_wait_s", "latency_ms"), [(None, 2.2), (0.0, 2.2), (4e-3, 6.2)])
def test_a_lone_request_takes_its_call_and_its_hold(max_wait_s: float | None, latency_ms: float) -> None:
    found = simulate(Callers(count=1), EXACT, Policy(CAP, max_wait_s))
    assert latency_ms < found.p50_ms < latency_ms + 0.2  # until a thread wakes, and its timer
    assert found.p99_ms == pytest.approx(found.p50_ms)
    assert found.batch_items == 1


def test_more_than_the_device_can_serve_fills_every_call() -> None:
    found = simulate(Poisson(rate=2 * CAPACITY, for_s=2.0), EXACT, EAGER)
    assert found.requests_per_s == pytest.approx(CAPACITY, rel=0.01)
    assert found.fill == pytest.approx(1, abs=0.01)
    assert found.busy == pytest.approx(1, abs=0.01)


def test_an_open_loop_offers_its_rate_and_a_closed_loop_its_callers() -> None:
    open_loop = simulate(Poisson(rate=200, items=3, costs=(2, 4), for_s=20.0), EXACT, EAGER)
    assert open_loop.requests_per_s == pytest.approx(200, rel=0.05)
    assert open_loop.cost_per_s == pytest.approx(200 * 3 * 3, rel=0.05)
    closed_loop = simulate(Callers(count=1, think_s=20e-3, for_s=20.0), EXACT, EAGER)
    assert closed_loop.requests_per_s == pytest.approx(1 / (10e-3 + closed_loop.p50_ms * 1e-3), rel=0.05)


def test_a_call_takes_what_its_bucket_takes() -> None:
    found = simulate(Callers(count=1), EXACT, Policy(Limits(buckets=(32, 64)), 0.0))
    assert found.p50_ms == pytest.approx(LINE(32) * 1e3, abs=0.1)


def test_a_crowd_is_served_as_the_limits_of_today_would_have_it() -> None:
    crowd = [asked(0.0, 4) for _ in range(8)]
    narrow, wide = replayed(*crowd, limits=Limits(8)), replayed(*crowd, limits=Limits(32))
    assert (narrow.batch_cost, wide.batch_cost) == (8, 32)
    assert narrow.p99_ms == pytest.approx(4 * LINE(8) * 1e3, abs=0.1)
    assert wide.p99_ms == pytest.approx(LINE(32) * 1e3, abs=0.1)


def test_keys_are_not_mixed() -> None:
    found = replayed(asked(0.0, 1, 1, 1, 1, keys="aabb"))
    assert found.batch_items == 2
    assert found.p50_ms == pytest.approx(2 * LINE(2) * 1e3, abs=0.1)


def test_requests_come_when_they_came() -> None:
    apart, together = replayed(asked(0.0, 1), asked(5.0, 1)), replayed(asked(0.0, 1), asked(1e-6, 1))
    assert (apart.batch_items, together.batch_items) == (1, 2)


def test_whoever_left_leaves_again_and_costs_nothing_unless_a_call_has_it() -> None:
    busy = asked(0.0, 64)  # for 14.8 ms
    gone, claimed = (replayed(busy, asked(1e-3, 32, left_s=left_s)) for left_s in (5e-3, 16e-3))
    assert (gone.requests, gone.batch_cost) == (1, 64)
    assert (claimed.requests, claimed.batch_cost) == (1, 48)


def test_what_a_smaller_cap_would_refuse_is_counted() -> None:
    found = replayed(asked(0.0, 4), asked(1.0, 16), asked(2.0, 8, 1), limits=Limits(8))
    assert (found.requests, found.refused) == (2, 1)


@pytest.mark.parametrize("busy", [False, True])
def test_a_fault_of_the_simulation_is_no_result(busy: bool) -> None:
    class Faulty:
        warm_up_s = 0.0

        def begin(self, world: World) -> None:
            if busy:  # the fault comes within a call
                world.at(1.0, lambda: world.ask([1]))
            world.at(1.001, self.fail)

        def fail(self) -> None:
            raise ArithmeticError("on purpose")

    with pytest.raises(RuntimeError, match="the simulation itself has failed"):
        simulate(Faulty(), EXACT, EAGER)


# -- a device out of a trace ---------------------------------------------------------------------------


def test_a_device_is_known_by_its_calls() -> None:
    device = Device.of([called(cost, LINE(cost)) for cost in (1, 5, 20, 64)])
    assert device.line.fixed_s == pytest.approx(LINE.fixed_s)
    assert device.line.per_cost_s == pytest.approx(LINE.per_cost_s)
    assert device.seconds(None, 128, random.Random()) == pytest.approx(LINE(128))


def test_a_pause_of_the_machine_does_not_bend_the_line() -> None:
    calls = [called(cost, LINE(cost)) for cost in range(1, 65)]
    calls[1::9] = [called(call.cost, 3.0) for call in calls[1::9]]
    calls += [called(64, 1.0)]
    line = Device.of(calls).line
    assert line.fixed_s == pytest.approx(LINE.fixed_s, rel=0.01)
    assert line.per_cost_s == pytest.approx(LINE.per_cost_s, rel=0.01)


def test_how_far_calls_were_off_the_line_comes_again() -> None:
    calls = [called(cost, LINE(cost) + extra_s) for cost in (1, 64) for extra_s in (0, 0, 0.5)]
    device, rng = Device.of(calls), random.Random(0)
    durations_s = {round(device.seconds(None, 10, rng), 9) for _ in range(100)}
    assert durations_s == {round(LINE(10), 9), round(LINE(10) + 0.5, 9)}


def test_a_key_with_many_calls_has_a_line_of_its_own() -> None:
    slow = Line(10e-3, 1e-3)
    calls = [called(cost, LINE(cost), "a") for cost in range(1, 31)]
    calls += [called(cost, slow(cost), "b") for cost in range(1, 31)]
    device, rng = Device.of(calls), random.Random(0)
    assert device.seconds("a", 8, rng) == pytest.approx(LINE(8))
    assert device.seconds("b", 8, rng) == pytest.approx(slow(8))
    assert LINE(8) < device.seconds("c", 8, rng) < slow(8)


def test_with_buckets_a_call_is_known_by_the_one_that_it_ran_in() -> None:
    calls = [
        called(cost, LINE(bucket), bucket=bucket) for cost, bucket in ((1, 8), (8, 8), (9, 64), (60, 64))
    ]
    assert Device.of(calls).line.per_cost_s == pytest.approx(LINE.per_cost_s)


def test_calls_of_one_cost_say_how_long_that_one_takes() -> None:
    assert Device.of([called(8, 0.01)] * 3).line(8) == pytest.approx(0.01)


def test_a_device_that_is_as_fast_whatever_it_gets_has_no_line_that_falls() -> None:
    line = Device.of([called(1, 0.011), called(64, 0.010)]).line
    assert line.per_cost_s == 0
    assert line.fixed_s == pytest.approx(0.0105, abs=0.0005)


def test_no_device_takes_less_than_no_time() -> None:
    assert Device.of([called(1, 0.001), called(2, 0.003), called(3, 0.006)]).line.fixed_s == 0
    steep = [called(cost, 1e-3 * cost**1.5) for cost in (5, 2, 8)]  # where rounding alone once went below
    assert Device.of(steep).line.fixed_s == 0
    assert Device(LINE, extras_s=(-1.0,)).seconds(None, 1, random.Random()) == 0
    with pytest.raises(ValueError, match="no part of it is negative"):
        Line(-1e-3, 1e-3)


def test_failed_calls_say_nothing_of_how_long_one_takes() -> None:
    failed = called(1, 9.0)._replace(outcome="failed")
    assert Device.of([failed, called(1, LINE(1)), called(9, LINE(9))]).line.fixed_s == pytest.approx(2e-3)
    with pytest.raises(ValueError, match="no call has succeeded"):
        Device.of([failed])


# -- side by side --------------------------------------------------------------------------------------


def test_every_wait_is_tried_under_every_cap() -> None:
    found = policies([CAP, Limits(128), CAP], [1e-3])
    assert [(policy.limits.max_batch_cost, policy.name) for policy in found] == [
        (64, "measured"),
        (64, "eager"),
        (64, "wait 1 ms"),
        (128, "measured"),
        (128, "eager"),
        (128, "wait 1 ms"),
    ]


def test_a_cap_ends_the_buckets() -> None:
    assert capped(Limits(buckets=(8, 32, 64)), 48) == Limits(48, None, (8, 32, 48))
    assert capped(Limits(buckets=(8, 32, 64)), 128) == Limits(128, None, (8, 32, 64, 128))
    assert capped(Limits(64, 5), 128) == Limits(128, 5)


def test_what_was_so_stands_beside_what_would_have_been() -> None:
    requests = [asked(10.0 + n, 2)._replace(total_s=0.5) for n in range(4)]
    found = recorded(Trace(Limits(8), requests, [called(2, 0.175)] * 4, 0))
    assert found.requests_per_s == pytest.approx(4 / 3.5)
    assert found.p99_ms == pytest.approx(500)
    assert found.busy == pytest.approx(0.2)
    assert found.fill == 0.25


def test_nothing_answered_is_nothing_to_compare() -> None:
    with pytest.raises(ValueError, match="no request was answered under max_batch_cost=64"):
        simulate(Replay([]), EXACT, EAGER)
    with pytest.raises(ValueError, match="no request was answered under max_batch_cost=64"):
        recorded(Trace(CAP, [], [], 0))


def test_a_table_has_columns_and_json_has_names() -> None:
    load = Callers(count=4, for_s=0.5)
    rows = [
        Row(policy.name, policy.limits, simulate(load, EXACT, policy)) for policy in policies([CAP, Limits()])
    ]
    lines = table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split()[:3] == ["max_batch_cost", "policy", "requests/s"]
    assert lines[1].split()[:2] == ["64", "measured"]
    assert "-" in lines[3].split()  # no cap, no fill
    again = json.loads(json.dumps(plain(rows)))
    assert [(row["policy"], row["max_batch_cost"]) for row in again] == [
        ("measured", 64),
        ("eager", 64),
        ("measured", None),
        ("eager", None),
    ]
    assert again[0]["p99_ms"] == rows[0].figures.p99_ms


# -- the command ---------------------------------------------------------------------------------------


def retinue(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "retinue.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one of --trace, --callers and --rate"),
        ({"callers": 1, "rate": 2.0, "call_ms": 1.0}, "exactly one of --trace, --callers and --rate"),
        ({"callers": 1}, "--call-ms says, or else a trace"),
        ({"trace": Path("trace"), "call_ms": 1.0}, "--call-ms says, or else a trace"),
    ],
)
def test_what_does_not_go_together_says_what_would(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Simulate(**options)


def test_the_command_says_what_the_library_finds(tmp_path: Path) -> None:
    device = ("--call-ms", "2", "--cost-ms", "0.2")
    caps = ("--max-batch-cost", "64", "--max-batch-cost", "4", "--wait-ms", "1")
    done = retinue(
        "simulate", "--callers", "8", "--seconds", "1", *device, *caps, "--json", str(tmp_path / "rows")
    )
    assert done.returncode == 0, done.stderr
    load = Callers(count=8, for_s=1.0)
    rows = [
        Row(policy.name, policy.limits, simulate(load, EXACT, policy))
        for policy in policies([CAP, Limits(4)], [1e-3])
    ]
    assert done.stdout == table(rows) + "\n"
    assert json.loads((tmp_path / "rows").read_text()) == json.loads(json.dumps(plain(rows)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--trace", "nowhere"), "nowhere"),
        (("--trace", __file__), "is no trace"),
        (("--callers", "0", "--call-ms", "1"), "there must be callers"),
        (("--rate", "0", "--call-ms", "1"), "rate must be more than 0"),
        (("--rate", "1", "--call-ms", "0"), "takes some time"),
        (("--rate", "1", "--call-ms", "1", "--items", "0"), "a request has items"),
        (("--rate", "9", "--call-ms", "1", "--cost", "5", "--max-batch-cost", "4"), "max_batch_cost=4"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_words(options: tuple[str, ...], words: str) -> None:
    done = retinue("simulate", *options)
    assert done.returncode == 1
    assert done.stderr.startswith("retinue simulate: ")
    assert words in done.stderr
    assert done.stdout == ""


@pytest.mark.timeout(120)
async def test_what_a_server_has_recorded_can_be_simulated(tmp_path: Path) -> None:
    path, behind = tmp_path / "trace.jsonl", Mirror()
    encoder = ("--encoder", "retinue.demo.encoder:DigitsEncoder", "--encoder-model", "demo")
    with serving(behind) as upstream:
        options = ("--upstream", upstream.url, *encoder, "--record-trace", str(path))
        async with started("retinue", *SERVE, *options) as server:
            await server.ready()
            url = f"http://127.0.0.1:{server.port}/v1"
            async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=SOON_S) as client:
                for shown in (ALBUM[:1], ALBUM[1:3], ALBUM[3:4], ALBUM[4:6]):  # each once: all are remembered
                    await client.chat.completions.create(model="any", messages=about(*shown))
            server.signal(signal.SIGTERM)
            assert await server.end() == 0
    trace = read_trace(path)
    assert [request.items for request in trace.requests] == [1, 2, 1, 2]
    assert trace.limits.max_batch_cost == DigitsEncoder.max_batch_cost
    done = await asyncio.to_thread(retinue, "simulate", "--trace", str(path), "--max-batch-cost", "999")
    assert done.returncode == 0, done.stderr
    lines = [line.split()[:2] for line in done.stdout.splitlines()]
    own = str(DigitsEncoder.max_batch_cost)
    assert lines[0][:2] == ["4", "requests,"]
    assert lines[3:] == [
        [own, "recorded"],
        [own, "measured"],
        [own, "eager"],
        ["999", "measured"],
        ["999", "eager"],
    ]


async def test_a_trace_that_cannot_be_written_is_said_before_anything_is_served(tmp_path: Path) -> None:
    async with started("retinue", *SERVE, "--demo", "--record-trace", str(tmp_path)) as server:
        assert await server.end() == 2
        errors = await server.errors()
    assert "retinue serve: " in errors
    assert "Traceback" not in errors
