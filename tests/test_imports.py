"""What importing does (nothing), what it needs (the standard library), and who may import whom."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import retinue

SOURCE = Path(retinue.__file__).parent

#: DESIGN.md, "Layout": a package imports only from those above it.
LAYERS = [
    "errors",
    "batching",
    "encoder",
    "media",
    "prompt",
    "encoders",
    "decoders",
    "server",
    "vllm",
    "cluster",
    "tools",
    "demo",
    "cli",
    "__init__",
]


def module_names(package: str) -> list[str]:
    """The modules of ``package``, itself first."""
    paths = sorted((SOURCE / package).glob("*.py"))
    return [
        f"retinue.{package}",
        *(f"retinue.{package}.{path.stem}" for path in paths if path.stem[0] != "_"),
    ]


# -- importing, in a fresh interpreter -----------------------------------------------------------------

LOOK = """
import asyncio, contextlib, json, locale, logging, os, random, signal, socket, sys, threading, warnings

def state():
    "What an import could change for everybody else."
    return {
        "threads": [repr(thread) for thread in threading.enumerate()],
        "signals": {str(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "hooks": [repr(hook) for hook in (sys.excepthook, threading.excepthook, sys.displayhook)],
        "exit hooks": len(threading._threading_atexits),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "files": sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else [],
        "path": list(sys.path),
        "finders": [repr(finder) for finder in sys.meta_path],
        "warnings": [repr(filter) for filter in warnings.filters],
        "log handlers": [repr(handler) for handler in logging.root.handlers],
        "log levels": [logging.root.level, logging.getLogger("retinue").level, logging.raiseExceptions],
        "retinue's log handlers": [repr(handler) for handler in logging.getLogger("retinue").handlers],
        "event loop policy": repr(asyncio.get_event_loop_policy()),
        "random": hash(random.getstate()),
        "socket timeout": socket.getdefaulttimeout(),
        "locale": locale.setlocale(locale.LC_ALL),
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
    }

for number in signal.valid_signals():  # which may come from this program's parent
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
before = state()
modules = set(sys.modules)
for name in sys.argv[1:]:
    __import__(name)
after = state()
print(json.dumps({
    "modules": sorted({name.partition(".")[0] for name in set(sys.modules) - modules}),
    "changed": [what for what in before if before[what] != after[what]],
}))
"""


def imported(*names: str) -> dict[str, list[str]]:
    """What importing ``names`` loads and changes in an interpreter that has imported nothing yet."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOOK, *names],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH") if name in os.environ},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    found: dict[str, list[str]] = json.loads(ended.stdout)  # and nothing else was printed
    return found


@pytest.mark.parametrize(
    "names",
    [["retinue"], [*module_names("batching"), *module_names("encoder"), "retinue.errors"]],
    ids=["retinue", "all of batching and encoder"],
)
def test_importing_needs_the_standard_library_alone_and_changes_nothing(names: list[str]) -> None:
    found = imported(*names)
    assert [name for name in found["modules"] if name not in sys.stdlib_module_names] == ["retinue"]
    assert found["changed"] == []


# -- who imports whom, read from the source ------------------------------------------------------------


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every import of ``path``, those within functions included."""
    package = ["retinue", *path.relative_to(SOURCE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def layer(parts: tuple[str, ...]) -> str:
    """The package of ours that a module belongs to: ("decoders", "text.py") and ("errors.py",)."""
    return parts[0].removesuffix(".py") if parts else "__init__"


def rank(name: str) -> int:
    assert name in LAYERS, f"{name} has no place in DESIGN.md's list"
    return LAYERS.index(name)


def violations(path: Path) -> list[str]:
    own = layer(path.relative_to(SOURCE).parts)
    found = []
    for line, name in imports(path):
        parts = tuple(name.split("."))
        if parts[0] == "retinue":
            theirs = parts[1] if len(parts) > 1 and parts[1] in LAYERS else "__init__"
            if rank(theirs) > rank(own) or (theirs == "__init__" and own != "__init__"):
                found.append(f"{path.relative_to(SOURCE)}:{line}: {own} imports {name}, of {theirs}")
    return found


def sources() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_a_package_imports_only_from_those_above_it() -> None:
    assert [line for path in sources() for line in violations(path)] == []


def test_every_package_has_its_place_in_the_list() -> None:
    for path in sources():
        rank(layer(path.relative_to(SOURCE).parts))


@pytest.mark.parametrize("package", ["errors.py", "batching", "encoder", "__init__.py"])
def test_the_core_names_no_library_even_where_it_would_be_imported_late(package: str) -> None:
    place = SOURCE / package
    for path in [place] if place.is_file() else sorted(place.glob("*.py")):
        roots = {name.partition(".")[0] for _, name in imports(path)}
        assert roots <= {*sys.stdlib_module_names, "retinue"}, path


def test_the_rule_finds_what_breaks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "batching").mkdir()
    bad = tmp_path / "batching" / "bad.py"
    bad.write_text(
        "import retinue\n"
        "import retinue.encoder\n"
        "from retinue import ThreadedMicroBatcher\n"
        "from retinue import encoder\n"
        "from retinue.decoders.text import StopFilter\n"
        "from ..media import Image\n"
        "def late(): from retinue.prompt import lay_out\n"
        "from retinue.errors import InvalidInput\n"
        "from . import planner\n"
        "from .planner import Limits\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert [line.split(":")[1] for line in violations(bad)] == [str(n) for n in range(1, 8)]
