"""The dual-AR transformer on a GPU: everything between rows in and rows out, never waiting.

What `duplet_engine.model` computes in float32 and fixed tiles is computed here in the weights'
dtype with the stream of activations in float32, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch
from torch import Tensor

from duplet_core.errors import InvalidInput, Reason
from duplet_engine.arithmetic import rope_tables
from duplet_engine.gpu_attend_step import launch_attend_step
from duplet_engine.gpu_draw import MOST_ENTRIES, launch_draw
from duplet_engine.gpu_embed import launch_embed_rows
from duplet_engine.gpu_heads import HeadWeights, Places, launch_place_heads
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_linear import linear, logits_of
from duplet_engine.gpu_norm import launch_add_norm
from duplet_engine.gpu_state import StreamState, launch_advance
from duplet_engine.gpu_swiglu import gated_linear
from duplet_engine.model_config import ModelConfig, TransformerConfig

Attend = Callable[[int, Tensor], Tensor]
"""Answers a layer's rotated queries [m, heads * head_dim] with as much."""

_ROW_KV_ROWS = 16
"""Rows of a page that holds one output row's codebook positions."""


class GpuBlock:
    """One block's weights. Owns the fused ones, shares the others with the mapping's maker."""

    def __init__(
        self,
        config: TransformerConfig,
        weights: MutableMapping[str, Tensor],
        prefix: str,
        tables: tuple[Tensor, Tensor],
    ) -> None:
        """Takes the block's tensors out of `weights`."""
        self.attention_norm = weights.pop(f"{prefix}.attention_norm.weight")
        self.wqkv = weights.pop(f"{prefix}.attention.wqkv.weight")
        self.wo = weights.pop(f"{prefix}.attention.wo.weight")
        self.ffn_norm = weights.pop(f"{prefix}.ffn_norm.weight")
        gate = weights.pop(f"{prefix}.feed_forward.w1.weight")
        up = weights.pop(f"{prefix}.feed_forward.w3.weight")
        self.w13 = torch.cat((gate, up))
        del gate, up
        self.w2 = weights.pop(f"{prefix}.feed_forward.w2.weight")
        q_norm = k_norm = None
        if config.qk_norm:
            q_norm = weights.pop(f"{prefix}.attention.q_norm.weight")
            k_norm = weights.pop(f"{prefix}.attention.k_norm.weight")
        self.heads = HeadWeights(q_norm, k_norm, *tables, config.norm_eps)


class GpuTransformer:
    """A stack of blocks with its final norm. Owns its weights and RoPE tables."""

    def __init__(
        self,
        config: TransformerConfig,
        weights: MutableMapping[str, Tensor],
        prefix: str,
        positions: int,
    ) -> None:
        """Takes the stack's tensors out of `weights`, which has them on one device."""
        self._config = config
        self._norm = weights.pop(f"{prefix}.norm.weight")
        cos, sin = rope_tables(config, positions, self._norm.dtype)
        tables = cos.to(self._norm.device), sin.to(self._norm.device)
        self._blocks = [
            GpuBlock(config, weights, f"{prefix}.layers.{layer}", tables)
            for layer in range(config.layers)
        ]

    def forward(self, x: Tensor, kv: PagedKv, places: Places, attend: Attend) -> Tensor:
        """Queue a pass on the current stream.

        Args:
            x: float32 [m, width]; afterwards it holds the state before the final norm.
            kv: where the rows' keys and values go.
            places: of the rows.
            attend: called once a layer, after its keys and values are queued.

        Returns:
            [m, width] after the final norm, in the weights' dtype.
        """
        c = self._config
        delta: Tensor | None = None
        for layer, block in enumerate(self._blocks):
            hidden = launch_add_norm(x, delta, block.attention_norm, c.norm_eps)
            qkv = linear(hidden, block.wqkv)
            query = launch_place_heads(qkv, block.heads, kv, layer, places, c.heads)
            delta = linear(attend(layer, query), block.wo)
            hidden = launch_add_norm(x, delta, block.ffn_norm, c.norm_eps)
            delta = linear(gated_linear(hidden, block.w13), block.w2)
        return launch_add_norm(x, delta, self._norm, c.norm_eps)

    def norm(self, hidden: Tensor) -> Tensor:
        """Queue the final norm of `hidden` [m, width], a state before it."""
        return launch_add_norm(hidden.float(), None, self._norm, self._config.norm_eps)


