"""A chat request as OpenAI's clients write it, and its answer as they read it. No I/O.

A field does what OpenAI says that it does, or has nothing to do with the answer, or is refused by name:
none is ignored in silence. A field that is ``null`` is absent.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from retinue.decoders.generation import Generation, GenerationOptions
from retinue.errors import InvalidInput
from retinue.server.embeds import Embeds

__all__ = ["Answer", "BadParameter", "ChatRequest", "parse_chat", "part_name"]

#: How long an answer gets if the request does not say; less where the context leaves less.
DEFAULT_MAX_TOKENS = 256
MAX_STOP_STRINGS = 4

_MAX_TOKENS = ("max_completion_tokens", "max_tokens")
_SAMPLING = ("temperature", "top_p", "seed")
_TAKEN = frozenset(["model", "messages", "stream", "stream_options", "stop", *_MAX_TOKENS, *_SAMPLING])
# About who asks, and what the provider keeps and bills: nothing that an answer could show.
_WITHOUT_EFFECT = frozenset(
    [
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    ]
)
# What we lack, with the values that do not ask for it.
_ONLY: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "n": (1,),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "presence_penalty": (0, 0.0),
        "frequency_penalty": (0, 0.0),
        "logprobs": (False,),
        "logit_bias": ({},),
    }
)
_PART_FIELDS = MappingProxyType({"text": "text", "prompt_embeds": "data"})


class BadParameter(InvalidInput):
    """A field of the request is at fault; ``param`` names it, as in ``messages[0].content[2]``."""

    def __init__(self, *args: object, param: str | None = None, position: int | None = None) -> None:
        super().__init__(*args, position=position)
        self.param = param


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """What a chat request asks for.

    ``messages``: as they came; only the form of their parts is checked. ``options.max_new_tokens`` is what
    the field named ``max_tokens_param`` asks for; if that is None, it is our default.
    """

    model: str
    messages: Sequence[Mapping[str, Any]]
    options: GenerationOptions
    max_tokens_param: str | None
    stream: bool
    include_usage: bool

    def options_within(self, context: int | None, prompt_tokens: int) -> GenerationOptions:
        """``options`` for so long a prompt: our default takes what is left of ``context``, if less.

        ``BadParameter`` if nothing is left, or less than the request asks for.
        """
        if context is None:
            return self.options
        left = context - prompt_tokens
        if left < 1:
            raise BadParameter(
                f"the prompt has {prompt_tokens} tokens, which leaves no room for an answer "
                f"in the model's context of {context}",
                param="messages",
            )
        asked = self.options.max_new_tokens
        if self.max_tokens_param is None:
            return replace(self.options, max_new_tokens=min(asked, left))
        if asked > left:
            raise BadParameter(
                f"the prompt's {prompt_tokens} tokens and {self.max_tokens_param}={asked} make "
                f"{prompt_tokens + asked}, more than the model's context of {context}",
                param=self.max_tokens_param,
            )
        return self.options


def parse_chat(body: object) -> ChatRequest:
    """Check the parsed JSON of a request; ``BadParameter`` names what cannot be taken."""
    if not isinstance(body, dict):
        raise BadParameter("the body is no JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    _refuse_what_we_lack(fields)
    stream = _flag(fields, "stream", "stream")
    max_tokens_param = next((name for name in _MAX_TOKENS if name in fields), None)
    return ChatRequest(
        model=_model(fields),
        messages=_messages(fields),
        options=GenerationOptions(
            max_new_tokens=_max_tokens(fields), stop=_stop(fields.get("stop")), **_sampling(fields)
        ),
        max_tokens_param=max_tokens_param,
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
    )


def part_name(message: int, part: int) -> str:
    """How errors name a part of a message's content: both count from 0, as in the client's code."""
    return f"messages[{message}].content[{part}]"


def _refuse_what_we_lack(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _TAKEN or name in _WITHOUT_EFFECT:
            continue
        if name not in _ONLY:
            raise BadParameter(f"{reprlib.repr(name)} is no parameter that this server takes", param=name)
        if not any(type(value) is type(one) and value == one for one in _ONLY[name]):  # True is no 1
            raise BadParameter(
                f"{name}={reprlib.repr(value)}: this server takes only {_ONLY[name][0]!r}", param=name
            )


def _model(fields: Mapping[str, Any]) -> str:
    model = fields.get("model")
    if not isinstance(model, str):
        raise BadParameter(f"model={reprlib.repr(model)} is no model's name", param="model")
    return model


def _flag(fields: Mapping[str, Any], name: str, param: str) -> bool:
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise BadParameter(f"{param}={reprlib.repr(value)} is neither true nor false", param=param)


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise BadParameter("stream_options is only for requests with stream=true", param="stream_options")
    if not isinstance(options, dict):
        raise BadParameter(f"stream_options={reprlib.repr(options)} is no object", param="stream_options")
    for name, value in options.items():
        if name != "include_usage" and value not in (None, False):
            param = f"stream_options.{name}"
            raise BadParameter(f"{reprlib.repr(param)} is no option that this server has", param=param)
    return _flag(options, "include_usage", "stream_options.include_usage")


def _max_tokens(fields: Mapping[str, Any]) -> int:
    asked = {name: fields[name] for name in _MAX_TOKENS if name in fields}
    for name, value in asked.items():
        if type(value) is not int or not 1 <= value < 2**63:  # beyond, one parser makes a float of it
            raise BadParameter(f"{name}={reprlib.repr(value)} is no integer of 1 or more", param=name)
    if len(set(asked.values())) > 1:
        both = " and ".join(f"{name}={value}" for name, value in asked.items())
        raise BadParameter(f"{both} contradict each other", param="max_tokens")
    return next(iter(asked.values()), DEFAULT_MAX_TOKENS)


def _stop(stop: Any) -> tuple[str, ...]:
    strings = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or not all(isinstance(one, str) and one for one in strings):
        raise BadParameter(
            f"stop={reprlib.repr(stop)} is neither a string nor a list of strings, none of them empty",
            param="stop",
        )
    if len(strings) > MAX_STOP_STRINGS:
        raise BadParameter(
            f"stop has {len(strings)} strings, more than the {MAX_STOP_STRINGS} that a request may have",
            param="stop",
        )
    return tuple(strings)


def _sampling(fields: Mapping[str, Any]) -> dict[str, Any]:
    asked = {name: fields[name] for name in _SAMPLING if name in fields}
    for name, value in asked.items():
        if type(value) not in (int, float):  # the bounds are the options' own to check
            raise BadParameter(f"{name}={reprlib.repr(value)} is no number", param=name)
        try:
            GenerationOptions(**{name: value})
        except InvalidInput as error:
            raise BadParameter(str(error), param=name) from None
    return asked


def _messages(fields: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadParameter("messages is no list of one message or more", param="messages")
    for n, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadParameter(f"messages[{n}] is no object", param=f"messages[{n}]")
        content = message.get("content")
        for m, part in enumerate(content if isinstance(content, list) else []):
            _check_part(part, part_name(n, m))
    return messages


def _check_part(part: Any, name: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image_url":
        raise BadParameter(
            f"{name} is an image, and no vision encoder stands in front of this server", param=name
        )
    if not isinstance(kind, str) or kind not in _PART_FIELDS:
        raise BadParameter(
            f"{name} has type {reprlib.repr(kind)}, which is none of {', '.join(_PART_FIELDS)}", param=name
        )
    field = _PART_FIELDS[kind]
    if not isinstance(part.get(field), str | Embeds if kind == "prompt_embeds" else str):
        raise BadParameter(f"{name}.{field} is no string", param=name)
    if unknown := [key for key, value in part.items() if value is not None and key not in ("type", field)]:
        raise BadParameter(
            f"{name} has {reprlib.repr(unknown[0])}, which this server does not take", param=name
        )


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Builds an answer's JSON: one ``completion``, or the chunks of a stream.

    ``include_usage``: whether a stream ends in a chunk with the usage, and without a choice.
    """

    id: str
    created: int
    model: str
    include_usage: bool = False

    def completion(self, generation: Generation) -> dict[str, Any]:
        """The whole answer."""
        message = {"role": "assistant", "content": generation.text, "refusal": None}
        choice = _choice("message", message, generation.finish_reason)
        return self._object("chat.completion", [choice]) | {"usage": _usage(generation)}

    def opening(self) -> dict[str, Any]:
        """The first chunk of a stream: who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, text: str) -> dict[str, Any]:
        """A chunk with the next piece of the text."""
        return self._chunk({"content": text})

    def ending(self, generation: Generation) -> list[dict[str, Any]]:
        """The last chunk, or the last two: why the text ends, and the usage if it is asked for."""
        chunks = [self._chunk({}, generation.finish_reason)]
        if self.include_usage:
            chunks.append(self._object("chat.completion.chunk", []) | {"usage": _usage(generation)})
        return chunks

    def _chunk(self, delta: Mapping[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        chunk = self._object("chat.completion.chunk", [_choice("delta", delta, finish_reason)])
        return chunk | {"usage": None} if self.include_usage else chunk

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _choice(field: str, content: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, field: content, "logprobs": None, "finish_reason": finish_reason}


def _usage(generation: Generation) -> dict[str, int]:
    prompt, completion = generation.prompt_tokens, len(generation.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
