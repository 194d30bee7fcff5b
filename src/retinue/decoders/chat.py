"""Chat messages into a prompt, where nothing that a client writes becomes a special token or an image.

The template's text and ordinary text are tokenized in one go: without images, the ids are those of the
tokenizer's own ``apply_chat_template``. What must stand apart, an image or a text that spells a special
token, goes through the template as a mark with a nonce of the request, and through the tokenizer as one
special token that only our copy has; nobody outside can spell either. Such a text is tokenized by itself, as
plain characters, so tokens do not merge across its ends.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jinja2 import TemplateError
from transformers import AddedToken, PreTrainedTokenizerBase

from retinue.errors import InvalidInput
from retinue.prompt.tensors import Prompt, splice

__all__ = ["Chat", "Message"]

Message: TypeAlias = Mapping[str, Any]

_ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, eq=False)
class _Image:
    artifact: Any


class Chat:
    """A tokenizer's chat template; its methods may be called from any thread.

    Special tokens are those that the tokenizer marks as special. Others that it merely added, such as
    ``<think>``, are the client's to write too.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._template = tokenizer
        self._special_ids = _special_ids(tokenizer)
        # Copies, because asking one tokenizer to split special tokens changes it under all its users.
        self._plain = copy.deepcopy(tokenizer)
        self._plain.split_special_tokens = True
        self._joint = copy.deepcopy(tokenizer)
        self._stand_in = f"<{secrets.token_hex(16)}>"
        self._joint.add_tokens(
            [AddedToken(self._stand_in, special=True, normalized=False)], special_tokens=True
        )
        self._stand_in_id = _ids(self._joint, self._stand_in)[-1]

    def prompt(self, messages: Sequence[Message], *, hidden_size: int, context: int | None = None) -> Prompt:
        """Render ``messages`` and the beginning of the answer.

        A message has a ``role`` and a ``content``: a string, or parts that are joined by newlines, as vLLM
        joins them: ``{"type": "text", "text": str}`` and ``{"type": "prompt_embeds", "data": artifact}``.

        ``InvalidInput`` for what cannot be read or what the template refuses, and for text of more than
        ``context`` tokens, for which no embeddings are made; ``EncoderFailed`` for artifacts that ``splice``
        refuses. At image rows the prompt's ids are in no vocabulary.
        """
        apart = _Apart()
        rendered = self._render([self._message(message, n, apart) for n, message in enumerate(messages, 1)])
        texts, between = apart.split(rendered)
        images = _images(between)
        if images != _images(apart.parts):
            raise InvalidInput("the model's chat template does not keep every image, once and in order")
        token_ids = self._tokenize(texts, between)
        text_tokens = len(token_ids) - len(images)
        if context is not None and text_tokens > context:
            raise InvalidInput(
                f"the prompt's text alone has {text_tokens} tokens, "
                f"more than the model's context of {context}"
            )
        return splice(
            token_ids,
            self._stand_in_id,
            [image.artifact for image in images],
            hidden_size=hidden_size,
        )

    def _message(self, message: Message | object, number: int, apart: _Apart) -> dict[str, str]:
        name = f"message {number}"
        if not isinstance(message, Mapping):
            raise InvalidInput(f"{name} is no object with a role and a content")
        if message.get("role") not in _ROLES:
            raise InvalidInput(f"{name} has role {message.get('role')!r}, not one of {', '.join(_ROLES)}")
        if unknown := [key for key, value in message.items() if value and key not in ("role", "content")]:
            raise InvalidInput(
                f"{name} has {', '.join(map(repr, unknown))}, which this decoder does not take"
            )
        parts = [
            apart.set(part) if isinstance(part, _Image) else self._text(part, name, apart)
            for part in _parts(message.get("content"), name)
        ]
        return {"role": message["role"], "content": "\n".join(parts)}

    def _text(self, text: str, name: str, apart: _Apart) -> str:
        """Leave ordinary text as it is, so that the template can trim it and the tokenizer merge it."""
        if any("\ud800" <= character <= "\udfff" for character in text):  # JSON can spell it, UTF-8 cannot
            raise InvalidInput(f"{name} has half of a surrogate pair, which is no character")
        if self._special_ids.isdisjoint(_ids(self._joint, text)):
            return text
        if self._special_ids.intersection(_ids(self._plain, text)):  # the vocabulary itself spells it
            raise InvalidInput(f"{name} spells a special token that this model cannot read as text")
        before, core, after = text.partition(text.strip())
        return before + apart.set(core) + after

    def _render(self, messages: list[dict[str, str]]) -> str:
        if not self._template.chat_template:
            raise InvalidInput("the model has no chat template; it takes token ids")
        try:
            rendered = self._template.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise InvalidInput(f"the model's chat template refuses the messages: {error}") from error
        assert isinstance(rendered, str)
        return rendered

    def _tokenize(self, texts: Sequence[str], between: Sequence[str | _Image]) -> list[int]:
        token_ids: list[int] = []
        upcoming = iter(between)
        for token_id in _ids(self._joint, self._stand_in.join(texts)):
            part = next(upcoming) if token_id == self._stand_in_id else None
            token_ids += _ids(self._plain, part) if isinstance(part, str) else [token_id]
        return token_ids


class _Apart:
    """What one request sets apart, each behind a mark that nobody could have written before."""

    def __init__(self) -> None:
        self.parts: list[str | _Image] = []
        self._nonce = secrets.token_hex(16)

    def set(self, part: str | _Image) -> str:
        """Return the mark that stands for ``part`` in the template."""
        self.parts.append(part)
        return f"{self._nonce}{len(self.parts) - 1}."

    def split(self, rendered: str) -> tuple[list[str], list[str | _Image]]:
        """Return the texts around the marks, and what the marks stand for: one fewer."""
        pieces = re.split(rf"{self._nonce}(\d+)\.", rendered)
        return pieces[::2], [self.parts[int(index)] for index in pieces[1::2]]


def _parts(content: Any, name: str) -> list[str | _Image]:
    if content is None or isinstance(content, str):
        return [content or ""]
    if not isinstance(content, Sequence):
        raise InvalidInput(f"{name} has a content that is neither a string nor a list of parts")
    return [_part(part, f"{name}, part {number}") for number, part in enumerate(content, 1)]


def _part(part: Any, name: str) -> str | _Image:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "prompt_embeds" and "data" in part:
        return _Image(part["data"])
    raise InvalidInput(f"{name} is neither a text with 'text' nor a prompt_embeds with 'data'")


def _images(parts: Sequence[str | _Image]) -> list[_Image]:
    return [part for part in parts if isinstance(part, _Image)]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The ids that text must not become; the unknown token is what some text has to become."""
    marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(marked.union(tokenizer.all_special_ids) - {tokenizer.unk_token_id})
