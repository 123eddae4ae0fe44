"""The dual-AR transformer: rows in, hidden states and drawn rows out."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from duplet_engine.arithmetic import (
    Linear,
    ProductKind,
    apply_rope,
    rms_norm,
    rope_tables,
    spread_rope,
    swiglu,
)
from duplet_engine.attention import Attention, RowAttention
from duplet_engine.model_config import ModelConfig, TransformerConfig
from duplet_engine.sampling import (
    Draws,
    Noise,
    draw_entry,
    draw_token,
    noise_by_column,
    pad_entries,
)


class Block:
    """Attention and MLP, each behind a norm and added to the stream."""

    def __init__(
        self, config: TransformerConfig, weights: Mapping[str, Tensor], prefix: str
    ) -> None:
        c = self._config = config
        attention, ffn = f"{prefix}.attention", f"{prefix}.feed_forward"
        self._attention_norm = weights[f"{prefix}.attention_norm.weight"]
        self._wqkv = Linear(
            weights[f"{attention}.wqkv.weight"],
            weights[f"{attention}.wqkv.bias"] if c.qkv_bias else None,
        )
        self._wo = Linear(
            weights[f"{attention}.wo.weight"],
            weights[f"{attention}.wo.bias"] if c.out_bias else None,
        )
        if c.qk_norm:
            q_norm, k_norm = (weights[f"{attention}.{n}_norm.weight"] for n in "qk")
            self._qk_norm = torch.stack([q_norm] * c.heads + [k_norm] * c.kv_heads)
        self._ffn_norm = weights[f"{prefix}.ffn_norm.weight"]
        # Gate and up in one product.
        self._w13 = Linear(torch.cat([weights[f"{ffn}.w1.weight"], weights[f"{ffn}.w3.weight"]]))
        self._w2 = Linear(weights[f"{ffn}.w2.weight"])

    @property
    def products(self) -> list[Linear]:
        return [self._wqkv, self._wo, self._w13, self._w2]

    def forward(self, layer: int, x: Tensor, turns: Tensor, attend: Attention) -> Tensor:
        """`x [m, width]` -> [m, width]; `turns [m, 1, head_dim / 2]` of `spread_rope`, at the
        rows' positions."""
        c = self._config
        qkv = self._wqkv(rms_norm(x, self._attention_norm, c.norm_eps))
        qkv = qkv.view(x.shape[0], c.heads + 2 * c.kv_heads, c.head_dim)
        query_key, value = qkv.split([c.heads + c.kv_heads, c.kv_heads], dim=1)
        if c.qk_norm:
            query_key = rms_norm(query_key, self._qk_norm, c.norm_eps)
        query_key = apply_rope(query_key, turns)
        x = x + self._wo(attend(layer, query_key[:, : c.heads], query_key[:, c.heads :], value))
        gate, up = self._w13(rms_norm(x, self._ffn_norm, c.norm_eps)).chunk(2, dim=-1)
        return x + self._w2(swiglu(gate, up))


