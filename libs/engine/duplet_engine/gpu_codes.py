"""The codebook transformer on a GPU: a row's codes after its token, one pass a codebook."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor

from duplet_engine.gpu_attend_step import launch_attend_step
from duplet_engine.gpu_draw import launch_draw
from duplet_engine.gpu_heads import Places
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_linear import linear, logits_of
from duplet_engine.gpu_stack import Attend, GpuTransformer
from duplet_engine.gpu_state import Drawn, StreamState
from duplet_engine.model_config import ModelConfig, TransformerConfig

MOST_CODEBOOKS = 16
"""Rows of a page that holds one output row's positions."""


class GpuCodes:
    """Owns the codebook transformer's weights and the scratch KV of its positions."""

    def __init__(
        self,
        config: ModelConfig,
        stack: TransformerConfig,
        weights: MutableMapping[str, Tensor],
        slots: int,
    ) -> None:
        """Takes its tensors out of `weights`.

        Args:
            config: the model's.
            stack: the codebook transformer's.
            weights: on one device.
            slots: most rows that are drawn together.
        """
        self._config = config
        self._heads = stack.heads
        self.tables = weights.pop("audio_decoder.codebook_embeddings.weight")
        self.embeddings = weights.pop("audio_decoder.embeddings.weight")
        self._stack = GpuTransformer(stack, weights, "audio_decoder", config.codebooks)
        self._project: tuple[Tensor, Tensor] | None = None
        if config.projects_hidden:
            weight = weights.pop("audio_decoder.project_in.weight")
            self._project = weight, weights.pop("audio_decoder.project_in.bias")
        output = weights.pop("audio_decoder.output.weight")
        self._outputs = [output[:size] for size in config.codebook_sizes]
        self._kv = PagedKv.scratch(
            stack.layers, slots, MOST_CODEBOOKS, stack.kv_heads, stack.head_dim, output
        )
        self._streams = torch.arange(slots, dtype=torch.int32, device=output.device)
        self._own_page = self._streams[:, None].contiguous()
        # The first pass takes two positions of each row, one after the other.
        self._twice = self._streams.repeat_interleave(2)
        self._first_positions = torch.arange(2 * slots, dtype=torch.int32, device=output.device) % 2
        self._positions = (
            torch.arange(config.codebooks, dtype=torch.int32, device=output.device)
            .repeat_interleave(slots)
            .view(config.codebooks, slots)
        )

    def begin(self, hidden: Tensor) -> Tensor:
        """Queue the first pass's input for `hidden` [m, width of the backbone]: float32
        [2 * m, width], each second row still to be written with its first code's embedding."""
        m = hidden.shape[0]
        x = hidden.new_empty(2 * m, self.embeddings.shape[1], dtype=torch.float32)
        if self._project is None:
            x[::2] = hidden
        else:
            weight, bias = self._project
            x[::2] = linear(hidden, weight).float().sum(0) + bias
        return x

    def draw(self, x: Tensor, drawn: Drawn, state: StreamState, slots: Tensor) -> None:
        """Queue drawing all codes but the first one.

        Args:
            x: of `begin`, whole.
            drawn: written. state: of the streams. slots: int32 [m].
        """
        sizes = self._config.codebook_sizes
        m = slots.shape[0]
        for book in range(1, len(sizes)):
            places = self._row_places(book, m)
            out = self._stack.forward(x, self._kv, places, self._attend(places))
            logits = logits_of(out.view(m, -1, out.shape[1])[:, -1], self._outputs[book])
            x = x.new_empty(m, x.shape[1])
            following = x if book + 1 < len(sizes) else None
            launch_draw(logits, sizes[book], state, slots, book + 1, drawn, following)

    def _row_places(self, book: int, m: int) -> Places:
        """Positions of one pass; the first one takes positions 0 and 1 together."""
        if book == 1:
            return Places(self._own_page, self._twice[: 2 * m], self._first_positions[: 2 * m])
        return Places(self._own_page, self._streams[:m], self._positions[book, :m])

    def _attend(self, places: Places) -> Attend:
        def attend(layer: int, query: Tensor) -> Tensor:
            return launch_attend_step(
                query,
                self._kv,
                layer,
                places.tables,
                places.table_index,
                places.positions,
                self._heads,
                splits=1,
                block_rows=MOST_CODEBOOKS,
            )

        return attend
