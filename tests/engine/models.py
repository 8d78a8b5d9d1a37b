"""Small random models of every supported family, written by `transformers`, which is also their oracle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 272  # 256 bytes, three special tokens and some rows that no text uses
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Variant:
    """One configuration to test: a family, and what differs from the small default shape."""

    name: str
    family: str  # llama, mistral, qwen2 or qwen3
    settings: dict[str, Any] = field(default_factory=dict)


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}


_LLAMA3 = _rope(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
_YARN = _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
_YARN_TUNED = _rope(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0,
    attention_factor=1.25,
)  # fmt: skip

VARIANTS = (
    Variant("llama", "llama"),
    Variant("llama-tied", "llama", {"tie_word_embeddings": True}),
    Variant("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Variant("llama-llama3", "llama", _LLAMA3),
    Variant("llama-linear", "llama", _rope(rope_type="linear", factor=4.0)),
    Variant("llama-yarn", "llama", _YARN),
    Variant("llama-wide-heads", "llama", {"head_dim": 32}),
    Variant("llama-mha", "llama", {"num_key_value_heads": 4}),
    Variant("llama-mqa", "llama", {"num_key_value_heads": 1}),
    # SmolLM2's proportions: nine heads, three of keys and values, tied, a high base frequency.
    Variant(
        "smollm",
        "llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
         **_rope(rope_type="default", rope_theta=100_000.0), "rms_norm_eps": 1e-5},
    ),
    Variant("mistral", "mistral", {"sliding_window": None}),
    Variant("mistral-sliding", "mistral", {"sliding_window": 8}),
    Variant("qwen2", "qwen2"),
    Variant("qwen2-sliding", "qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    Variant("qwen2.5-tied", "qwen2", {"tie_word_embeddings": True, **_rope(rope_type="default", rope_theta=1e6)}),
    Variant("qwen2.5-yarn", "qwen2", _YARN_TUNED),
    Variant("qwen3", "qwen3", {"head_dim": 32}),
    Variant("qwen3-tied", "qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    Variant("qwen3-biases", "qwen3", {"head_dim": 32, "attention_bias": True}),
)  # fmt: skip
VARIANT = {variant.name: variant for variant in VARIANTS}


def oracle(variant: Variant, seed: int = 0) -> Any:
    """A random `transformers` model; biases and norms are random too, so that a forgotten one shows."""
    import transformers

    classes: dict[str, tuple[Any, Any]] = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = classes[variant.family]
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 257,
        "eos_token_id": 258, "initializer_range": 0.15,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    model = model_class(config_class(**{**shape, **variant.settings})).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            centre, spread = (1.0, 0.3) if "norm" in name else (0.0, 0.15)
            parameter.copy_(centre + spread * torch.randn(parameter.shape, generator=generator))
    return model


def write_folder(
    folder: Path, variant: Variant, *, seed: int = 0, dtype: torch.dtype = torch.float32, shard_size: str | None = None
) -> Any:
    """Write a model folder as `transformers` does (`shard_size` such as "60KB" splits it) and return the oracle."""
    model = oracle(variant, seed).to(dtype)
    model.save_pretrained(folder, **({"max_shard_size": shard_size} if shard_size else {}))
    write_tokenizer(folder)
    return model.to(torch.float32)


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    import transformers

    fast_class: Any = transformers.PreTrainedTokenizerFast
    fast = fast_class(
        tokenizer_object=byte_tokenizer(), bos_token=SPECIAL[1], eos_token=SPECIAL[2], unk_token=SPECIAL[0]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@contextmanager
def read_ranges(monkeypatch: Any) -> Iterator[list[tuple[Path, int, int]]]:
    """Record every (file, first byte, last byte) that is read through `Path.open` while the block runs."""
    seen: list[tuple[Path, int, int]] = []
    real_open = Path.open

    def recording(path: Path, *args: Any, **options: Any) -> Any:
        return _Recorder(real_open(path, *args, **{**options, "buffering": 0}), path, seen)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", recording)
        yield seen


class _Recorder:
    """A binary file that notes what is read from it."""

    def __init__(self, file: Any, path: Path, seen: list[tuple[Path, int, int]]) -> None:
        self.file, self.path, self.seen = file, path, seen

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def _note(self, start: int) -> None:
        self.seen.append((self.path, start, self.file.tell()))

    def seek(self, offset: int) -> int:
        return int(self.file.seek(offset))

    def read(self, count: int = -1) -> Any:
        start = self.file.tell()
        data = self.file.read(count)
        self._note(start)
        return data

    def readinto(self, buffer: Any) -> int:
        start = self.file.tell()
        count: int = self.file.readinto(buffer)
        self._note(start)
        return count
