"""A model of a hundred thousand random parameters for real vLLM: seconds to load, tokens that follow the context."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
N_VOCABULARY = 288
FIRST_BYTE = len(SPECIAL)
"""Token of byte 0; prompts are drawn from the 256 tokens from here on."""

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class ModelSpec:
    """The sizes are what vLLM's CPU attention takes: head sizes of 32 and more, blocks of 32 tokens and more."""

    arch: str = "qwen3"
    n_layers: int = 2
    sliding: int = 0
    """Window of every other layer (llama only): two KV-cache groups."""
    seed: int = 0
    """Another seed is another checkpoint of the same shape."""
    hidden: int = 64
    n_heads: int = 4
    n_kv_heads: int = 2
    head: int = 32
    context: int = 4096
    std: float = 0.35
    """Wide enough that greedy tokens are diverse and follow the context."""

    @property
    def config(self) -> dict:
        made = {
            "architectures": ["Qwen3ForCausalLM" if self.arch == "qwen3" else "LlamaForCausalLM"],
            "model_type": self.arch,
            "vocab_size": N_VOCABULARY,
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head,
            "max_position_embeddings": self.context,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "dtype": "float32",
        }
        if self.sliding:
            made["sliding_window"] = self.sliding
            made["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in range(self.n_layers)]
        return made


QWEN3 = ModelSpec()
HYBRID = ModelSpec(arch="llama", n_layers=4, sliding=64)


def make_model(folder: Path, spec: ModelSpec = QWEN3) -> str:
    """Write the model to ``folder``, over what is there, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    documents = {
        "config.json": spec.config,
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": spec.context,
            "clean_up_tokenization_spaces": False,
            "chat_template": _TEMPLATE,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=1))
    save_file(_weights(spec), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return str(folder)


def _weights(spec: ModelSpec) -> dict[str, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(spec.seed))

    def drawn(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * spec.std).astype(np.float32)

    def ones(n: int) -> np.ndarray:
        return np.ones(n, np.float32)

    hidden, wide = spec.hidden, 2 * spec.hidden
    weights = {"model.embed_tokens.weight": drawn(N_VOCABULARY, hidden)}
    for i in range(spec.n_layers):
        at = f"model.layers.{i}."
        weights[at + "self_attn.q_proj.weight"] = drawn(spec.n_heads * spec.head, hidden)
        weights[at + "self_attn.k_proj.weight"] = drawn(spec.n_kv_heads * spec.head, hidden)
        weights[at + "self_attn.v_proj.weight"] = drawn(spec.n_kv_heads * spec.head, hidden)
        weights[at + "self_attn.o_proj.weight"] = drawn(hidden, spec.n_heads * spec.head)
        if spec.arch == "qwen3":
            weights[at + "self_attn.q_norm.weight"] = ones(spec.head)
            weights[at + "self_attn.k_norm.weight"] = ones(spec.head)
        weights[at + "mlp.gate_proj.weight"] = drawn(wide, hidden)
        weights[at + "mlp.up_proj.weight"] = drawn(wide, hidden)
        weights[at + "mlp.down_proj.weight"] = drawn(hidden, wide)
        weights[at + "input_layernorm.weight"] = ones(hidden)
        weights[at + "post_attention_layernorm.weight"] = ones(hidden)
    weights["model.norm.weight"] = ones(hidden)
    weights["lm_head.weight"] = drawn(N_VOCABULARY, hidden)
    return weights
