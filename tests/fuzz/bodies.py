"""Chat requests that no SDK would send: valid ones with wrong types, numbers, nesting, keys and bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

__all__ = ["Object", "chats", "images_in", "written"]


class Object(list[tuple[str, Any]]):
    """A JSON object that may say a key twice."""


class Raw(str):
    """JSON text, or what claims to be."""


def nested(depth: int, opening: str = "[", closing: str = "]") -> Raw:
    return Raw(opening * depth + closing * depth)


_NUMBERS: list[Any] = [
    0, -1, 1, 2, 0.5, -0.0, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, float("nan"), float("inf"),
    -float("inf"), Raw("1e400"), Raw("-1E-400"), Raw("1" + "0" * 400), Raw("9" * 4300), Raw("9" * 4400),
    Raw("01"), Raw("+1"), Raw(".5"), Raw("0x10"),
]  # fmt: skip
_TEXTS = [
    "", "demo", "user", "\0", "\ud800", "a\udfffb", "\U0010ffff", "\u202e", "<prompt_embeds>",
    "<##PROMPT_EMBEDS##>", "<|im_end|>", "<|image_pad|>", "{{ 7 * 7 }}", "{% for x in y %}", "a" * 5000,
]  # fmt: skip
_DEEP = [
    nested(10), nested(260), nested(1100), nested(50_000), nested(260, '{"a":', "1}"),
    nested(1100, '{"a":', "}"), nested(300, '[{"text":', "1}]"), Raw("[" * 2000),
]  # fmt: skip
_RAW = [Raw(text) for text in ("True", "undefined", '"', "", "{", "'x'", '"\\ud800"', '"\\x"')]
_KEYS = [
    "model", "messages", "content", "role", "type", "text", "image_url", "url", "data", "stream", "seed",
    "max_tokens", "__proto__", "__class__", "", "\ud800", "a" * 3000, "include_usage", "detail", "uuid",
]  # fmt: skip

_scalars = st.one_of(
    st.sampled_from([None, True, False]),
    st.sampled_from(_NUMBERS),
    st.sampled_from(_TEXTS),
    st.text(max_size=20),
    st.sampled_from(_DEEP),
    st.sampled_from(_RAW),
)
_odd = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(st.tuples(st.sampled_from(_KEYS), inner), max_size=3).map(Object)
    ),
    max_leaves=4,
)


def _parts(urls: st.SearchStrategy[str], embeds: st.SearchStrategy[str]) -> st.SearchStrategy[Object]:
    bare = st.builds(lambda url: Object([("type", "image_url"), ("image_url", url)]), urls)
    image = st.builds(lambda part: Object([part[0], ("image_url", Object([("url", part[1][1])]))]), bare)
    text = st.builds(lambda words: Object([("type", "text"), ("text", words)]), st.text(max_size=12))
    embedded = st.builds(lambda data: Object([("type", "prompt_embeds"), ("data", data)]), embeds)
    return st.one_of(image, image, bare, text, text, embedded)


_fields: dict[str, st.SearchStrategy[Any]] = {
    "stream": st.booleans(),
    "stream_options": st.builds(lambda value: Object([("include_usage", value)]), st.booleans()),
    "temperature": st.sampled_from([0, 0.5, 1, 50]),
    "top_p": st.sampled_from([0.1, 1]),
    "seed": st.integers(0, 9),
    "stop": st.just("4") | st.builds(lambda: ["4", "2"]),  # a new list each time, for it will be changed
    "n": st.just(1),
    "user": st.just("u"),
    "metadata": st.builds(lambda: Object([("a", "b")])),
    "response_format": st.builds(lambda: Object([("type", "text")])),
    "tools": st.builds(lambda: [Object([("type", "function")])]),
    "logprobs": st.booleans(),
}


@st.composite
def _valid(draw: st.DrawFn, parts: st.SearchStrategy[Object]) -> Object:
    messages: list[Any] = []
    for _ in range(draw(st.integers(1, 3))):
        role = draw(st.sampled_from(["user", "user", "system", "assistant"]))
        content = draw(st.text(max_size=12) | st.lists(parts, max_size=4))
        messages.append(Object([("role", role), ("content", content)]))
    chat = Object([("model", "demo"), ("messages", messages), ("max_tokens", draw(st.integers(1, 4)))])
    for name in draw(st.lists(st.sampled_from(sorted(_fields)), max_size=3, unique=True)):
        chat.append((name, draw(_fields[name])))
    return chat


@st.composite
def chats(draw: st.DrawFn, urls: st.SearchStrategy[str], embeds: st.SearchStrategy[str]) -> bytes:
    """The body of a chat request: valid, then changed in up to four places, then written in some encoding."""
    chat = draw(_valid(_parts(urls, embeds)))
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 2, 4]))):
        place = draw(st.sampled_from(_places(chat)))
        draw(_CHANGES)(draw, *place)
    return draw(_ENCODINGS)(draw, written(chat, escaped=draw(st.booleans())))


Place = tuple[Any, int]  # a list or an Object, and which of its elements


def _places(value: Any) -> list[Place]:
    found: list[Place] = []
    if isinstance(value, list):
        for index, element in enumerate(value):
            found.append((value, index))
            found += _places(element[1] if isinstance(value, Object) else element)
    return found or [([value], 0)]


def _put(container: Any, index: int, value: Any) -> None:
    container[index] = (container[index][0], value) if isinstance(container, Object) else value


def _value(container: Any, index: int) -> Any:
    return container[index][1] if isinstance(container, Object) else container[index]


def _replace(draw: st.DrawFn, container: Any, index: int) -> None:
    _put(container, index, draw(_odd))


def _remove(draw: st.DrawFn, container: Any, index: int) -> None:
    del container[index]


def _repeat(draw: st.DrawFn, container: Any, index: int) -> None:
    """The same once more or very often; a key twice has another value, too."""
    if isinstance(container, Object):
        container.insert(draw(st.integers(0, len(container))), (container[index][0], draw(_odd)))
    else:
        container[index:index] = [container[index]] * draw(st.sampled_from([1, 16, 17, 500]))


def _wrap(draw: st.DrawFn, container: Any, index: int) -> None:
    value = _value(container, index)
    key = draw(st.sampled_from([None, "url", "text"]))
    _put(container, index, [value] if key is None else Object([(key, value)]))


def _rename(draw: st.DrawFn, container: Any, index: int) -> None:
    if isinstance(container, Object):
        container[index] = (draw(st.sampled_from(_KEYS)), container[index][1])


def _add(draw: st.DrawFn, container: Any, index: int) -> None:
    if isinstance(container, Object):
        container.append((draw(st.sampled_from(_KEYS) | st.sampled_from(sorted(_fields))), draw(_odd)))


_CHANGES = st.sampled_from([_replace, _replace, _remove, _repeat, _wrap, _rename, _add])


def written(value: Any, *, escaped: bool) -> str:
    """``value`` as JSON text; what is not ASCII as escapes, or as it is."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Object):
        pairs = (f"{written(key, escaped=escaped)}:{written(one, escaped=escaped)}" for key, one in value)
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(one, escaped=escaped) for one in value) + "]"
    return json.dumps(value, ensure_ascii=escaped)


