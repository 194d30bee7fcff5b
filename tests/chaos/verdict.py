"""Whether an answer is honest: a function of what was asked, what came, and what the seed did meanwhile.

A request that stayed gets what it earned. It may get another error only where something excuses that: a call
that failed with its pictures and nobody else's, which is not run again; a backend that fails so often that
batches are not split, or not to the end, or that is stuck, or lost twice with it in flight; an upstream that
was away; more requests than the limits take; its time is up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .faults import Call
from .upstream import Trouble

__all__ = ["Answer", "Asked", "Circumstances", "Look", "judge", "lies_about_readiness"]

_SLACK_S = 0.5  # between two processes' views of the same moment
_FRESH_S = 10.0  # so long readiness believes in a success

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request and what it earns: a status, and ``says``, the text of the answer or a part of the error.

    ``tag``: of its pictures; empty if it has none. ``says`` is None where any text will do. ``param`` and
    ``code``: of the error. ``through_proxy``: an upstream answers it.
    """

    kind: str
    tag: str = ""
    through_proxy: bool = False
    status: int = 200
    says: str | None = None
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came, and when. ``status`` is 0 where nothing did; ``whole``: it came to its end.

    ``error``: the value of "error" in its body, or in the last event of a stream.
    """

    status: int
    began_s: float
    ended_s: float
    text: str = ""
    error: Any = None
    whole: bool = True
    retry_after: str | None = None


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What went on: the calls of the server that was asked, and the troubles by their kind."""

    request_timeout_s: float
    fetch_timeout_s: float
    forward_timeout_s: float
    calls: Sequence[Call] = ()
    floods: Sequence[Trouble] = ()
    upstream: Sequence[Trouble] = ()
    _by_tag: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for number, call in enumerate(self.calls):
            for tag in set(call.tags):
                self._by_tag[tag].append(number)

    def calls_with(self, tag: str) -> Sequence[int]:
        """Where the calls are that had a picture of this request in them."""
        return self._by_tag.get(tag, ())

    def stuck(self, began_s: float, ended_s: float) -> bool:
        """Whether a call had been running for longer than it may at any moment between these."""
        return any(from_s <= ended_s and began_s <= until_s for from_s, until_s in self._stuck())

    def stuck_throughout(self, began_s: float, ended_s: float) -> bool:
        """Whether one had been all the time between these."""
        return any(from_s <= began_s and ended_s <= until_s for from_s, until_s in self._stuck())

    def _stuck(self) -> list[tuple[float, float]]:
        late_s = self.forward_timeout_s
        return [(call.began_s + late_s, call.ended_s) for call in self.calls if call.lasts(late_s)]

    def ailing(self, began_s: float, ended_s: float) -> bool:
        """Whether a call was stuck, or the backend lost and not built again, at any moment between these."""
        next_s = [call.began_s for call in self.calls[1:]] + [float("inf")]
        lost = any(
            call.trouble == "lost" and call.ended_s <= ended_s and began_s <= until_s
            for call, until_s in zip(self.calls, next_s, strict=True)
        )
        return lost or self.stuck(began_s, ended_s)

    def succeeded(self, began_s: float, ended_s: float) -> bool:
        """Whether a call ended well between these."""
        return any(not call.trouble and began_s <= call.ended_s <= ended_s for call in self.calls)


def judge(asked: Asked, answer: Answer, during: Circumstances) -> str:
    """What is wrong with ``answer``; nothing if it is honest."""
    if answer.error is not None and (problem := _misshapen(answer)):
        return problem
    if _is_earned(asked, answer) or _is_excused(asked, answer, during):
        return ""
    return f"asked {asked}, which nothing excuses: {answer}"


def _misshapen(answer: Answer) -> str:
    """How the error differs from what OpenAI's clients read."""
    error = answer.error
    if not isinstance(error, Mapping) or set(error) != {"message", "type", "param", "code"}:
        return f"no error of OpenAI's shape: {answer}"
    status = answer.status if answer.status != 200 else 500  # in a stream that had begun
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    if error["type"] != kind or not isinstance(error["message"], str) or not error["code"]:
        return f"an error that contradicts its status: {answer}"
    if "schedule" in error["message"]:
        return f"an error that tells what the backend raised: {answer}"
    return ""


