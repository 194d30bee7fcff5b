"""What an artifact must be where it is an array: checked one by one, and put right where that is harmless.

Neither torch nor numpy is imported: an array is what has a ``shape`` and a ``dtype``, and what else it has
tells whose it is. All other artifacts pass untouched.

Thread rules
    Everything here runs on the actor thread. Artifacts die on any thread; there they only append to a deque,
    which the actor thread empties.
"""

from __future__ import annotations

import collections
import math
import weakref
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from retinue.batching.outcome import Refused, describe, one_per_item
from retinue.batching.planner import positive_int
from retinue.encoder.backend import AnyBackend
from retinue.errors import EncoderFailed

__all__ = ["ArtifactContract", "CheckedBackend"]

#: What a library raises that cannot do what is asked of an array. All else, such as a device's error or the
#: end of its memory, ``forward_batch`` itself could have raised, and goes where that would have gone.
_CANNOT = (AttributeError, NotImplementedError, TypeError, ValueError)


class _Wrong(Exception):
    """What is wrong with an artifact, for a sentence that begins with it."""


class CheckedBackend:
    """A backend whose artifacts are checked. What it declares of them is read after each ``build``."""

    def __init__(self, backend: AnyBackend) -> None:
        self._backend = backend
        self._contract = ArtifactContract()

    def build(self, model_id: str) -> None:
        """The backend's own; ``ValueError`` too if what it declares makes no sense."""
        backend = self._backend
        backend.build(model_id)
        self._contract = ArtifactContract(
            hidden_size=backend.hidden_size, dtype=backend.dtype, check_finite=backend.check_finite
        )

    def forward_batch(self, items: list[Any], **bucket: int) -> list[Any]:
        """The backend's own artifacts, one per item, a ``Refused`` in place of each offender."""
        expected = len(items)
        artifacts = self._backend.forward_batch(items, **bucket)
        return self._contract.checked(one_per_item(artifacts, expected, "forward_batch"))


class ArtifactContract:
    """Checks what one built backend returns: an offender is refused alone, its neighbors are delivered.

    An array must have two axes, ``(rows, hidden)``, neither empty; one width; the dtype, if one is declared;
    no NaN and no infinity; and storage that no artifact of an earlier call is in. One that lies in a larger
    buffer, or not contiguously, is copied; one that requires a gradient is detached.

    ``hidden_size``: the width. None: that of most artifacts so far, the earlier one where two are equally
    frequent; so a first artifact that is the odd one costs the next. ``dtype``: a dtype of torch or numpy, or
    a name such as "bfloat16"; None: any. ``check_finite``: whether values are looked at.

    ``ValueError``: ``hidden_size`` is no positive int.
    """

    def __init__(
        self, *, hidden_size: int | None = None, dtype: Any | None = None, check_finite: bool = True
    ) -> None:
        if hidden_size is not None:
            hidden_size = positive_int(hidden_size, "hidden_size must be a positive int or None")
        self._hidden_size = hidden_size
        self._dtype = None if dtype is None else _name(dtype)
        self._check_finite = check_finite
        self._usual = _Majority()
        self._storages = _Storages()

    def checked(self, artifacts: Sequence[Any]) -> list[Any]:
        """The artifacts of one ``forward_batch``, in order, a ``Refused`` in place of each offender."""
        self._storages.begin_call()
        for artifact in artifacts:
            if _is_array(artifact) and _is_matrix(artifact):
                self._usual.count(artifact.shape[1])
        return [self._checked(artifact) if _is_array(artifact) else artifact for artifact in artifacts]

    def _checked(self, artifact: Any) -> Any:
        try:
            self._check_form(artifact)
            home = _home(artifact)
            use = self._storages.use(home)
            if use == "in use":
                raise _Wrong(
                    "must be in storage of its own: expected a new one, got that of an artifact of an "
                    "earlier call that is still in use: the backend reuses its output buffer"
                )
            own = _own(artifact, home, copy=use == "reused")
            if self._check_finite:
                _check_finite(own.array)
        except _Wrong as wrong:
            return Refused(EncoderFailed(f"an artifact {wrong}"))
        except _CANNOT as error:
            kind = type(artifact).__name__
            return Refused(EncoderFailed(f"an artifact, a {kind}, cannot be checked: {describe(error)}"))
        if not own.is_copy:
            self._storages.note(home, own.array)
        return own.array

    def _check_form(self, array: Any) -> None:
        width = self._hidden_size or self._usual.value
        if not _is_matrix(array) or array.shape[1] != width:
            hidden = "hidden" if width is None else width
            raise _Wrong(
                f"must have 2 axes and 1 row or more: expected (rows, {hidden}), got {tuple(array.shape)}"
            )
        if self._dtype is not None and (name := _name(array.dtype)) != self._dtype:
            raise _Wrong(f"must have the dtype that the backend declares: expected {self._dtype}, got {name}")


class _Majority:
    """The value that most of those counted had, in two fields: Boyer and Moore's majority vote (1981)."""

    def __init__(self) -> None:
        self.value: int | None = None
        self._lead = 0

    def count(self, value: int) -> None:
        if value == self.value:
            self._lead += 1
        elif self._lead:
            self._lead -= 1
        else:
            self.value, self._lead = value, 1


# -- whose storage -------------------------------------------------------------------------------------


