"""Trains the demo model: ``python -m retinue.demo.train [--out DIR] [--smoke]``.

First the vision encoder learns to name the digit and the color of a picture, by two small heads that are
thrown away afterwards. Then the language model learns to answer questions about what it sees, of one
picture, of two, of four; the pictures are new ones, so that it also meets what is hard to see. What is
measured at the end is what was written, read back.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from retinue.demo.drawing import Glyphs, draw, font_glyphs, handwritten_glyphs, held_out_font_glyphs
from retinue.demo.prompt import CHAT_TEMPLATE, COLORS, IMAGE_PAD, SYSTEM, Label, answer, questions
from retinue.demo.vision import DigitVision, VisionConfig

__all__ = ["Recipe", "evaluate", "train"]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", IMAGE_PAD)
_KINDS = {"spell": 6.0, "count": 0.7, "nth digit": 2.0, "nth color": 2.5, "largest": 1.5, "list colors": 2.0}
_NOT_LEARNT = -100  # what cross_entropy ignores


@dataclass(frozen=True)
class Recipe:
    """How much of what. The defaults made the checkpoint that is shipped."""

    pictures: int = 70_000
    seeing_steps: int = 6_000
    seeing_batch: int = 96
    seeing_rate: float = 2e-3
    new_pictures: int = 40_000
    answering_steps: int = 5_000
    answering_batch: int = 24
    answering_rate: float = 1e-2  # of the layers' matrices
    answering_rest_rate: float = 1e-3  # of embeddings, norms, biases and markers
    requests: int = 2_000  # measured, for each kind of picture and of question


@dataclass(frozen=True)
class Picture:
    """A picture, and what it shows."""

    pixels: Tensor  # (height, width, 3) uint8, sides multiples of a cell
    label: Label


@dataclass(frozen=True)
class Seen:
    """What the encoder makes of a picture, and what it shows."""

    rows: Tensor  # (cells + 2, hidden_size)
    label: Label


def pictures(rng: random.Random, glyphs: Sequence[Glyphs], count: int, config: VisionConfig) -> list[Picture]:
    """So many pictures of all shapes, each kind of glyph equally often."""

    def picture() -> Picture:
        image, label = draw(rng, rng.choice(glyphs), _size(rng))
        columns, rows = config.grid(*image.size)
        fitted = image.resize((columns * config.cell, rows * config.cell), Image.Resampling.BICUBIC)
        return Picture(torch.from_numpy(np.array(fitted)), label)

    return [picture() for _ in range(count)]


def _held_out() -> dict[str, Glyphs]:
    """What the model is measured on: known fonts, though as they are, and what it never saw."""
    return {
        "rendered": font_glyphs(bent=False),
        "held-out font": held_out_font_glyphs(),
        "held-out handwriting": handwritten_glyphs(held_out=True),
    }


def _size(rng: random.Random) -> tuple[int, int]:
    """Mostly near what the encoder sees without resizing; a sixth several times as large."""
    short = rng.uniform(18, 48)
    ratio = 1.0 if rng.random() < 0.6 else math.exp(rng.uniform(0, 1.2))
    if rng.random() < 0.17:
        short *= rng.uniform(1.5, 4)
    sides = round(short), round(short * ratio)
    return sides if rng.random() < 0.5 else sides[::-1]


class Heads(nn.Module):
    """Names a picture's digit and color from its begin row: the language model need look at no other."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.digit = nn.Linear(hidden_size, 10)
        self.color = nn.Linear(hidden_size, len(COLORS))

    def forward(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Logits of the digits and of the colors of pictures whose rows are each (cells + 2, hidden_size)."""
        begins = torch.stack([of_one[0] for of_one in rows])  # (pictures, hidden_size)
        return self.digit(begins), self.color(begins)

    def loss(self, rows: Sequence[Tensor], labels: Sequence[Label]) -> Tensor:
        """Cross entropy, with the color's share reduced: colors are learnt early."""
        digit_logits, color_logits = self(rows)
        digits = torch.tensor([label.digit for label in labels])
        colors = torch.tensor([COLORS.index(label.color) for label in labels])
        digit_loss = functional.cross_entropy(digit_logits, digits)
        return digit_loss + 0.3 * functional.cross_entropy(color_logits, colors)


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a token for each digit, made from what can be asked and answered."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    asked = [question for of_kind in questions(4).values() for question in of_kind]
    corpus = [*asked, ", ".join(COLORS), *COLORS, SYSTEM, "system\nuser\nassistant\n", "0123456789"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", IMAGE_PAD],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


def language_model(tokens: PreTrainedTokenizerFast, hidden_size: int) -> Qwen2ForCausalLM:
    """A new text-only model, small enough to travel with the source."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokens),
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokens.eos_token_id,
            pad_token_id=tokens.pad_token_id,
        )
    )


@dataclass(frozen=True)
class Example:
    """A conversation about some pictures, as token ids."""

    seen: list[Seen]
    ids: list[int]  # one IMAGE_PAD for each row of each picture
    targets: list[int]  # the same ids where the assistant speaks, _NOT_LEARNT elsewhere


class Writer:
    """Writes conversations about pictures."""

    def __init__(self, tokens: PreTrainedTokenizerFast) -> None:
        self._image_pad = _image_pad(tokens)
        self._ids: Callable[[str], list[int]] = lru_cache(maxsize=None)(
            lambda text: list(tokens(text, add_special_tokens=False)["input_ids"])
        )

    def training_example(self, rng: random.Random, seen: list[Seen]) -> Example:
        """One to three questions and their answers, laid out as this or that server would."""
        asked: list[str] = []
        for _ in range(rng.randint(1, 3)):
            question = _question(rng, len(seen))
            if question not in asked:
                asked.append(question)
        return self.example(rng, seen, asked)

    def example(self, rng: random.Random, seen: list[Seen], asked: Sequence[str]) -> Example:
        """A conversation in which each question is answered; the pictures are part of the first."""
        labels = [of_one.label for of_one in seen]
        joint = rng.choice(["", "\n"])
        parts = [IMAGE_PAD] * len(seen)
        first = [asked[0], *parts] if rng.random() < 0.15 else [*parts, asked[0]]
        said: list[tuple[str, bool]] = []
        if rng.random() < 0.1:
            said.append((f"<|im_start|>system\n{SYSTEM}<|im_end|>\n", False))
        for content in (joint.join(first), *asked[1:]):
            said.append((f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n", False))
            question = asked[0] if content == joint.join(first) else content
            said.append((f"{answer(question, labels)}<|im_end|>", True))
            said.append(("\n", False))
        ids: list[int] = []
        targets: list[int] = []
        lengths = iter([len(of_one.rows) for of_one in seen])
        for text, learnt in said:
            for token in self._ids(text):
                repeat = next(lengths) if token == self._image_pad else 1
                ids += [token] * repeat
                targets += [token if learnt else _NOT_LEARNT] * repeat
        return Example(seen, ids[:-1], targets[:-1])  # the line break after the last answer is nobody's


def _image_pad(tokens: PreTrainedTokenizerFast) -> int:
    return int(tokens.get_vocab()[IMAGE_PAD])


def _question(rng: random.Random, images: int) -> str:
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    return rng.choice(questions(images)[kind])


def batches(draw_example: Callable[[], Example], rng: random.Random, size: int) -> Iterator[list[Example]]:
    """Batches for ever, each of examples of about the same length."""
    while True:
        drawn = sorted((draw_example() for _ in range(8 * size)), key=lambda example: len(example.ids))
        cut_up = [drawn[start : start + size] for start in range(0, len(drawn), size)]
        rng.shuffle(cut_up)
        yield from cut_up


@torch.inference_mode()
def see(vision: DigitVision, shown: Sequence[Picture]) -> list[Seen]:
    """Look at each picture once."""
    seen: list[Seen] = []
    for start in range(0, len(shown), 100):
        part = shown[start : start + 100]
        rows = vision([picture.pixels for picture in part])
        seen += [Seen(of_one, picture.label) for of_one, picture in zip(rows, part, strict=True)]
    return seen


def embed(text: Qwen2ForCausalLM, ids: Tensor, rows: Sequence[Tensor], image_pad: int) -> Tensor:
    """Token embeddings, (batch, length, hidden_size), with the pictures' rows in place of their tokens."""
    embeddings: Tensor = text.get_input_embeddings()(ids)
    return embeddings.masked_scatter((ids == image_pad)[..., None], torch.cat(list(rows)))


def train(out: Path, recipe: Recipe) -> None:
    """Train both halves of the model and write them to ``out``."""
    clock = Clock()
    torch.manual_seed(0)
    config = VisionConfig()
    vision, heads = DigitVision(config), Heads(config.hidden_size)
    tokens = tokenizer()
    text = language_model(tokens, config.hidden_size)
    for name, part in (("vision", vision), ("text", text)):
        clock.say(f"{name}: {sum(weight.numel() for weight in part.parameters())} parameters")
    learnt_from = [font_glyphs(bent=True), handwritten_glyphs(held_out=False)]
    pool = pictures(random.Random(1), learnt_from, recipe.pictures, config)
    clock.say(f"{len(pool)} pictures drawn")
    learn_to_see(vision, heads, pool, recipe, clock)
    vision.bfloat16().float()  # from here on it sees as the one that is shipped will
    new = pictures(random.Random(5), learnt_from, recipe.new_pictures, config)
    seen = see(vision, new)
    clock.say(f"{len(seen)} new pictures drawn and seen")
    learn_to_answer(vision, text, tokens, seen, recipe, clock)
    save(out, vision, text, tokens)
    clock.say(f"written to {out}")


class Clock:
    """Prints progress with the time that it took: on the wall, and of all cores together."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def say(self, what: str) -> None:
        """Print one line."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        print(f"[{wall:6.0f} s, {cpu:6.0f} s cpu] {what}", flush=True)


def learn_to_see(
    vision: DigitVision, heads: Heads, pool: Sequence[Picture], recipe: Recipe, clock: Clock
) -> None:
    """Teach the vision encoder what a picture shows."""
    rng = random.Random(2)
    parts = [vision.stem, vision.blocks, vision.norm, vision.projector, heads]
    weights = [vision.row, vision.column, vision.bounds, *nn.ModuleList(parts).parameters()]
    descent = Descent([_adam(weights, recipe.seeing_rate)], recipe.seeing_steps)
    for step in range(1, recipe.seeing_steps + 1):
        shown = rng.choices(pool, k=recipe.seeing_batch)
        rows = vision([picture.pixels for picture in shown])
        loss = heads.loss(rows, [picture.label for picture in shown])
        descent.step(loss)
        if step % 500 == 0:
            clock.say(f"seeing, step {step}: loss {loss.item():.3f}")
    for name, glyphs in _held_out().items():
        unseen = pictures(random.Random(4), [glyphs], recipe.requests, vision.config)
        clock.say(f"digits of single pictures, {name}: {_share_seen(vision, heads, unseen):.3f} right")


@torch.inference_mode()
def _share_seen(vision: DigitVision, heads: Heads, shown: Sequence[Picture]) -> float:
    seen = see(vision, shown)
    digits: list[int] = heads([of_one.rows for of_one in seen])[0].argmax(1).tolist()
    right = sum(digit == of_one.label.digit for digit, of_one in zip(digits, seen, strict=True))
    return right / len(seen)


def learn_to_answer(
    vision: DigitVision,
    text: Qwen2ForCausalLM,
    tokens: PreTrainedTokenizerFast,
    seen: Sequence[Seen],
    recipe: Recipe,
    clock: Clock,
) -> None:
    """Teach the language model to answer questions about what was seen without markers, and the markers."""
    rng = random.Random(3)
    writer = Writer(tokens)
    image_pad = _image_pad(tokens)
    nn.init.normal_(vision.markers)
    matrices = [weight for weight in text.model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in text.parameters() if not any(weight is matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, recipe.answering_rate, weight_decay=0.02, adjust_lr_fn="original")
    adam = _adam([*others, vision.markers], recipe.answering_rest_rate)
    descent = Descent([muon, adam], recipe.answering_steps)
    most = 1

    def example() -> Example:
        return writer.training_example(rng, rng.choices(seen, k=rng.randint(1, most)))

    source = batches(example, rng, recipe.answering_batch)
    recent = 0.0
    for step in range(1, recipe.answering_steps + 1):
        most = _most_images(step / recipe.answering_steps)
        examples = next(source)
        rows = [vision.mark(of_one.rows) for example in examples for of_one in example.seen]
        ids = _rectangle([example.ids for example in examples], int(tokens.pad_token_id))
        targets = _rectangle([example.targets for example in examples], _NOT_LEARNT)[:, 1:]
        embeddings = embed(text, ids, rows, image_pad)
        hidden = text.model(inputs_embeds=embeddings).last_hidden_state[:, :-1]
        learnt = targets != _NOT_LEARNT
        loss = functional.cross_entropy(text.lm_head(hidden[learnt]), targets[learnt])
        descent.step(loss)
        recent += loss.item()
        if step % 500 == 0:
            clock.say(f"answering, step {step}: loss {recent / 500:.4f}")
            recent = 0.0


def _most_images(progress: float) -> int:
    """How many images the conversations are about at most."""
    return 1 if progress < 0.08 else 2 if progress < 0.2 else 4


def _rectangle(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """Right-padded to the longest: (rows, longest)."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])


def _adam(weights: Sequence[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, rate, weight_decay=0.02)


class Descent:
    """Steps down the gradient at rates that rise for a twelfth of the way and then fall to nothing."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], steps: int) -> None:
        self._optimizers = optimizers
        self._weights = [w for each in optimizers for group in each.param_groups for w in group["params"]]
        self._schedules = [
            torch.optim.lr_scheduler.OneCycleLR(
                each, each.defaults["lr"], steps, pct_start=0.08, cycle_momentum=False
            )
            for each in optimizers
        ]

    def step(self, loss: Tensor) -> None:
        """Take one."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._weights, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        for schedule in self._schedules:
            schedule.step()


def save(out: Path, vision: DigitVision, text: Qwen2ForCausalLM, tokens: PreTrainedTokenizerFast) -> None:
    """Write both halves, in bfloat16: what is shipped."""
    text.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=32, eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id
    )
    text.bfloat16().save_pretrained(out)
    vision.to(torch.bfloat16).save(out / "vision")
    tokens.save_pretrained(out)
    text.float()
    vision.float()


@torch.inference_mode()
def evaluate(folder: Path, requests: int, say: Callable[[str], None] = print) -> None:
    """Exact match of what is in ``folder``, on pictures and fonts that it never saw."""
    vision = DigitVision.load(folder / "vision")
    text = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(folder)
    for name, glyphs in _held_out().items():
        rng = random.Random(99)
        seen = see(vision, pictures(rng, [glyphs], 2 * requests, vision.config))
        figures = {kind: _exact_match(text, tokens, seen, kind, requests, rng) for kind in questions(1)}
        say(f"{name}: " + ", ".join(f"{kind} {figure:.3f}" for kind, figure in figures.items()))


def _exact_match(
    text: Any, tokens: Any, seen: list[Seen], kind: str, requests: int, rng: random.Random
) -> float:
    writer = Writer(tokens)
    image_pad, right = _image_pad(tokens), 0
    for start in range(0, requests, 50):
        examples = []
        for _ in range(min(50, requests - start)):
            shown = rng.sample(seen, rng.randint(1, 4))
            examples.append(writer.example(rng, shown, [rng.choice(questions(len(shown))[kind])]))
        prompts = [[i for i, t in zip(e.ids, e.targets, strict=True) if t == _NOT_LEARNT] for e in examples]
        longest = max(map(len, prompts))
        ids = torch.tensor([[tokens.pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        rows = [of_one.rows for example in examples for of_one in example.seen]
        embeddings = embed(text, ids, rows, image_pad)
        said = text.generate(inputs_embeds=embeddings, attention_mask=mask)
        wanted = [[t for t in e.targets if t != _NOT_LEARNT] for e in examples]
        right += sum(
            tokens.decode(a, skip_special_tokens=True) == tokens.decode(b, skip_special_tokens=True)
            for a, b in zip(said, wanted, strict=True)
        )
    return right / requests


_SMOKE = Recipe(
    pictures=64,
    seeing_steps=2,
    seeing_batch=8,
    new_pictures=64,
    answering_steps=4,
    answering_batch=4,
    requests=4,
)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m retinue.demo.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-checkpoint"))
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that everything runs")
    options = parser.parse_args()
    recipe = _SMOKE if options.smoke else Recipe()
    train(options.out, recipe)
    evaluate(options.out, recipe.requests)


if __name__ == "__main__":
    main()