class GpuModel:
    """Backbone, head and codebook transformer. Owns its weights and the codebooks' scratch KV."""

    def __init__(
        self,
        config: ModelConfig,
        weights: MutableMapping[str, Tensor],
        slots: int,
    ) -> None:
        """Takes the model's tensors out of `weights`, so that none is held twice.

        Args:
            config: the model's.
            weights: on one device, float32 or bfloat16.
            slots: most streams of one step.

        Raises:
            InvalidInput: a model that the GPU's kernels do not cover.
        """
        _check_covered(config)
        small = config.codebook_transformer
        assert small is not None
        self.config = config
        self._text = weights.pop("text_model.model.embeddings.weight")
        self._backbone = GpuTransformer(
            config.backbone, weights, "text_model.model", config.longest_sequence
        )
        device = self._text.device
        ids = torch.tensor(config.drawable_ids, device=device)
        self._entries = len(config.drawable_ids)
        head = self._text
        if not config.tied_head:
            head = weights.pop("text_model.model.output.weight")
        self._head = head[ids]
        self._drawn_ids = torch.tensor(config.drawn_ids, dtype=torch.int32, device=device)
        self._code_tables = weights.pop("audio_decoder.codebook_embeddings.weight")
        self._small_text = weights.pop("audio_decoder.embeddings.weight")
        self._small = GpuTransformer(small, weights, "audio_decoder", config.codebooks)
        output = weights.pop("audio_decoder.output.weight")
        self._small_heads = [output[:size] for size in config.codebook_sizes]
        self._small_kv = PagedKv.scratch(
            small.layers, slots, _ROW_KV_ROWS, small.kv_heads, small.head_dim, self._text
        )
        streams = torch.arange(slots, dtype=torch.int32, device=device)
        self._own_page = streams[:, None].contiguous()
        self._streams = streams
        self._book_positions = (
            torch.arange(config.codebooks, dtype=torch.int32, device=device)
            .repeat_interleave(slots)
            .view(config.codebooks, slots)
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV."""
        return self._text.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._text.device

    def forward(self, rows: Tensor, kv: PagedKv, places: Places, attend: Attend) -> Tensor:
        """Queue the backbone over `rows` int32 [m, columns]; returns the hidden states [m, width]
        that the codebook transformer takes: after the final norm, or before it."""
        x = launch_embed_rows(rows, self._text, self._code_tables, self.config)
        hidden = self._backbone.forward(x, kv, places, attend)
        return hidden if self.config.hidden_after_norm else x.to(hidden.dtype)

    def step(self, state: StreamState, slots: Tensor, kv: PagedKv, splits: int) -> Tensor:
        """Queue one decode step: KV of the slots' newest rows, and their next rows.

        Args:
            state: read, and written with the drawn rows.
            slots: int32 [m], distinct but for the spare.
            kv: of the pool.
            splits: of attention, see `choose_splits`.

        Returns:
            int32 [m, columns + 1]: the drawn rows, and 1 where the model gave no finite numbers
            and the row means nothing.
        """
        heads = self.config.backbone.heads
        places = Places(state.tables, slots, state.positions.index_select(0, slots))

        def attend(layer: int, query: Tensor) -> Tensor:
            return launch_attend_step(
                query, kv, layer, places.tables, slots, places.positions, heads, splits
            )

        hidden = self.forward(state.rows.index_select(0, slots), kv, places, attend)
        return self.draw_rows(hidden, state, slots)

    def draw_rows(self, hidden: Tensor, state: StreamState, slots: Tensor) -> Tensor:
        """Queue drawing the row after each slot's newest one; arguments and result as in `step`,
        `hidden` [m, width] `forward`'s of the newest rows."""
        c = self.config
        m = hidden.shape[0]
        drawn, broken = slots.new_empty(m), slots.new_empty(m)
        codes = slots.new_empty(m, c.codebooks)
        stop_index = self._entries - 1
        draws = (drawn, codes, broken, stop_index, c.codebook_entries)
        normed = hidden if c.hidden_after_norm else self._backbone.norm(hidden)
        logits = logits_of(normed, self._head)
        launch_draw(logits, self._entries, state, slots, 0, *draws)
        x = torch.cat((hidden, self._small_text[codes[:, 0]])).float()
        for book in range(1, c.codebooks):
            rows = 2 * m if book == 1 else m
            places = self._row_places(book, m)
            out = self._small.forward(x, self._small_kv, places, self._attend_row(places))
            logits = logits_of(out[rows - m :], self._small_heads[book])
            launch_draw(logits, c.codebook_sizes[book], state, slots, book + 1, *draws)
            x = self._small_text[codes[:, book]].float()
        return launch_advance(state, slots, drawn, codes, broken, self._drawn_ids, c.stop_id)

    def _row_places(self, book: int, m: int) -> Places:
        """Positions of one pass; the first one takes positions 0 and 1 together."""
        stream, position = self._streams[:m], self._book_positions[book, :m]
        if book == 1:
            stream = torch.cat((stream, stream))
            position = torch.cat((self._book_positions[0, :m], position))
        return Places(self._own_page, stream, position)

    def _attend_row(self, places: Places) -> Attend:
        small = self.config.codebook_transformer
        assert small is not None
        heads = small.heads

        def attend(layer: int, query: Tensor) -> Tensor:
            return launch_attend_step(
                query,
                self._small_kv,
                layer,
                places.tables,
                places.table_index,
                places.positions,
                heads,
                splits=1,
                block_rows=_ROW_KV_ROWS,
            )

        return attend


def _check_covered(config: ModelConfig) -> None:
    small = config.codebook_transformer
    if small is None:
        raise _refuse(config, "codebooks is 0: plain language models run on the CPU only")
    stacks = (config.backbone, small)
    checks = (
        (
            len(config.drawable_ids) > MOST_ENTRIES,
            f"drawable_ids are {len(config.drawable_ids)}, at most {MOST_ENTRIES} can be",
        ),
        (
            config.codebooks > _ROW_KV_ROWS,
            f"codebooks is {config.codebooks}, at most {_ROW_KV_ROWS} can be",
        ),
        (
            config.projects_hidden,
            f"width is {small.width} in the codebook transformer and {config.backbone.width} "
            "in the backbone",
        ),
        (bool(config.other_stop_ids), f"other_stop_ids are {list(config.other_stop_ids)}"),
        (any(s.qkv_bias for s in stacks), "qkv_bias is true"),
        (any(s.out_bias for s in stacks), "out_bias is true"),
        *(
            (bool(s.head_dim & (s.head_dim - 1)), f"head_dim is {s.head_dim}, no power of two")
            for s in stacks
        ),
    )
    for wrong, why in checks:
        if wrong:
            raise _refuse(config, why)


def _refuse(config: ModelConfig, why: str) -> InvalidInput:
    return InvalidInput(Reason.INVALID_REQUEST, f"model {config.name!r} on a GPU: {why}")