class Transformer:
    """A stack of blocks with its final norm. Owns its RoPE tables."""

    def __init__(
        self,
        config: TransformerConfig,
        weights: Mapping[str, Tensor],
        prefix: str,
        positions: int,
    ) -> None:
        self._config = config
        self._blocks = [
            Block(config, weights, f"{prefix}.layers.{layer}") for layer in range(config.layers)
        ]
        self._norm = weights[f"{prefix}.norm.weight"]
        self._turns = spread_rope(*rope_tables(config, positions, self._norm.dtype))

    @property
    def products(self) -> list[Linear]:
        return [product for block in self._blocks for product in block.products]

    def forward(self, x: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """`x [m, width]` at `positions int64 [m]` -> [m, width] before the final norm."""
        turns = self._turns[positions]
        for layer, block in enumerate(self._blocks):
            x = block.forward(layer, x, turns, attend)
        return x

    def norm(self, x: Tensor) -> Tensor:
        """The final norm of `x [m, width]`."""
        return rms_norm(x, self._norm, self._config.norm_eps)


class DualAr:
    """Backbone, head and codebook transformer of one model. Owns what its products need of the
    weights, and shares the rest."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self._embeddings = weights["text_model.model.embeddings.weight"]
        self._backbone = Transformer(
            config.backbone, weights, "text_model.model", config.longest_sequence
        )
        self._ids = torch.tensor(config.drawn_ids)
        head = "embeddings" if config.tied_head else "output"
        table = weights[f"text_model.model.{head}.weight"]
        # Without codebooks every id is drawable, in order: the table itself, which is large.
        self._head = _head(table[list(config.drawable_ids)] if config.codebooks else table)
        self._stop_index = config.drawable_ids.index(config.stop_id)
        small = config.codebook_transformer
        if small is not None:
            self._code_tables = weights["audio_decoder.codebook_embeddings.weight"]
            self._books = torch.arange(config.codebooks)
            self._first_two = torch.arange(2)
            self._code_offsets = self._books * config.codebook_entries
            self._small_embeddings = weights["audio_decoder.embeddings.weight"]
            self._small = Transformer(small, weights, "audio_decoder", config.codebooks)
            self._project: Linear | None = None
            if config.projects_hidden:
                project = "audio_decoder.project_in"
                self._project = Linear(weights[f"{project}.weight"], weights[f"{project}.bias"])
            output = weights["audio_decoder.output.weight"]
            # The first codebook's entries are drawn as tokens.
            heads = {size: _head(output[:size]) for size in config.codebook_sizes[1:]}
            self._small_heads = [heads[size] for size in config.codebook_sizes[1:]]

    @property
    def product_kinds(self) -> set[ProductKind]:
        """Of every product that the model makes."""
        products = [self._head, *self._backbone.products]
        if self.config.codebook_transformer is not None:
            products += [*self._small.products, *self._small_heads]
            if self._project is not None:
                products.append(self._project)
        return {product.kind for product in products}

    def embed(self, rows: Tensor) -> Tensor:
        """`rows int64 [m, columns]` -> [m, width]."""
        c = self.config
        tokens = rows[:, 0]
        x = self._embeddings[tokens]
        if not c.codebooks:
            return x
        codes = self._code_tables[rows[:, 1:] + self._code_offsets]
        # One codebook after the other: a sum over a short dimension may regroup with m.
        total = x.float()
        for book in range(c.codebooks):
            total = total + codes[:, book]
        semantic = (tokens >= c.semantic_first) & (tokens <= c.semantic_last)
        if c.scaled_embeddings:
            total = total / c.columns**0.5
        return torch.where(semantic[:, None], total.to(x.dtype), x)

    def forward(self, rows: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """Run the backbone over `rows int64 [m, columns]` at `positions int64 [m]`, m whole row
        tiles; returns hidden states [m, width] before the final norm."""
        return self._backbone.forward(self.embed(rows), positions, attend)

    def token_logits(self, hidden: Tensor) -> Tensor:
        """`hidden [m, width]` of `forward` -> float32 [m, entries] over the drawable ids, -inf
        where padded."""
        logits = self._head(self._backbone.norm(hidden)).float()
        logits[:, self._ids.shape[0] :] = float("-inf")
        return logits

    def draw_rows(self, hidden: Tensor, draws: Draws, recent: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the next row of each sequence.

        Args:
            hidden: [m, width] of `forward` at the newest row of each, m whole row tiles.
            draws: how, [m].
            recent: int64 [m, LONGEST_WINDOW], indices drawn before.

        Returns:
            rows int64 [m, columns] (codes are zeros beside the stop id) and the indices drawn
            for column 0, int64 [m].
        """
        c = self.config
        # A second draw of the token has a column's number that no codebook has.
        first, *noises, second = noise_by_column(draws, c.columns + 1)
        index = draw_token(
            self.token_logits(hidden), draws, recent, self._stop_index, first, second
        )
        tokens = self._ids[index]
        if not c.codebooks:
            return tokens[:, None], index
        codes = self._draw_codes(hidden, tokens - c.semantic_first, draws, noises)
        stopped = tokens == c.stop_id
        codes.masked_fill_(stopped[:, None], 0)
        return torch.cat((tokens[:, None], codes), dim=1), index

    def _draw_codes(
        self, hidden: Tensor, first_code: Tensor, draws: Draws, noises: list[Noise]
    ) -> Tensor:
        """Codes int64 [m, codebooks], the first one given; `noises` of each codebook."""
        c = self.config
        small = c.codebook_transformer
        assert small is not None
        m = hidden.shape[0]
        if c.hidden_after_norm:
            hidden = self._backbone.norm(hidden)
        if self._project is not None:
            hidden = self._project(hidden)
        attend = RowAttention(small.layers, m, c.codebooks, small.kv_heads, small.head_dim)
        codes = [first_code.clamp(0, c.codebook_entries - 1)]
        for book in range(1, c.codebooks):
            x = self._small_embeddings[codes[-1]]
            if book == 1:
                # Positions 0, the hidden state, and 1, the first code, in one pass.
                x = torch.stack((hidden, x), dim=1).view(2 * m, -1)
                positions = self._first_two.repeat(m)
                attend.advance(0)
            else:
                positions = self._books[book].expand(m)
                attend.advance(book)
            out = self._small.forward(x, positions, attend)
            if book == 1:
                out = out.view(m, 2, -1)[:, 1].contiguous()
            logits = self._small_heads[book - 1](self._small.norm(out)).float()
            if c.codebook_sizes[book] < logits.shape[1]:
                logits[:, c.codebook_sizes[book] :] = float("-inf")
            codes.append(draw_entry(logits, draws, noises[book]))
        return torch.stack(codes, dim=1)


def _head(weight: Tensor) -> Linear:
    """The product with an output weight, which gets zero rows up to whole entry tiles."""
    missing = pad_entries(weight.shape[0]) - weight.shape[0]
    return Linear(functional.pad(weight, (0, 0, 0, missing)) if missing else weight)
