"""The chaos for as long as one likes: ``python -m tests.chaos.soak --minutes 10``.

Prints what happened, writes it to ``--json``, and ends with status 1 if any promise was broken. Logs and
journals are left in a folder that it names.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from .session import Report, Session

_WARM_S = 30.0
_ROUND_S = 55.0  # and some for what follows it


async def soak(seed: str, minutes: float, folder: Path) -> Report:
    """Rounds of chaos, all on the same servers."""
    until_s = time.monotonic() + 60 * minutes
    async with Session(seed, folder) as session:
        await session.round(_WARM_S)
        for number in itertools.count():
            if time.monotonic() + _ROUND_S / 2 > until_s:
                break
            # A backend may be lost three times in five minutes, and no more.
            orders = ("lost", "stuck", "stuck")[number % 3 : number % 3 + 1]
            await session.round(_ROUND_S, dies=True, breaks=number % 2 == 0, orders=orders)
            report = session.report
            print(
                f"round {number + 1}: {sum(report.answers.values())} answers, {report.problems}", flush=True
            )
        return await session.end()


def main() -> int:
    """Run it and say what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", default=str(random.randrange(10**6)))
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    print(f"seed {options.seed}, {options.minutes:g} minutes, logs in {folder}", flush=True)
    began_s = time.monotonic()
    report = asyncio.run(soak(options.seed, options.minutes, folder))
    figures = {"seconds": round(time.monotonic() - began_s, 1), **report.figures()}
    print(json.dumps(figures, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
