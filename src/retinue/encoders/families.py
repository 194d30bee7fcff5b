"""What differs between the families of vision-language models that can be taken apart.

In each of them an image enters the language model as a *span* of ordinary input embeddings at linear
positions: *runs* of rows that the vision tower made, and between them *pieces*, the embeddings of a few
tokens (``<img>``, ``[IMG_BREAK]``, a newline). The span's n-th run lies between its pieces n and n + 1, so
there is one piece more than there are runs; a piece may be empty.

Thread rules
    ``see``, ``runs`` and ``pieces`` may be called from any thread: they read configuration, no weights.
    ``tile_rows`` and ``encode`` run the tower and belong to the thread that owns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPooling

from retinue.errors import InvalidInput

__all__ = ["Family", "View", "family_of"]

Size = tuple[int, int]  # (height, width)


@dataclass(frozen=True)
class View:
    """One image as its family's image processor sees it.

    ``tiles``: (tiles, channels, height, width), float32. ``size``: of the image, before it was tiled.
    ``grid``: rows and columns of tiles, where the family says so.
    """

    tiles: Tensor
    size: Size
    grid: Size


class Family:
    """How a family's image becomes a span; here, in the plainest way: one run of rows."""

    #: What the checkpoint calls its processor.
    processor = "LlavaProcessor"
    #: The language model's name in the model without a head.
    language_model = "language_model"

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config: Any = config

    @property
    def options(self) -> Mapping[str, Any]:
        """What the family's processor tells its image processor."""
        return {}

    def spell(self, tokenizer: Any, settings: Mapping[str, Any], image_processor: Any) -> dict[str, str]:
        """Every piece that a span can have, by its name; ``settings`` are the processor's."""
        return {}

    def prepare(self, model: Any) -> None:
        """Change a freshly loaded model as ``encode`` needs it."""

    def see(self, features: Mapping[str, Any], size: Size) -> View:
        """Read what the image processor made of one image of ``size``."""
        pixels = features["pixel_values"]
        return View(pixels.reshape(-1, *pixels.shape[-3:]), size, (0, 0))

    def tile_rows(self, model: Any, view: View) -> int:
        """How many rows the tower makes of a tile, found out by running it on one."""
        return len(self.encode(model, view.tiles[:1], [view.size]))

    def runs(self, view: View, tile_rows: int) -> list[int]:
        """The lengths of the span's runs."""
        return [tile_rows]

    def pieces(self, view: View) -> list[str]:
        """The names of the span's pieces; "" is the empty one."""
        return ["", ""]

    def encode(self, model: Any, tiles: Tensor, sizes: Sequence[Size]) -> Tensor:
        """Run the tower on the tiles of images of ``sizes``: (rows of all, hidden), in order."""
        return self._rows(model, tiles)

    def _rows(self, model: Any, tiles: Tensor, **more: Any) -> Tensor:
        # One tensor or a sequence of them, by family and version; of two or of three dimensions.
        pooled = model.get_image_features(pixel_values=tiles, return_dict=True, **more).pooler_output
        return torch.cat([rows.reshape(-1, rows.shape[-1]) for rows in pooled])


class Llava(Family):
    """One tile, cropped to a square."""


