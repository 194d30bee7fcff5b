"""Chat requests and answers as JSON: the promises of ``retinue.server.chat``."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from retinue.decoders.generation import Generation, GenerationOptions
from retinue.server.chat import Answer, BadParameter, parse_chat

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
GENERATION = Generation(text="forty two", token_ids=[7, 8, 2], finish_reason="stop", prompt_tokens=40)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, **fields}


# ---- requests


def test_a_plain_request_gets_the_defaults() -> None:
    chat = parse_chat(body())
    assert chat.messages == MESSAGES
    assert chat.options == GenerationOptions(max_new_tokens=256)
    assert (chat.model, chat.stream, chat.include_usage, chat.max_tokens_param) == ("m", False, False, None)


def test_a_request_says_how_its_text_is_made() -> None:
    asked = {"temperature": 1, "top_p": 0.5, "seed": -3, "stop": ["a", "b"], "max_tokens": 9}
    chat = parse_chat(body(**asked, stream=True, stream_options={"include_usage": True}))
    assert chat.options == GenerationOptions(
        temperature=1, top_p=0.5, seed=-3, stop=("a", "b"), max_new_tokens=9
    )
    assert chat.stream
    assert chat.include_usage


@pytest.mark.parametrize(
    ("stop", "strings"), [("x", ("x",)), ([], ()), (["a", "b", "c", "d"], ("a", "b", "c", "d"))]
)
def test_stop_is_a_string_or_up_to_four(stop: object, strings: tuple[str, ...]) -> None:
    assert parse_chat(body(stop=stop)).options.stop == strings


@pytest.mark.parametrize("names", [["max_tokens"], ["max_completion_tokens"]])
def test_either_name_asks_for_a_length(names: list[str]) -> None:
    chat = parse_chat(body(**dict.fromkeys(names, 5)))
    assert chat.options.max_new_tokens == 5
    assert chat.max_tokens_param == names[0]


def test_both_names_may_say_the_same() -> None:
    assert parse_chat(body(max_tokens=5, max_completion_tokens=5)).options.max_new_tokens == 5


OPTIONAL = [
    *("stream", "stream_options", "stop", "max_tokens", "max_completion_tokens", "temperature", "top_p"),
    *("seed", "n", "tools", "response_format", "logprobs", "audio", "anything"),
]


def test_null_is_absent() -> None:
    assert parse_chat(body(**dict.fromkeys(OPTIONAL))) == parse_chat(body())


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
        {"safety_identifier": "s", "prompt_cache_key": "k", "prompt_cache_retention": "24h"},
        {"n": 1, "response_format": {"type": "text"}, "modalities": ["text"]},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": False, "logit_bias": {}},
        {"stream": False},
    ],
)
def test_what_changes_no_answer_is_taken(fields: dict[str, Any]) -> None:
    assert parse_chat(body(**fields)) == parse_chat(body())


def test_options_of_a_stream_that_change_nothing_are_taken() -> None:
    options = {"include_obfuscation": False, "include_usage": None}
    assert parse_chat(body(stream=True, stream_options=options)) == parse_chat(body(stream=True))


TOOL = {"type": "function", "function": {"name": "f"}}

#: Fields that are refused, the field that is named, and what the message says of it.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [TOOL]}, "tools", "'tools' is no parameter"),
    ({"tool_choice": "auto"}, "tool_choice", "'tool_choice' is no parameter"),
    ({"functions": []}, "functions", "'functions' is no parameter"),
    ({"parallel_tool_calls": True}, "parallel_tool_calls", "is no parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "json_object.*only {'type': 'text'}"),
    ({"logprobs": True}, "logprobs", "logprobs=True: this server takes only False"),
    ({"top_logprobs": 2}, "top_logprobs", "is no parameter"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "takes only {}"),
    ({"n": 2}, "n", "n=2: this server takes only 1"),
    ({"n": True}, "n", "n=True: this server takes only 1"),
    ({"presence_penalty": 0.5}, "presence_penalty", "presence_penalty=0.5: this server takes only 0"),
    ({"frequency_penalty": -1}, "frequency_penalty", "frequency_penalty=-1"),
    ({"modalities": ["text", "audio"]}, "modalities", r"takes only \['text'\]"),
    ({"audio": {"voice": "v", "format": "wav"}}, "audio", "is no parameter"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction", "is no parameter"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "is no parameter"),
    ({"verbosity": "low"}, "verbosity", "is no parameter"),
    ({"top_k": 5}, "top_k", "'top_k' is no parameter"),
    ({"nonsense": False}, "nonsense", "'nonsense' is no parameter"),
    ({"model": 3}, "model", "model=3"),
    ({"stream": "yes"}, "stream", "stream='yes' is neither true nor false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only for requests with stream=true"),
    ({"stream": True, "stream_options": []}, "stream_options", r"stream_options=\[\] is no object"),
    (
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "include_usage=1 is neither",
    ),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        "is no option",
    ),
    ({"stop": ""}, "stop", "stop='' is neither"),
    ({"stop": ["a", 1]}, "stop", r"stop=\['a', 1\] is neither"),
    ({"stop": list("abcde")}, "stop", "stop has 5 strings, more than the 4"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0 is no integer of 1 or more"),
    ({"max_tokens": 5.0}, "max_tokens", "max_tokens=5.0"),
    ({"max_completion_tokens": True}, "max_completion_tokens", "max_completion_tokens=True"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "tokens=6 and max_tokens=5 contradict"),
    ({"temperature": -0.1}, "temperature", "temperature=-0.1 is not a number of 0 or more"),
    ({"temperature": "hot"}, "temperature", "temperature='hot' is no number"),
    ({"top_p": 0}, "top_p", "top_p=0 is not a number above 0 and at most 1"),
    ({"top_p": 1.5}, "top_p", "top_p=1.5"),
    ({"seed": 1.5}, "seed", "seed=1.5 is not an integer"),
    ({"seed": True}, "seed", "seed=True is no number"),
    ({"messages": []}, "messages", "messages is no list of one message or more"),
    ({"messages": "hi"}, "messages", "messages is no list"),
    ({"messages": ["hi"]}, "messages[0]", r"messages\[0\] is no object"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_cannot_be_taken_is_refused_by_name_value_and_bound(
    fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(BadParameter, match=message) as refused:
        parse_chat(body(**fields))
    assert refused.value.param == param


@pytest.mark.parametrize("name", ["model", "messages"])
def test_a_request_has_a_model_and_messages(name: str) -> None:
    incomplete = body()
    del incomplete[name]
    with pytest.raises(BadParameter) as refused:
        parse_chat(incomplete)
    assert refused.value.param == name


@pytest.mark.parametrize("json", [[], "chat", None, 3])
def test_a_body_that_is_no_object_is_refused(json: object) -> None:
    with pytest.raises(BadParameter, match="no JSON object"):
        parse_chat(json)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "no vision encoder stands in front"),
        ({"type": "input_audio"}, "has type 'input_audio', which is none of text, prompt_embeds"),
        ({"type": ["text"]}, "has type"),
        ({"text": "x"}, "has type None"),
        ("text", "has type None"),
        (None, "has type None"),
        ({"type": "text"}, "text is no string"),
        ({"type": "text", "text": 5}, "text is no string"),
        ({"type": "prompt_embeds", "data": [1.0]}, "data is no string"),
        ({"type": "text", "text": "x", "colour": "red"}, "has 'colour'"),
    ],
)
def test_a_part_that_cannot_be_read_is_named(part: object, message: str) -> None:
    content = [{"type": "text", "text": "look"}, part]
    messages = [*MESSAGES, {"role": "assistant", "content": None}, {"role": "user", "content": content}]
    with pytest.raises(BadParameter, match=message) as refused:
        parse_chat(body(messages=messages))
    assert refused.value.param == "messages[2].content[1]"
    assert str(refused.value).startswith("messages[2].content[1]")


def test_a_long_value_does_not_make_a_long_message() -> None:
    with pytest.raises(BadParameter) as refused:
        parse_chat(body(temperature="x" * 10**6))
    assert len(str(refused.value)) < 200


def test_a_refusal_survives_a_copy_and_a_pickle() -> None:
    error = BadParameter("a text", param="stop")
    for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(other), other.param) == ("a text", "stop")


# ---- the context


@pytest.mark.parametrize(("context", "prompt", "left"), [(None, 10**6, 256), (512, 100, 256), (512, 500, 12)])
def test_our_default_takes_what_is_left(context: int | None, prompt: int, left: int) -> None:
    assert parse_chat(body()).options_within(context, prompt).max_new_tokens == left


def test_a_length_that_is_asked_for_may_fill_the_context() -> None:
    assert parse_chat(body(max_tokens=412)).options_within(512, 100).max_new_tokens == 412


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_length_that_does_not_fit_is_refused_and_never_shortened(name: str) -> None:
    message = f"the prompt's 100 tokens and {name}=413 make 513, more than the model's context of 512"
    with pytest.raises(BadParameter, match=message) as refused:
        parse_chat(body(**{name: 413})).options_within(512, 100)
    assert refused.value.param == name


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 1}])
def test_a_prompt_that_leaves_no_room_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadParameter, match=r"prompt has 512 tokens.* context of 512") as refused:
        parse_chat(body(**fields)).options_within(512, 512)
    assert refused.value.param == "messages"


# ---- answers

USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "total_tokens": 43}


def test_a_completion_is_one_object() -> None:
    assert Answer(id="chatcmpl-1", created=5, model="m").completion(GENERATION) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "forty two", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


@pytest.mark.parametrize("include_usage", [False, True])
def test_chunks_say_who_what_and_why_it_ends(include_usage: bool) -> None:
    answer = Answer(id="chatcmpl-1", created=5, model="m", include_usage=include_usage)
    chunks = [answer.opening(), answer.piece("forty"), *answer.ending(GENERATION)]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks} == {("chatcmpl-1", 5, "m")}
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "forty"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "stop"]
    if include_usage:
        assert [chunk["usage"] for chunk in chunks] == [None, None, None, USAGE]
        assert chunks[-1]["choices"] == []
    else:
        assert not any("usage" in chunk for chunk in chunks)
        assert all(chunk["choices"] for chunk in chunks)