class _Home(NamedTuple):
    """Where an artifact's values are. ``keeper`` lives as long as they do; ``address`` is 0 if unknown."""

    keeper: Any
    address: int
    is_larger: bool  # than the artifact, or may be


def _home(artifact: Any) -> _Home:
    owner = artifact
    while (base := getattr(owner, "base", None)) is not None:  # a numpy view's
        owner = base
    if hasattr(owner, "untyped_storage"):  # torch; of numpy's too, what ``Tensor.numpy`` made
        storage = owner.untyped_storage()
        return _Home(storage, storage.data_ptr(), storage.nbytes() > artifact.nbytes)
    if hasattr(owner, "nbytes") and hasattr(owner, "__array_interface__"):
        return _Home(owner, owner.__array_interface__["data"][0], owner.nbytes > artifact.nbytes)
    return _Home(None, 0, owner is not artifact)


_Use: TypeAlias = Literal["free", "in use", "reused"]


class _Storage(weakref.ref[Any]):
    """A home's keeper, for as long as anything keeps it alive; it says so when it dies."""

    __slots__ = ("address", "artifact", "call", "was_refused")

    address: int
    artifact: weakref.ref[Any]  # the object that its caller got
    call: int
    was_refused: bool  # it came back in a later call, and that was an error


class _Storages:
    """Which storages artifacts went out in, uncopied, in which call. Keeps nothing alive.

    Addresses are their keys, not the objects that keep them: one buffer may be wrapped anew for each call, as
    ``torch.from_numpy`` and CUDA graphs do. A dead keeper's address is free, for whatever is allocated there.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Storage] = {}
        self._dead: collections.deque[_Storage] = collections.deque()
        self._call = 0

    def begin_call(self) -> None:
        """Forget what has died. What one call returns may share storage: it was not overwritten since."""
        self._call += 1
        while self._dead:
            storage = self._dead.popleft()
            if self._known.get(storage.address) is storage:
                del self._known[storage.address]

    def use(self, home: _Home) -> _Use:
        """Whether an artifact of this call may be there, must not, or is to be copied from there.

        Where an earlier artifact is gone and its storage is not, somebody may have kept a view of it, or only
        the backend its buffer. That is an error once; then what comes from there is copied, so that
        a backend that has such a buffer, and returns all of it now and then, is not refused ever after.
        """
        earlier = self._known.get(home.address)
        if earlier is None or earlier.call == self._call or earlier() is None:
            return "free"
        if earlier.was_refused and earlier.artifact() is None:
            return "reused"
        earlier.was_refused = True
        return "in use"

    def note(self, home: _Home, artifact: Any) -> None:
        """``artifact`` goes out in ``home``."""
        if home.address and home.keeper is not None:
            storage = _Storage(home.keeper, self._dead.append)
            storage.address, storage.artifact = home.address, weakref.ref(artifact)
            storage.call, storage.was_refused = self._call, False
            self._known[home.address] = storage


# -- what arrays have in common ------------------------------------------------------------------------


def _is_array(artifact: Any) -> bool:
    return isinstance(getattr(artifact, "shape", None), tuple) and hasattr(artifact, "dtype")


def _is_matrix(array: Any) -> bool:
    return len(array.shape) == 2 and 0 not in array.shape


def _name(dtype: Any) -> str:
    """A dtype of torch or numpy, a type of numpy's or already a name; as a name, such as "float32"."""
    if not isinstance(dtype, str):
        dtype = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    return str(dtype).rpartition(".")[2]


class _Own(NamedTuple):
    """An array that is its caller's alone."""

    array: Any
    is_copy: bool


def _own(array: Any, home: _Home, *, copy: bool) -> _Own:
    """``array``, detached, contiguous and with no larger buffer behind it; with ``copy``, always a copy."""
    copy = copy or home.is_larger
    if not hasattr(array, "untyped_storage"):
        is_scattered = hasattr(array, "flags") and not array.flags.c_contiguous
        return _Own(array.copy(), True) if copy or is_scattered else _Own(array, False)
    if array.requires_grad:
        array = array.detach()
    is_scattered = not array.is_contiguous()
    if not (copy or is_scattered):
        return _Own(array, False)
    array = array.contiguous() if is_scattered else array.clone()
    array[0, 0].item()  # artifacts are finished when they are handed over: wait for the device
    return _Own(array, True)


def _check_finite(array: Any) -> None:
    """``_Wrong`` if a value is NaN or infinite."""
    value = _not_finite(array)
    if value is not None:
        raise _Wrong(f"must be finite: expected no NaN and no infinity, got {value}")


def _not_finite(array: Any) -> float | None:
    """A value that is NaN or infinite, if there is one."""
    if _name(array.dtype).startswith("complex"):
        value = _not_finite(array.real)
        return _not_finite(array.imag) if value is None else value
    if hasattr(array, "untyped_storage"):
        wide = array if array.element_size() > 1 else array.float()  # float8 has neither sums nor extremes
        if math.isfinite(wide.sum()):  # then its terms are; otherwise it may have overflowed
            return None
        extremes = wide.aminmax()
    else:
        if hasattr(array, "__array_interface__") and array.dtype.itemsize < 4:
            array = array.astype("float32")  # numpy takes several times as long for the extremes of float16
        extremes = array.min(), array.max()  # numpy's sums take longer, and warn where they overflow
    return next((float(value) for value in extremes if not math.isfinite(value)), None)
