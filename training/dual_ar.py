"""The model that is trained: S2-Pro's architecture with its tensor names, in plain torch.

The engine computes the same from the same tensors; `tests/voice/test_training_model.py` holds
them together.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Stack:
    """Shape of one stack of blocks."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    qk_norm: bool
    rope_base: float
    eps: float

    @staticmethod
    def read(fields: dict[str, Any]) -> Stack:
        """Of a table of `config.json`."""
        return Stack(
            layers=fields["n_layer"],
            width=fields["dim"],
            heads=fields["n_head"],
            kv_heads=fields["n_local_heads"],
            head_dim=fields["head_dim"],
            mlp=fields["intermediate_size"],
            qk_norm=fields["attention_qk_norm"],
            rope_base=fields["rope_base"],
            eps=fields["norm_eps"],
        )


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, self._eps).to(x.dtype)


class Attention(nn.Module):
    """Causal attention over `x [batch, length, width]`."""

    def __init__(self, shape: Stack) -> None:
        super().__init__()
        self._shape = shape
        heads = shape.heads + 2 * shape.kv_heads
        self.wqkv = nn.Linear(shape.width, heads * shape.head_dim, bias=False)
        self.wo = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)
        if shape.qk_norm:
            self.q_norm = Norm(shape.head_dim, shape.eps)
            self.k_norm = Norm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self._shape
        batch, length, _ = x.shape
        qkv = self.wqkv(x).view(batch, length, -1, s.head_dim)
        query, key, value = qkv.split([s.heads, s.kv_heads, s.kv_heads], dim=2)
        if s.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = turn_pairs(query, cos, sin), turn_pairs(key, cos, sin)
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return self.wo(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Stack) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.mlp, bias=False)
        self.w3 = nn.Linear(shape.width, shape.mlp, bias=False)
        self.w2 = nn.Linear(shape.mlp, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(self, shape: Stack, dropout: float) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.width, shape.eps)
        self.attention = Attention(shape)
        self.ffn_norm = Norm(shape.width, shape.eps)
        self.feed_forward = FeedForward(shape)
        self._dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self._dropout(self.feed_forward(self.ffn_norm(x)))


def rope_tables(shape: Stack, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [positions, 1, head_dim / 2], rounded to bfloat16."""
    pairs = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    frequencies = shape.rope_base ** (-pairs / shape.head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)[:, None]
    return angles.cos().bfloat16().float(), angles.sin().bfloat16().float()


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of adjacent pairs of `x [batch, length, heads, head_dim]`."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class Trunk(nn.Module):
    """A stack of blocks with its final norm."""

    def __init__(self, shape: Stack, positions: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = Norm(shape.width, shape.eps)
        cos, sin = rope_tables(shape, positions)
        self.register_buffer("_cos", cos, persistent=False)
        self.register_buffer("_sin", sin, persistent=False)

    def run(self, x: Tensor) -> Tensor:
        """`x [batch, length, width]` -> the same after all blocks and the norm."""
        cos, sin = self.get_buffer("_cos")[: x.shape[1]], self.get_buffer("_sin")[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class TextModel(Trunk):
    """The backbone over rows."""

    def __init__(self, shape: Stack, vocab: int, positions: int, dropout: float) -> None:
        super().__init__(shape, positions, dropout)
        self.embeddings = nn.Embedding(vocab, shape.width)


class TextPart(nn.Module):
    """One more level, for the tensors' published names."""

    def __init__(self, model: TextModel) -> None:
        super().__init__()
        self.model = model


class AudioDecoder(Trunk):
    """The codebook transformer, and the tables of codes."""

    def __init__(self, shape: Stack, width: int, books: int, entries: int, dropout: float) -> None:
        super().__init__(shape, books, dropout)
        self.codebook_embeddings = nn.Embedding(books * entries, width)
        self.embeddings = nn.Embedding(entries, shape.width)
        self.project_in = nn.Linear(width, shape.width)
        self.output = nn.Linear(shape.width, entries, bias=False)


class DualAr(nn.Module):
    """Rows in; hidden states, logits of the token and of the codes out."""

    def __init__(self, config: dict[str, Any], dropout: float = 0.0) -> None:
        super().__init__()
        text, audio = config["text_config"], config["audio_decoder_config"]
        self.books, self.entries = audio["num_codebooks"], audio["vocab_size"]
        self.stop = config["eos_token_id"]
        self.semantic_first = config["semantic_start_token_id"]
        self.semantic_last = config["semantic_end_token_id"]
        backbone = Stack.read(text)
        self.text_model = TextPart(
            TextModel(backbone, text["vocab_size"], text["max_seq_len"], dropout)
        )
        self.audio_decoder = AudioDecoder(
            Stack.read(audio), backbone.width, self.books, self.entries, dropout
        )
        self._dropout = nn.Dropout(dropout)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("wo.weight", "w2.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / (2 * backbone.layers) ** 0.5 if deep else 0.02
                )

    def embed(self, rows: Tensor) -> Tensor:
        """`rows int64 [batch, length, 1 + books]` -> [batch, length, width]."""
        tokens = rows[..., 0]
        x = self.text_model.model.embeddings(tokens)
        offsets = torch.arange(self.books, device=rows.device) * self.entries
        codes = self.audio_decoder.codebook_embeddings(rows[..., 1:] + offsets).sum(dim=-2)
        semantic = (tokens >= self.semantic_first) & (tokens <= self.semantic_last)
        return torch.where(semantic[..., None], (x + codes) / (1 + self.books) ** 0.5, x)

    def hidden(self, rows: Tensor) -> Tensor:
        """Hidden states after the final norm, [batch, length, width]."""
        return self.text_model.model.run(self._dropout(self.embed(rows)))

    def token_logits(self, hidden: Tensor) -> Tensor:
        """[..., entries + 1]: codes of book 0 in order, then stop."""
        table = self.text_model.model.embeddings.weight
        head = torch.cat(
            (table[self.semantic_first : self.semantic_last + 1], table[self.stop, None])
        )
        return functional.linear(hidden, head)

    def code_logits(self, hidden: Tensor, codes: Tensor) -> Tensor:
        """`hidden [m, width]` of rows whose codes are `codes [m, books]` -> [m, books - 1, entries]
        of books 1 and on."""
        audio = self.audio_decoder
        x = torch.cat((audio.project_in(hidden)[:, None], audio.embeddings(codes[:, :-1])), dim=1)
        return audio.output(audio.run(x)[:, 1:])


def read_config(path: Path) -> dict[str, Any]:
    """A `config.json`."""
    config: dict[str, Any] = json.loads(path.read_text())
    return config
