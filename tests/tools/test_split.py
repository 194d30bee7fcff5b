"""A model taken apart: what its halves are to others, and which models are refused, and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from retinue.decoders.chat import Chat
from retinue.errors import InvalidInput
from retinue.tools.split import split

from ..encoders import tiny
from ..encoders.conftest import Case, made
from ..encoders.tiny import FAMILIES, HIDDEN, llava


@pytest.fixture(scope="session", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def one(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Where the family does not matter."""
    return made("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """A whole LLaVA, one of whose files says something else."""
    llava(tmp_path / "model")

    def changed(name: str, **entries: Any) -> Path:
        path = tmp_path / "model" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
        return tmp_path / "model"

    return changed


def weights(folder: Path) -> dict[str, torch.Tensor]:
    [path] = folder.rglob("*.safetensors")
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


# ---- the text model


def test_text_is_continued_as_before(case: Case) -> None:
    ids = torch.tensor([case.whole.processor.tokenizer("what is on it, and who is the user?")["input_ids"]])
    text = AutoModelForCausalLM.from_pretrained(case.halves.text, dtype=torch.float32)
    with torch.inference_mode():
        torch.testing.assert_close(text(ids).logits, case.whole.model(input_ids=ids).logits)
    assert type(text).__name__ == case.halves.text_model


def test_a_server_of_text_models_finds_nothing_else(case: Case) -> None:
    assert [path.name for path in case.halves.text.rglob("*.safetensors")] == ["model.safetensors"]
    assert {name.partition(".")[0] for name in weights(case.halves.text)} <= {"model", "lm_head"}
    config = json.loads((case.halves.text / "config.json").read_text())
    assert config["architectures"] == [case.halves.text_model]
    assert not [name for name in config if "vision" in name or "image" in name]


def test_every_token_keeps_its_id_and_its_embedding(case: Case) -> None:
    before = case.whole.processor.tokenizer
    after = AutoTokenizer.from_pretrained(case.halves.text)
    assert after.get_vocab() == before.get_vocab()
    assert after.convert_tokens_to_ids(case.whole.placeholder) == case.placeholder_id
    text: Any = AutoModelForCausalLM.from_pretrained(case.halves.text, dtype="auto")
    table = case.whole.model.get_input_embeddings().weight
    assert torch.equal(text.get_input_embeddings().weight, table)


def test_how_to_generate_is_kept(folder: Callable[..., Path], tmp_path: Path) -> None:
    model = folder("generation_config.json", do_sample=True, temperature=0.7, top_p=0.9)
    halves = split(model, tmp_path / "halves")
    kept = GenerationConfig.from_pretrained(halves.text)
    assert (kept.eos_token_id, kept.do_sample, kept.temperature, kept.top_p) == (0, True, 0.7, 0.9)


def test_weights_stay_in_their_dtype(tmp_path: Path) -> None:
    whole = llava(tmp_path / "model")
    whole.model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    halves = split(tmp_path / "model", tmp_path / "halves")
    for half in (halves.text, halves.encoder):
        assert {tensor.dtype for tensor in weights(half).values()} == {torch.bfloat16}


# ---- chats


def test_a_chat_has_embeddings_where_the_whole_model_has_its_image(case: Case) -> None:
    chat = Chat(AutoTokenizer.from_pretrained(case.halves.text))
    rows = torch.ones(3, HIDDEN)
    parts = [
        {"type": "text", "text": "look at"},
        {"type": "prompt_embeds", "data": rows},
        {"type": "text", "text": "what is on it?"},
    ]
    prompt = chat.prompt([{"role": "user", "content": parts}], hidden_size=HIDDEN)
    processor = case.whole.processor
    said = [
        {"type": "text", "text": "look at\n"},
        {"type": "image"},
        {"type": "text", "text": "\nwhat is on it?"},
    ]
    whole = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": said}], tokenize=False, add_generation_prompt=True
    )
    expected: list[int | None] = []
    for token_id in processor.tokenizer(whole)["input_ids"]:
        expected += [None] * len(rows) if token_id == case.placeholder_id else [token_id]
    now = zip(prompt.token_ids, prompt.is_token_ids, strict=True)
    assert [token_id if is_token else None for token_id, is_token in now] == expected


def test_a_content_reads_the_same_as_a_string_and_in_parts(case: Case) -> None:
    tokenizer = AutoTokenizer.from_pretrained(case.halves.text)

    def rendered(content: Any) -> str:
        messages = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": content},
            {"role": "assistant", "content": None},
        ]
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert rendered(parts) == rendered("one\ntwo")
    assert "one\ntwo" in rendered(parts)
    assert "be brief" in rendered(parts)


def template(content: str) -> str:
    return "{% for message in messages %}{{ message['role'] }}: " + content + "; {% endfor %}"


STRING = "{{ '' + message['content'] }}"
PARTS = "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(template(STRING), id="that takes strings"),
        pytest.param(template(PARTS), id="that takes parts"),
        pytest.param(
            template(f"{{% if message['role'] == 'user' %}}{PARTS}{{% else %}}{STRING}{{% endif %}}"),
            id="that takes parts from users only",
        ),
        pytest.param(NO_SYSTEM + template(PARTS), id="that takes no system message"),
    ],
)
def test_text_passes_through_a_template(tmp_path: Path, kept: str) -> None:
    llava(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(kept)
    halves = split(tmp_path / "model", tmp_path / "halves")
    assert halves.has_chat_template
    tokenizer = AutoTokenizer.from_pretrained(halves.text)
    roles = ["user", "assistant", "user"] if NO_SYSTEM in kept else ["system", "user", "assistant", "user"]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for content in ("one\ntwo", parts):
        messages: list[Any] = [{"role": role, "content": content} for role in roles]
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        assert rendered == "".join(f"{role}: one\ntwo; " for role in roles)


@pytest.mark.parametrize("lost", ["{{ raise_exception('no') }}", "Hello"])
def test_a_template_that_refuses_or_loses_text_is_left_out(tmp_path: Path, lost: str) -> None:
    llava(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(lost)
    halves = split(tmp_path / "model", tmp_path / "halves")
    assert not halves.has_chat_template
    assert AutoTokenizer.from_pretrained(halves.text).chat_template is None


# ---- the encoder


def test_the_encoder_has_no_language_model(case: Case) -> None:
    held = weights(case.halves.encoder)
    names = {name.partition(".")[0] for name in held}
    tower = "connector" if "connector" in names else "multi_modal_projector"
    assert tower in names
    [language_model] = names & {"language_model", "text_model"}
    stand_in = {name: tensor for name, tensor in held.items() if name.startswith(language_model)}
    assert {name.split(".")[-2] for name in stand_in} == {"embed_tokens", "norm"}
    # Only what stands around an image's rows is left of the vocabulary.
    [table] = [tensor for name, tensor in stand_in.items() if "embed_tokens" in name]
    assert len(table) < 40


# ---- refusals


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("qwen2_vl", "M-RoPE"),
        ("qwen2_5_vl", "M-RoPE"),
        ("glm4v", "M-RoPE"),
        ("qwen3_vl", "deepstack"),
        ("mllama", "cross attention"),
        ("idefics", "cross attention"),
        ("paligemma", "both directions"),
        ("gemma3", "both directions"),
        ("gemma3n", "embeddings of their own"),
        ("chameleon", "tokens of the vocabulary"),
        ("florence2", "an encoder and a decoder"),
        ("llava_next", "none of those that are taken apart: idefics3, internvl, llava"),
        ("qwen2", "none of those that are taken apart"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_name_with_the_reason(
    tmp_path: Path, kind: str, reason: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(InvalidInput, match=rf"^a {kind} model .*{reason}"):
        split(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_every_kind_that_is_refused_with_a_reason_is_one_that_transformers_knows() -> None:
    from retinue.encoders.families import FAMILIES, REASONS

    assert {*REASONS, *FAMILIES} - {*CONFIG_MAPPING} == set()
    assert not REASONS.keys() & FAMILIES.keys()


def text_config(kind: str, **more: Any) -> dict[str, Any]:
    return {"text_config": {"model_type": kind, **more}}


@pytest.mark.parametrize(
    ("file", "entries", "reason"),
    [
        pytest.param("config.json", text_config("t5"), r"t5, is no causal one", id="not causal"),
        pytest.param(
            "config.json",
            text_config("llama", rope_parameters={"rope_type": "default", "mrope_section": [4, 6, 6]}),
            "M-RoPE",
            id="M-RoPE",
        ),
        pytest.param(
            "processor_config.json",
            {"processor_class": "OtherProcessor"},
            "is a OtherProcessor, not a LlavaProcessor",
            id="processor",
        ),
    ],
)
def test_a_family_with_a_part_of_another_kind_is_refused(
    folder: Callable[..., Path], tmp_path: Path, file: str, entries: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidInput, match=reason):
        split(folder(file, **entries), tmp_path / "out")


def test_mistral3_with_another_tower_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    config = {"model_type": "mistral3", "vision_config": {"model_type": "siglip_vision_model"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="siglip_vision_model tower"):
        split(tmp_path / "model", tmp_path / "out")


def test_an_image_token_that_does_not_stand_by_itself_is_refused(tmp_path: Path) -> None:
    whole = tiny.internvl(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["image_token_id"] = whole.processor.tokenizer.convert_tokens_to_ids("Ġon")
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="does not keep the image token 'Ġon' apart"):
        split(tmp_path / "model", tmp_path / "out")


def test_a_tokenizer_that_would_be_read_as_another_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a qwen2 model, transformers makes a Qwen2Tokenizer of any tokenizer."""
    plain = tiny.tokenizer(tiny.SPECIAL, template=tiny.TEMPLATE % "<image>")
    monkeypatch.setattr(tiny, "tokenizer", lambda *_, **__: plain)
    tiny.llava_siglip(tmp_path / "model")
    with pytest.raises(InvalidInput, match="would be read as a Qwen2Tokenizer"):
        split(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


# ---- the folder


def test_a_folder_in_use_is_left_alone(one: Case, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    for out in (tmp_path, tmp_path / "mine"):
        with pytest.raises(InvalidInput, match="not an empty folder"):
            split(one.whole.folder, out)
    assert (tmp_path / "mine").read_text() == "kept"


def test_an_empty_folder_is_filled(one: Case, tmp_path: Path) -> None:
    halves = split(one.whole.folder, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder", "text"]
    assert (halves.family, halves.hidden_size) == ("llava", HIDDEN)


def test_nothing_is_left_of_a_split_that_fails(tmp_path: Path) -> None:
    llava(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        split(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
