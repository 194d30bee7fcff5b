"""The table of figures says what was found, and nothing around it changes."""

from __future__ import annotations

import pytest

from .figures import BEGIN, END, PAGE, replaced, table

SCHEDULES = {
    "first_seed": 7,
    "seconds": 600.0,
    "schedules": 1_234_567,
    "failures": 0,
    "events": 2,
    "steps": 3,
    "calls": {"ok": 4, "lost": 5},
    "requests": {"ok": 6},
    "memory_growth_mib": 1.5,
}
HYGIENE = {
    "seed": "8",
    "requests": 1_000_020,
    "seconds": 60.0,
    "outcomes": {"ok": 1_000_000, "Overloaded": 20},
    "blocks_grown": 12,
    "bytes_grown": 2**19,
    "retained": ["thread left-over"],
}
CHAOS = {
    "seed": "9",
    "seconds": 600.0,
    "answers": {"200": 9000, "500": 1000},
    "problems": ["a lie"],
    "left": {"in the head": 3},
    "calls": 5000,
    "failed_calls": 400,
    "losses": 2,
    "stuck_calls": 1,
    "deaths": 10,
    "cuts": 77,
    "health_asked": 6000,
    "health_median_ms": 1.23,
    "health_p99_ms": 45.6,
    "health_max_ms": 78.9,
    "resident_bytes": {"embedded": [2**29, 2**29 + 2**20]},
    "blocks": {"embedded": [1000, 1001]},
}


def test_the_table_has_what_was_found_good_or_bad() -> None:
    found = table(SCHEDULES, HYGIENE, CHAOS)
    for expected in (
        "seeds 7, 8, 9",
        "| schedules | 1,234,567 in 600 s |",
        "| that break a guarantee | 0 |",
        "| retained | thread left-over |",
        "| growth of the process | 12 blocks, 0.5 MiB |",
        "| answers, by status | 10,000 in 600 s: 200: 9,000, 500: 1,000 |",
        "| that are wrong or not honest, and other broken promises | 1 |",
        "| `/health`, 6,000 times: median, p99, longest | 1.2, 46, 79 ms |",
        "| memory of the embedded server | 512.0 MiB and 1,000 blocks of Python's after the warm-up, "
        "513.0 MiB and 1,001 at the end |",
    ):
        assert expected in found


def test_only_what_is_between_the_marks_is_replaced() -> None:
    page = f"# A\n\n{BEGIN}\nold\n{END}\n\n## B\n"
    assert replaced(page, "new") == f"# A\n\n{BEGIN}\nnew\n{END}\n\n## B\n"
    with pytest.raises(ValueError, match="needs two lines"):
        replaced("# A\n", "new")


def test_the_page_has_the_marks() -> None:
    page = PAGE.read_text()
    assert BEGIN in page
    assert END in page.partition(BEGIN)[2]
