"""A model on a GPU: everything between rows in and rows out, never waiting."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor

from duplet_core.errors import InvalidInput, Reason
from duplet_engine.gpu_attend_step import launch_attend_step
from duplet_engine.gpu_codes import MOST_CODEBOOKS, GpuCodes
from duplet_engine.gpu_draw import MOST_ENTRIES, launch_draw
from duplet_engine.gpu_draw_wide import launch_draw_wide
from duplet_engine.gpu_embed import launch_embed_rows
from duplet_engine.gpu_heads import Places
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_linear import logits_of
from duplet_engine.gpu_stack import Attend, GpuTransformer
from duplet_engine.gpu_state import Drawn, StreamState, launch_advance
from duplet_engine.model_config import ModelConfig


class GpuModel:
    """Backbone, head and, in a dual-AR model, codebook transformer. Owns them."""

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
        self.config = config
        self._text = weights.pop("text_model.model.embeddings.weight")
        self._backbone = GpuTransformer(
            config.backbone, weights, "text_model.model", config.longest_sequence
        )
        device = self._text.device
        self._entries = len(config.drawable_ids)
        self._stop_index = config.drawable_ids.index(config.stop_id)
        self._drawn_ids = torch.tensor(config.drawn_ids, dtype=torch.int32, device=device)
        head = self._text
        if not config.tied_head:
            head = weights.pop("text_model.model.output.weight")
        # Without codebooks every id is drawable, in order: the table itself, which is large.
        ids = torch.tensor(config.drawable_ids, device=device)
        self._head = head[ids] if config.codebooks else head
        self._codes: GpuCodes | None = None
        if config.codebook_transformer is not None:
            self._codes = GpuCodes(config, config.codebook_transformer, weights, slots)

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
        that draws take: after the final norm, or before it."""
        code_tables = self._text if self._codes is None else self._codes.tables
        x = launch_embed_rows(rows, self._text, code_tables, self.config)
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
        c, codes = self.config, self._codes
        m = hidden.shape[0]
        normed = hidden if c.hidden_after_norm else self._backbone.norm(hidden)
        logits = logits_of(normed, self._head)
        drawn = Drawn(
            index=slots.new_empty(m),
            codes=slots.new_empty(m, c.codebooks),
            broken=slots.new_empty(m),
            stop_index=self._stop_index,
            code_entries=c.codebook_entries,
            code_embeddings=None if codes is None else codes.embeddings,
        )
        if codes is None:
            launch_draw_wide(logits, self._entries, state, slots, drawn)
        else:
            x = codes.begin(hidden)
            launch_draw(logits, self._entries, state, slots, 0, drawn, x[1::2])
            codes.draw(x, drawn, state, slots)
        return launch_advance(state, slots, drawn, self._drawn_ids, c.stop_id)


def _check_covered(config: ModelConfig) -> None:
    small = config.codebook_transformer
    stacks = (config.backbone,) if small is None else (config.backbone, small)
    checks = (
        (
            small is not None and len(config.drawable_ids) > MOST_ENTRIES,
            f"drawable_ids are {len(config.drawable_ids)}, at most {MOST_ENTRIES} can be",
        ),
        (
            config.codebooks > MOST_CODEBOOKS,
            f"codebooks is {config.codebooks}, at most {MOST_CODEBOOKS} can be",
        ),
        (any(s.out_bias for s in stacks), "out_bias is true"),
        *(
            (bool(s.head_dim & (s.head_dim - 1)), f"head_dim is {s.head_dim}, no power of two")
            for s in stacks
        ),
    )
    for wrong, why in checks:
        if wrong:
            raise InvalidInput(Reason.INVALID_REQUEST, f"model {config.name!r} on a GPU: {why}")
