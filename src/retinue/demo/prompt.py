"""What the demo model may be asked, and how a conversation becomes text.

The answer to a question is a function of the pictures' labels: ``answer(question, labels)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CHAT_TEMPLATE", "COLORS", "IMAGE_PAD", "QUESTION", "SYSTEM", "Label", "answer", "questions"]

#: The question that the demo is about.
QUESTION = "What number do the images spell?"
#: The system message that some conversations of the training begin with.
SYSTEM = "You are a helpful assistant."
#: The token that stands for one image until its rows take its place.
IMAGE_PAD = "<|image_pad|>"
#: The names of the inks.
COLORS = ("red", "green", "blue", "yellow", "purple", "white", "black")

#: ChatML. A message's content is one string, in which ``IMAGE_PAD`` stands for each image.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ORDINALS = ("first", "second", "third", "fourth")
_COUNT = "How many images are there?"
_LARGEST = "Which digit is the largest?"
_COLORS = "List the colors in order."
_NTH_DIGIT = {f"What is the {ordinal} digit?": n for n, ordinal in enumerate(_ORDINALS)}
_NTH_COLOR = {f"What color is the {ordinal} digit?": n for n, ordinal in enumerate(_ORDINALS)}


@dataclass(frozen=True)
class Label:
    """What a picture shows."""

    digit: int
    color: str


def questions(images: int) -> dict[str, list[str]]:
    """The questions that have an answer for so many images, by kind."""
    return {
        "spell": [QUESTION],
        "count": [_COUNT],
        "nth digit": list(_NTH_DIGIT)[:images],
        "nth color": list(_NTH_COLOR)[:images],
        "largest": [_LARGEST],
        "list colors": [_COLORS],
    }


def answer(question: str, labels: Sequence[Label]) -> str:
    """What the model should say about pictures with these labels; KeyError for any other question."""
    if question in _NTH_DIGIT:
        return str(labels[_NTH_DIGIT[question]].digit)
    if question in _NTH_COLOR:
        return labels[_NTH_COLOR[question]].color
    return {
        QUESTION: "".join(str(label.digit) for label in labels),
        _COUNT: str(len(labels)),
        _LARGEST: str(max(label.digit for label in labels)),
        _COLORS: ", ".join(label.color for label in labels),
    }[question]
