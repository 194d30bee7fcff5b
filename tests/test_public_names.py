"""The public surface: these names and no others."""

from __future__ import annotations

import importlib
import inspect

import pytest

import retinue

PUBLIC = [
    "AsyncVisionEncoder",
    "BackendLost",
    "BatchRecord",
    "DeadlineExceeded",
    "EncoderFailed",
    "EncoderUnavailable",
    "InvalidInput",
    "Observer",
    "Overloaded",
    "Pending",
    "Preprocessed",
    "RequestRecord",
    "RetinueError",
    "ThreadedMicroBatcher",
    "VisionEncoderBackend",
    "load_backend",
]


def test_the_public_names_are_the_documented_ones_in_order() -> None:
    assert retinue.__all__ == PUBLIC
    assert sorted(PUBLIC) == PUBLIC


def test_nothing_else_looks_public() -> None:
    """Whoever types ``retinue.`` sees the names above and the packages; no import of ours shows through."""
    others = {name for name in vars(retinue) if not name.startswith("_")} - set(PUBLIC)
    assert {name for name in others if not inspect.ismodule(getattr(retinue, name))} == set()
    assert {getattr(retinue, name).__name__.partition(".")[0] for name in others} == {"retinue"}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_documented_with_all_that_it_offers(name: str) -> None:
    public = getattr(retinue, name)
    assert (public.__doc__ or "").strip()
    assert not public.__doc__.startswith(f"{name}("), "what a dataclass writes by itself says nothing"
    members = vars(public) if inspect.isclass(public) else {}
    for member, value in members.items():
        if inspect.isfunction(value) and not member.startswith("_"):
            assert (value.__doc__ or "").strip(), member


@pytest.mark.parametrize("package", ["retinue.batching", "retinue.encoder", "retinue.errors"])
def test_what_a_package_lists_is_there_and_sorted(package: str) -> None:
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert len(set(module.__all__)) == len(module.__all__)
