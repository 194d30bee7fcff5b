"""``load_backend``: what it finds, and how it says what is wrong with a name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from retinue import VisionEncoderBackend, load_backend

MODULE = """
from retinue import VisionEncoderBackend

class Good(VisionEncoderBackend):
    def build(self, model_id): ...
    def forward_batch(self, items, target_bucket=None): return items

class Half(VisionEncoderBackend):
    def build(self, model_id): ...

class Picky(Good):
    def __init__(self): raise RuntimeError("no device")

class Other: ...

good = Good()
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package ``eyes`` with modules that are good, that lack an import, and that raise."""
    package = tmp_path / "eyes"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "good.py").write_text(MODULE)
    (package / "lacks.py").write_text("import eyes.no_such_part")
    (package / "raises.py").write_text("1 / 0")
    (tmp_path / "eyesore.py").write_text("import eyesor")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "eyes"]:
        monkeypatch.delitem(sys.modules, name)


def test_it_imports_and_constructs_the_class() -> None:
    backend = load_backend("eyes.good:Good")
    assert isinstance(backend, VisionEncoderBackend)
    assert type(backend).__name__ == "Good"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "a backend is named \"package.module:Class\", got ''"),
        ("eyes.good", "a backend is named \"package.module:Class\", got 'eyes.good'"),
        ("eyes.good:", "a backend is named \"package.module:Class\", got 'eyes.good:'"),
        (":Good", "a backend is named \"package.module:Class\", got ':Good'"),
        (".good:Good", "a backend is named \"package.module:Class\", got '.good:Good'"),
        ("no_eyes:Good", "'no_eyes:Good': there is no module 'no_eyes'"),
        ("no_eyes.good:Good", "'no_eyes.good:Good': there is no module 'no_eyes'"),
        ("eyes.nothing:Good", "'eyes.nothing:Good': there is no module 'eyes.nothing'"),
        ("eyes.good.Good:x", "'eyes.good.Good:x': there is no module 'eyes.good.Good'"),
        ("eyes.good:Nothing", "'eyes.good:Nothing': eyes.good has no VisionEncoderBackend called 'Nothing'"),
        ("eyes.good:Other", "'eyes.good:Other': eyes.good has no VisionEncoderBackend called 'Other'"),
        ("eyes.good:good", "'eyes.good:good': eyes.good has no VisionEncoderBackend called 'good'"),
        ("eyes.good:Half", "'eyes.good:Half': Half does not define forward_batch"),
    ],
)
def test_it_says_what_is_wrong_with_a_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_backend(name)


def test_the_contract_itself_is_no_backend() -> None:
    with pytest.raises(ValueError, match="VisionEncoderBackend does not define build, forward_batch"):
        load_backend("retinue:VisionEncoderBackend")


def test_what_a_module_raises_as_it_is_imported_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        load_backend("eyes.raises:Good")


def test_a_module_that_lacks_an_import_says_which() -> None:
    for name, lacking in (("eyes.lacks:Good", "eyes.no_such_part"), ("eyesore:Good", "eyesor")):
        with pytest.raises(ModuleNotFoundError) as caught:
            load_backend(name)
        assert caught.value.name == lacking


def test_what_the_class_raises_comes_through() -> None:
    with pytest.raises(RuntimeError, match="no device"):
        load_backend("eyes.good:Picky")
