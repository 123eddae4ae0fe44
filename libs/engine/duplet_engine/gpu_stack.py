"""A stack of pre-norm blocks on a GPU: backbone and codebook transformer are one each.

What `duplet_engine.model` computes in float32 and fixed tiles is computed here in the weights'
dtype with the stream of activations in float32, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping

import torch
from torch import Tensor

from duplet_engine.arithmetic import rope_tables
from duplet_engine.gpu_heads import HeadWeights, Places, launch_place_heads
from duplet_engine.gpu_kv import PagedKv
from duplet_engine.gpu_linear import linear
from duplet_engine.gpu_norm import launch_add_norm
from duplet_engine.gpu_swiglu import gated_linear
from duplet_engine.model_config import TransformerConfig

Attend = Callable[[int, Tensor], Tensor]
"""Answers a layer's rotated queries [m, heads * head_dim] with as much."""


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
        bias = weights.pop(f"{prefix}.attention.wqkv.bias") if config.qkv_bias else None
        self.heads = HeadWeights(bias, q_norm, k_norm, *tables, config.norm_eps)


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