def _as_utf8(draw: st.DrawFn, text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _as_utf16(draw: st.DrawFn, text: str) -> bytes:
    return text.encode(draw(st.sampled_from(["utf-16", "utf-16-le", "utf-16-be", "utf-32"])), "surrogatepass")


def _with_mark(draw: st.DrawFn, text: str) -> bytes:
    return b"\xef\xbb\xbf" + _as_utf8(draw, text)


def _cut(draw: st.DrawFn, text: str) -> bytes:
    body = _as_utf8(draw, text)
    return body[: draw(st.integers(0, len(body)))]


def _flipped(draw: st.DrawFn, text: str) -> bytes:
    body = bytearray(_as_utf8(draw, text))
    for _ in range(draw(st.integers(1, 4))):
        body[draw(st.integers(0, len(body) - 1))] ^= draw(st.integers(1, 255))
    return bytes(body)


def _twice(draw: st.DrawFn, text: str) -> bytes:
    return _as_utf8(draw, text) * 2


_Encoding = Callable[[st.DrawFn, str], bytes]
_ENCODINGS: st.SearchStrategy[_Encoding] = st.sampled_from(
    [*[_as_utf8] * 10, _as_utf16, _with_mark, _cut, _flipped, _twice]
)


def images_in(body: bytes) -> int:
    """How many image parts Python's own parser finds in a chat request; 0 for what is none."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return 0
    return sum(
        isinstance(part, dict) and part.get("type") == "image_url"
        for message in _list_in(request, "messages")
        for part in _list_in(message, "content")
    )


def _list_in(value: Any, name: str) -> list[Any]:
    found = value.get(name) if isinstance(value, dict) else None
    return found if isinstance(found, list) else []