class LlavaOnevision(Family):
    """An overview and tiles of the best fitting grid, unpadded, with ``image_newline`` after each line.

    Each image is seen as the only one of its prompt. (The family's processor can be given several images of
    one prompt as a nested list; it then sees less of each, which depends on the number of its neighbours.)
    """

    processor = "LlavaOnevisionProcessor"

    def prepare(self, model: Any) -> None:
        """Keep the packing, which knows how many rows an image has."""
        self._pack = model.pack_image_features

    def tile_rows(self, model: Any, view: View) -> int:
        """By configuration, as the packing reads it: its rows are not a multiple of the tiles."""
        vision = self.config.vision_config
        return int(vision.image_size // vision.patch_size) ** 2

    def runs(self, view: View, tile_rows: int) -> list[int]:
        """One run, as long as the family's own packing makes it; it packs rows of width 1 to tell."""
        [packed], _ = self._pack(
            [torch.zeros(len(view.tiles), tile_rows, 1)],
            [view.size],
            image_newline=torch.zeros(1),
            vision_aspect_ratio=self.config.vision_aspect_ratio,
        )
        return [len(packed)]

    def encode(self, model: Any, tiles: Tensor, sizes: Sequence[Size]) -> Tensor:
        """The tower on all tiles at once; packed, (rows of all, hidden)."""
        return self._rows(model, tiles, image_sizes=torch.tensor(sizes))


class InternVL(Family):
    """Tiles of the best fitting grid and a thumbnail, between ``<img>`` and ``</img>``."""

    processor = "InternVLProcessor"

    @property
    def options(self) -> Mapping[str, Any]:
        """The processor tiles, though the image processor alone would not."""
        return {"crop_to_patches": True}

    def spell(self, tokenizer: Any, settings: Mapping[str, Any], image_processor: Any) -> dict[str, str]:
        """The two ends."""
        return {"start": tokenizer.start_image_token, "end": tokenizer.end_image_token}

    def runs(self, view: View, tile_rows: int) -> list[int]:
        """One run, of all tiles."""
        return [len(view.tiles) * tile_rows]

    def pieces(self, view: View) -> list[str]:
        """The two ends."""
        return ["start", "end"]


class Idefics3(Family):
    """Tiles of the best fitting grid, each after a tag with its row and column, and an overview."""

    processor = "Idefics3Processor"
    language_model = "text_model"

    @property
    def options(self) -> Mapping[str, Any]:
        """The tags need to know the grid."""
        return {"return_row_col_info": True}

    def spell(self, tokenizer: Any, settings: Mapping[str, Any], image_processor: Any) -> dict[str, str]:
        """Tags for the largest grid; a line of tiles ends in a newline, the last in two."""
        if not image_processor.do_resize:
            raise InvalidInput("its image processor has do_resize=False: no bound for the number of tiles")
        tile = image_processor.max_image_size["longest_edge"]
        side = -(-image_processor.size["longest_edge"] // tile)
        fake = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
        overview = fake + getattr(tokenizer, "global_image_token", "<global-img>")
        tags = {
            _tag(row, column): ("\n" if row and not column else "")
            + f"{fake}<row_{row + 1}_col_{column + 1}>"
            for row in range(side)
            for column in range(side)
        }
        return {"alone": overview, "overview": f"\n\n{overview}", "end": fake, **tags}

    def see(self, features: Mapping[str, Any], size: Size) -> View:
        """The grid too."""
        [[rows]], [[columns]] = features["rows"], features["cols"]
        return View(super().see(features, size).tiles, size, (int(rows), int(columns)))

    def runs(self, view: View, tile_rows: int) -> list[int]:
        """One for each tile."""
        return [tile_rows] * len(view.tiles)

    def pieces(self, view: View) -> list[str]:
        """A tag before each tile, and the end."""
        rows, columns = view.grid
        if not rows:
            return ["alone", "end"]
        tags = [_tag(row, column) for row in range(rows) for column in range(columns)]
        return [*tags, "overview", "end"]

    def encode(self, model: Any, tiles: Tensor, sizes: Sequence[Size]) -> Tensor:
        """The tower takes the tiles of a prompt, whatever images they belong to."""
        return self._rows(model, tiles[None])


class SmolVLM(Idefics3):
    """Idefics3's way."""

    processor = "SmolVLMProcessor"


class Pixtral(Family):
    """One tile of the image's own shape; ``[IMG_BREAK]`` between lines, ``[IMG_END]`` at the end."""

    processor = "PixtralProcessor"

    @property
    def _cell(self) -> int:
        """So many pixels, squared, become a row."""
        return int(self.config.vision_config.patch_size * getattr(self.config, "spatial_merge_size", 1))

    @property
    def options(self) -> Mapping[str, Any]:
        """Sides are rounded to whole cells."""
        return {"patch_size": self._cell}

    def spell(self, tokenizer: Any, settings: Mapping[str, Any], image_processor: Any) -> dict[str, str]:
        """The ends of lines."""
        return {
            "break": settings.get("image_break_token", "[IMG_BREAK]"),
            "end": settings.get("image_end_token", "[IMG_END]"),
        }

    def prepare(self, model: Any) -> None:
        """Let images of one shape share a forward without paying for pairs of patches across them."""
        model.vision_tower = _PixtralBatch(model.vision_tower)

    def runs(self, view: View, tile_rows: int) -> list[int]:
        """One for each line."""
        height, width = view.tiles.shape[-2:]
        return [width // self._cell] * (height // self._cell)

    def pieces(self, view: View) -> list[str]:
        """What ends each line."""
        return ["", *["break"] * (view.tiles.shape[-2] // self._cell - 1), "end"]

    def encode(self, model: Any, tiles: Tensor, sizes: Sequence[Size]) -> Tensor:
        """The tower on images of one shape."""
        return self._rows(model, tiles, image_sizes=torch.tensor([tiles.shape[-2:]] * len(tiles)))


class _PixtralBatch(nn.Module):
    """A Pixtral tower for images of one shape, in the place of the tower.

    The tower itself packs all images into one sequence and masks the pairs that do not belong together, so
    the work of its attention grows with the square of the batch. Equal shapes need no mask.
    """

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower
        self.patch_size = tower.patch_size

    def forward(self, pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        """(images, channels, height, width) to the states of all patches, packed as the tower packs them."""
        patches = self.tower.patch_conv(pixel_values)  # (images, width, rows, columns)
        rows, columns = (torch.arange(length, device=patches.device) for length in patches.shape[-2:])
        state = self.tower.ln_pre(patches.flatten(2).transpose(1, 2))  # (images, patches, width)
        turns = self.tower.patch_positional_embedding(state, torch.cartesian_prod(rows, columns))
        states = [state]
        for layer in self.tower.transformer.layers:
            state = layer(state, attention_mask=None, position_embeddings=turns)
            states.append(state)
        packed = tuple(state.flatten(0, 1)[None] for state in states)  # (1, patches of all, width)
        return BaseModelOutputWithPooling(last_hidden_state=packed[-1], hidden_states=packed)


def _tag(row: int, column: int) -> str:
    return f"row {row} column {column}"


FAMILIES: Mapping[str, type[Family]] = MappingProxyType(
    {
        "idefics3": Idefics3,
        "internvl": InternVL,
        "llava": Llava,
        "llava_onevision": LlavaOnevision,
        "mistral3": Pixtral,
        "smolvlm": SmolVLM,
    }
)

_M_ROPE = "its positions have several axes (M-RoPE), and rows in a prompt have one"
_DEEPSTACK = "its tower's features are also added inside of the language model's layers (deepstack)"
_CROSS = "its language model looks at images by cross attention; no embeddings stand for them"
_BOTH_WAYS = (
    "the rows of an image see each other in both directions, and a text model sees only what came before"
)
_DISCRETE = "its images are tokens of the vocabulary, not embeddings"
_ENCODER_DECODER = "it has an encoder and a decoder, and prompts are for models with a decoder alone"
_PER_LAYER = "its layers have embeddings of their own for each token, which an image's rows lack"

#: Why a model is not taken apart, where more is known than that it is not among ``FAMILIES``.
REASONS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            [
                "ernie4_5_vl_moe",
                "glm4v",
                "glm4v_moe",
                "glm46v",
                "glm_ocr",
                "hunyuan_vl",
                "paddleocr_vl",
                "qwen2_5_vl",
                "qwen2_vl",
                "qwen3_5",
                "qwen3_5_moe",
            ],
            _M_ROPE,
        ),
        **dict.fromkeys(["qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"], f"{_M_ROPE}; and {_DEEPSTACK}"),
        "granite4_vision": _DEEPSTACK,
        **dict.fromkeys(["mllama", "idefics"], _CROSS),
        **dict.fromkeys(["paligemma", "gemma3", "gemma4"], _BOTH_WAYS),
        "gemma3n": _PER_LAYER,
        **dict.fromkeys(["chameleon", "emu3"], _DISCRETE),
        **dict.fromkeys(
            ["florence2", "pix2struct", "t5gemma2", "udop", "vision-encoder-decoder"],
            _ENCODER_DECODER,
        ),
    }
)


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a model; ``InvalidInput`` names a model that is none of ``FAMILIES`` and says why."""
    kind = config.model_type
    if kind in REASONS:
        raise InvalidInput(f"a {kind} model cannot be taken apart: {REASONS[kind]}")
    if kind not in FAMILIES:
        raise InvalidInput(f"a {kind} model is none of those that are taken apart: {', '.join(FAMILIES)}")
    tower = config.vision_config.model_type
    if kind == "llava" and tower == "pixtral":
        return Pixtral(config)
    if kind == "mistral3" and tower != "pixtral":
        raise InvalidInput(
            f"a mistral3 model with a {tower} tower is not taken apart, only with a pixtral one"
        )
    return FAMILIES[kind](config)
