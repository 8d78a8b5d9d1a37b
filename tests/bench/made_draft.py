"""Makes a draft model for a bench: the first blocks of a model, with an output matrix fitted to given texts.

There is no smaller model with the starter model's tokenizer, so one is made: it has the starter's embedding and first
`BLOCKS` blocks, and an output matrix by which its last hidden state gives the logits that the whole model gives, fitted
by least squares on the bench's own texts. On these it guesses as a good draft model would; on any other it is useless.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from engine.local_model import LocalModel
from engine.model.kv_cache import Segment
from engine.sources.base import EMBEDDING_PART, HEAD_PART, ModelSource, block_part
from engine.sources.tensors import load_part

BLOCKS = 2
_RIDGE = 1e-4  # of the mean square of a feature: keeps the fit from amplifying noise
_NAMES = {
    "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}  # fmt: skip


def make_draft(
    folder: Path, source: ModelSource, model: LocalModel, texts: Sequence[tuple[int, Sequence[int]]]
) -> None:
    """Write a draft model for `source` into a folder; each text is its tokens, and how many of them are the prompt."""
    pairs = [_features(model, tokens, prompt) for prompt, tokens in texts]
    x, y = torch.cat([first for first, _ in pairs]), torch.cat([last for _, last in pairs])  # (N, hidden) each
    ridge = _RIDGE * float((x * x).mean()) * x.shape[0]
    fitted = x.T @ torch.linalg.solve(x @ x.T + ridge * torch.eye(x.shape[0]), y)  # (hidden, hidden): x @ fitted = y
    embedding = load_part(source, EMBEDDING_PART, torch.float32)["embedding"]
    output = load_part(source, HEAD_PART, torch.float32).get("output", embedding)
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": output @ fitted.T}
    tensors["model.norm.weight"] = torch.ones(source.config.hidden_size)
    for index in range(BLOCKS):
        for role, tensor in load_part(source, block_part(index), torch.float32).items():
            tensors[f"model.layers.{index}.{_NAMES[role]}.weight"] = tensor
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(source)))
    (folder / "tokenizer.json").write_text(source.tokenizer.tokenizer_json)


@torch.inference_mode()
def _features(model: LocalModel, tokens: Sequence[int], prompt: int) -> tuple[Tensor, Tensor]:
    """Return what the draft's and the whole model's output matrix see at each position that chooses a token."""
    eps, size = model.config.norm_eps, (model.config.hidden_size,)
    leases = [model.span.open(len(tokens)) for _ in range(2)]
    try:
        hidden = model.ends.embed(tokens)
        early = model.span.step(hidden, [Segment(leases[0], 0, len(tokens))], (0, BLOCKS))
        late = model.span.step(early, [Segment(leases[1], 0, len(tokens))], (BLOCKS, model.config.n_blocks))
    finally:
        for lease in leases:
            lease.close()
    normed = F.rms_norm(late, size, model.ends.final_norm, eps)
    return F.rms_norm(early, size, None, eps)[prompt - 1 :].clone(), normed[prompt - 1 :].clone()


def _config(source: ModelSource) -> dict[str, Any]:
    c = source.config
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": BLOCKS,
        "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size, "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim, "vocab_size": c.vocab_size,
        "max_position_embeddings": c.context_length, "rms_norm_eps": c.norm_eps, "rope_theta": c.rope.theta,
        "tie_word_embeddings": False, "eos_token_id": list(c.eos_ids), "torch_dtype": "float32",
    }  # fmt: skip
