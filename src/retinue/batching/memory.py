"""Out of memory: how to tell, and how much a batch may cost afterwards. Pure; fed by the actor."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Ceilings", "is_out_of_memory"]

#: Calls near the ceiling that must succeed before it is raised, by an eighth.
CALLS_PER_RAISE = 32
_MAX_KEYS = 256  # remembered

#: What torch and CUDA, onnxruntime and its arena, and XLA say, in lower case.
_SAYINGS = (
    "out of memory",
    "can't allocate memory",
    "failed to allocate memory",
    "not enough memory",
    "resource_exhausted",
    "status_alloc_failed",
)
#: Whose errors such words are believed of, besides ``RuntimeError``: an author's ``ValueError`` may quote.
_MODULES = ("torch", "onnxruntime", "jaxlib", "cupy", "tensorrt")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory, the host's or the device's, was not enough.

    ``MemoryError``; any class named ``OutOfMemoryError``, as torch's and CuPy's are; what torch, CUDA and
    onnxruntime say in errors of no class of their own. None of them is imported.
    """
    kinds = type(error).__mro__
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in kinds):
        return True
    if type(error) is not RuntimeError and type(error).__module__.partition(".")[0] not in _MODULES:
        return False
    try:
        text = str(error).lower()
    except Exception:
        return False
    return any(saying in text for saying in _SAYINGS)


class _Ceiling:
    __slots__ = ("cost", "failed_cost", "successes")

    def __init__(self, failed_cost: int) -> None:
        self.failed_cost = failed_cost
        self.cost = max(1, failed_cost // 2)
        self.successes = 0  # near the ceiling, since it was set or raised


class Ceilings:
    """For each key that ran out of memory, the most that a batch of it may cost until more is shown to fit.

    A failure halves it. It is raised slowly while calls near it succeed, and forgotten once one succeeds that
    costs as much as the one that failed. A single item may always be tried.
    """

    def __init__(self) -> None:
        self._ceilings: dict[Hashable, _Ceiling] = {}
        self._before: dict[Hashable, _Ceiling | None] = {}  # of what a batch that is run again lowered

    def __bool__(self) -> bool:
        return bool(self._ceilings)

    def of(self, key: Hashable) -> int | None:
        """The ceiling of ``key``; None if there is none."""
        ceiling = self._ceilings.get(key)
        return None if ceiling is None else ceiling.cost

    def lowest(self) -> int | None:
        """The lowest of all keys'."""
        return min((ceiling.cost for ceiling in self._ceilings.values()), default=None)

    def failed(self, key: Hashable, cost: int) -> None:
        """Several items of this cost together did not fit."""
        self._before.setdefault(key, self._ceilings.pop(key, None))
        self._ceilings[key] = _Ceiling(cost)
        if len(self._ceilings) > _MAX_KEYS:
            del self._ceilings[next(iter(self._ceilings))]

    def failed_alone(self, key: Hashable) -> None:
        """One item did not fit, so the batch that it was in says nothing about others."""
        if key in self._before:
            before = self._before.pop(key)
            if before is None:
                self._ceilings.pop(key, None)
            else:
                self._ceilings[key] = before

    def succeeded(self, key: Hashable, cost: int) -> None:
        """A call of this cost did."""
        ceiling = self._ceilings.get(key)
        if ceiling is None or cost * 2 <= ceiling.cost:
            return
        if cost >= ceiling.failed_cost:
            del self._ceilings[key]
            return
        ceiling.successes += 1
        if ceiling.successes >= CALLS_PER_RAISE:
            ceiling.successes = 0
            ceiling.cost += max(1, ceiling.cost // 8)

    def settled(self) -> None:
        """Nothing is being run again."""
        self._before.clear()