def _is_earned(asked: Asked, answer: Answer) -> bool:
    if answer.status != asked.status or not answer.whole:
        return False
    if asked.status == 200:
        return answer.error is None and asked.says in (None, answer.text)
    error = answer.error
    return (
        error is not None
        and (asked.says or "") in error["message"]
        and asked.code in (None, error["code"])
        and asked.param in (None, error["param"])
    )


def _is_excused(asked: Asked, answer: Answer, during: Circumstances) -> bool:
    began_s, ended_s = answer.began_s - _SLACK_S, answer.ended_s + _SLACK_S
    away = asked.through_proxy and any(trouble.touches(began_s, ended_s) for trouble in during.upstream)
    if away and _is_what_a_lost_upstream_leaves(asked, answer):
        return True
    match answer.status, (answer.error or {}).get("code"):
        case 429, "overloaded":
            flooded = any(flood.touches(began_s, ended_s) for flood in during.floods)
            return flooded and (answer.retry_after or "").isdigit() and answer.retry_after != "0"
        case 504, "deadline_exceeded":
            was_stuck = any(
                during.calls[number].lasts(during.forward_timeout_s)
                for number in during.calls_with(asked.tag)
            )
            return was_stuck or answer.ended_s - answer.began_s >= during.request_timeout_s
        case 503, "encoder_unavailable":
            return during.stuck(began_s, ended_s)
        case 500, "encoder_failed":
            return _may_fail(asked.tag, during)
        case 400, "invalid_input":
            waited = answer.ended_s - answer.began_s >= during.fetch_timeout_s
            return waited and "its URL did not finish" in answer.error["message"]
    return False


def _may_fail(tag: str, during: Circumstances) -> bool:
    """Whether no call had to show that the pictures of this request are good."""
    calls = during.calls
    failed = [number for number in during.calls_with(tag) if calls[number].trouble]
    return (
        any(calls[number].trouble == "broken" or {*calls[number].tags} == {tag} for number in failed)
        or sum(calls[number].trouble == "lost" for number in failed) > 1
        or any(_comes_after_two_in_vain(calls, number) for number in failed)
        or (bool(failed) and _may_have_no_call_left(calls, failed[0]))
    )


def _comes_after_two_in_vain(calls: Sequence[Call], number: int) -> bool:
    """Whether two batches may have been split before this call, none of whose calls succeeded."""
    before = calls[max(0, number - 2) : number]
    return len(before) == 2 and all(call.trouble for call in before)


def _may_have_no_call_left(calls: Sequence[Call], number: int) -> bool:
    """Whether so much failed after this call, the first of its batch, that its search had to be given up."""
    most = 4 * (len(calls[number].tags) - 1).bit_length() + 4
    after = calls[number + 1 : number + 1 + most]
    return len(after) == most and sum(bool(call.trouble) for call in after) >= most // 2 - 1


def _is_what_a_lost_upstream_leaves(asked: Asked, answer: Answer) -> bool:
    """Nothing made up: no answer, an error that says so, or a beginning that does not pass for a whole."""
    if answer.status in (502, 503):
        return answer.error is not None
    is_cut = answer.status in (0, 200, asked.status) and not answer.whole
    return is_cut and (asked.says or "").startswith(answer.text)


@dataclass(frozen=True)
class Look:
    """One answer of ``/ready``, and when it was asked for and given."""

    began_s: float
    ended_s: float
    status: int
    body: Mapping[str, Any]


def lies_about_readiness(looks: Iterable[Look], during: Circumstances) -> list[str]:
    """What ``/ready`` said and the journal denies."""
    return [f"{problem}: {look}" for look in looks if (problem := _lie(look, during))]


def _lie(look: Look, during: Circumstances) -> str:
    body = look.body
    if body["ready"] != (look.status == 200) or body["ready"] == bool(body["reason"]):
        return "contradicts itself"
    began_s, ended_s = look.began_s, look.ended_s
    if body["ready"]:
        if during.stuck_throughout(began_s - _SLACK_S, ended_s + _SLACK_S):
            return "ready, though a call is stuck"
        lately = during.succeeded(began_s - _FRESH_S - _SLACK_S, ended_s + _SLACK_S)
        return "" if lately else "ready, though no call has succeeded lately"
    if during.ailing(began_s - _SLACK_S, ended_s + _SLACK_S):
        return ""
    surely = during.succeeded(began_s - _FRESH_S + _SLACK_S, began_s - _SLACK_S)
    return "not ready, though a call has succeeded lately" if surely else ""
