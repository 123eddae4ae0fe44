"""The model written down once more, straight from its formulas: no pages, no cache, no tiles,
float64. It shares no code with the engine but the names of the tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from duplet_engine.model_config import ModelConfig, TransformerConfig


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(x: Tensor, config: TransformerConfig) -> Tensor:
    """RoPE over `[positions, heads, dim]`: pairs as complex numbers."""
    positions, _, dim = x.shape
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    turns = config.rope_base**-exponents
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), turns)
    cos, sin = angles.cos(), angles.sin()
    if config.rope_rounded:
        cos, sin = cos.bfloat16(), sin.bfloat16()
    table = torch.complex(cos.double(), sin.double())
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], dim // 2, 2))
    return torch.view_as_real(pairs * table[:, None]).flatten(-2)


class PlainModel:
    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        self.config = config
        self.weights = {name: tensor.double() for name, tensor in weights.items()}

    def stack(self, x: Tensor, prefix: str, config: TransformerConfig) -> Tensor:
        """`[positions, width]` through all blocks, causal; before the final norm."""
        w = self.weights
        n, dim, kv = x.shape[0], config.head_dim, config.kv_heads
        hidden_from = torch.ones(n, n, dtype=torch.bool).triu(1)
        for layer in range(config.layers):
            p = f"{prefix}.layers.{layer}"
            h = norm(x, w[f"{p}.attention_norm.weight"], config.norm_eps)
            qkv = h @ w[f"{p}.attention.wqkv.weight"].T
            if config.qkv_bias:
                qkv = qkv + w[f"{p}.attention.wqkv.bias"]
            qkv = qkv.view(n, -1, dim)
            q, k, v = qkv[:, : config.heads], qkv[:, -2 * kv : -kv], qkv[:, -kv:]
            if config.qk_norm:
                q = norm(q, w[f"{p}.attention.q_norm.weight"], config.norm_eps)
                k = norm(k, w[f"{p}.attention.k_norm.weight"], config.norm_eps)
            q, k = turn(q, config), turn(k, config)
            heads = []
            for head in range(config.heads):
                shared = head // (config.heads // kv)
                scores = q[:, head] @ k[:, shared].T / dim**0.5
                weights = scores.masked_fill(hidden_from, -torch.inf).softmax(-1)
                heads.append(weights @ v[:, shared])
            x = x + torch.cat(heads, dim=-1) @ w[f"{p}.attention.wo.weight"].T
            if config.out_bias:
                x = x + w[f"{p}.attention.wo.bias"]
            h = norm(x, w[f"{p}.ffn_norm.weight"], config.norm_eps)
            gate = torch.nn.functional.silu(h @ w[f"{p}.feed_forward.w1.weight"].T)
            up = h @ w[f"{p}.feed_forward.w3.weight"].T
            x = x + (gate * up) @ w[f"{p}.feed_forward.w2.weight"].T
        return x

    def stream(self, rows: Tensor) -> Tensor:
        """`int64 [n, columns]` -> float64 [n, width] before the final norm."""
        c = self.config
        inputs = []
        for row in rows.tolist():
            e = self.weights["text_model.model.embeddings.weight"][row[0]].clone()
            if c.codebooks and c.semantic_first <= row[0] <= c.semantic_last:
                table = self.weights["audio_decoder.codebook_embeddings.weight"]
                for book, code in enumerate(row[1:]):
                    e += table[book * c.codebook_entries + code]
                if c.scaled_embeddings:
                    e /= c.columns**0.5
            inputs.append(e)
        return self.stack(torch.stack(inputs), "text_model.model", c.backbone)

    def logits(self, rows: Tensor) -> Tensor:
        """`int64 [n, columns]` -> float64 [n, vocab]."""
        c = self.config
        head = "embeddings" if c.tied_head else "output"
        weight = self.weights["text_model.model.norm.weight"]
        hidden = norm(self.stream(rows), weight, c.backbone.norm_eps)
        return hidden @ self.weights[f"text_model.model.{head}.weight"].T

    def code_logits(self, stream: Tensor, codes: list[int]) -> Tensor:
        """Logits of the code that follows `codes`, float64 [entries], given `stream [width]`."""
        c, w = self.config, self.weights
        small = c.codebook_transformer
        assert small is not None
        if c.hidden_after_norm:
            stream = norm(stream, w["text_model.model.norm.weight"], c.backbone.norm_eps)
        if small.width != c.backbone.width:
            stream = w["audio_decoder.project_in.weight"] @ stream
            stream = stream + w["audio_decoder.project_in.bias"]
        inputs = [stream, *(w["audio_decoder.embeddings.weight"][code] for code in codes)]
        out = self.stack(torch.stack(inputs), "audio_decoder", small)[-1]
        return w["audio_decoder.output.weight"] @ norm(
            out, w["audio_decoder.norm.weight"], small.norm_eps
        )

    def greedy_row(self, rows: Tensor) -> list[int]:
        """The most probable next row."""
        c = self.config
        logits = self.logits(rows)[-1]
        allowed = torch.full_like(logits, -torch.inf)
        allowed[list(c.drawable_ids)] = 0
        token = int((logits + allowed).argmax())
        if token == c.stop_id or not c.codebooks:
            return [token] + [0] * c.codebooks
        stream, codes = self.stream(rows)[-1], [token - c.semantic_first]
        for size in c.codebook_sizes[1:]:
            codes.append(int(self.code_logits(stream, codes)[:size].argmax()))
        return [token, *codes]
