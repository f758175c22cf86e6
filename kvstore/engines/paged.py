"""A Llama whose attention is ours: context in the store's blocks, new tokens in pages of its own.

    restore -> Context -> attention over it  \\
    new tokens -> own pages -> attention     -> merge_states -> the rest of the layer

A small engine to check kernels and formats with, and a pattern for those who call the kernels
themselves: one sequence, no batching.
"""

from __future__ import annotations

from typing import Any

from kvstore.core.errors import InvalidRequest, SpecError
from kvstore.core.spec import KVSpec
from kvstore.engines.identity import check_plain
from kvstore.engines.in_place import Context, Part, layout_of


class PagedDecoder:
    """One sequence of a transformers Llama, decoded from a context that lies in the store.

    `spec` is that of the model's raw KV (`identity.spec_of`), `context` what was restored of the
    sequence, raw or quantised; keys in it have their rotary positions already. Up to `room_tokens`
    more go to pages of the decoder's own, blocks of the same bytes as the store's. `backend` as in
    `kvstore.kernels.attention`. Raises SpecError for other models or blocks of another model.
    """

    def __init__(
        self,
        model: Any,
        spec: KVSpec,
        context: Context | None = None,
        *,
        room_tokens: int,
        backend: str | None = None,
    ) -> None:
        import torch

        self._torch, self._model, self._backend = torch, model, backend
        self.layout = layout_of(spec).raw
        _check_model(model, self.layout)
        self.context_tokens = 0 if context is None else context.tokens
        self.tokens = self.context_tokens
        self._parts: list[_Paged] = []
        if context is not None:
            _check_context(context, self.layout, model.device)
            self._parts = [_Paged(part, context.layout) for part in context.parts]
        blocks = -(-room_tokens // self.layout.block_size)
        self._pool = torch.zeros(
            (max(1, blocks), self.layout.block_bytes), dtype=torch.uint8, device=model.device
        )
        every = torch.arange(len(self._pool), dtype=torch.int32, device=model.device)
        self._own = _Paged(Part(self._pool, every), self.layout)
        self.room_tokens = room_tokens

    def extend(self, ids: Any) -> Any:
        """Computes more tokens, ids [n]; logits of each, [n, vocabulary]."""
        torch, base = self._torch, self._model.model
        ids = torch.as_tensor(ids, device=self._model.device)
        count, own = len(ids), self.tokens - self.context_tokens
        if ids.ndim != 1 or not count or own + count > self.room_tokens:
            raise InvalidRequest(
                f"{tuple(ids.shape)} ids after {own} of {self.room_tokens} tokens; pass [n] that "
                "fit room_tokens"
            )
        with torch.no_grad():
            places = torch.arange(self.tokens, self.tokens + count, device=ids.device)
            hidden = base.embed_tokens(ids)[None]
            rotary = base.rotary_emb(hidden, places[None])
            self.tokens += count
            for number, layer in enumerate(base.layers):
                normed = layer.input_layernorm(hidden)
                hidden = hidden + self._attention(number, layer.self_attn, normed, rotary)
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            return self._model.lm_head(base.norm(hidden))[0]

    def block(self, position: int) -> Any:
        """The bytes of a block that the decoder filled, by its place in the sequence.

        What `Space.put` takes as `blocks`, with `first_block` = `context_tokens` / block size.
        """
        index = position - self.context_tokens // self.layout.block_size
        own = (self.tokens - self.context_tokens) // self.layout.block_size
        if not 0 <= index < own:
            raise InvalidRequest(f"block {position} is not among the {own} that were computed")
        return self._pool[index].cpu().numpy().data

    def _attention(self, number: int, module: Any, normed: Any, rotary: Any) -> Any:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        split = (-1, self.layout.head_dim)
        q, k, v = (
            project(normed).unflatten(-1, split)
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary, unsqueeze_dim=2)
        self._keep(number, k[0], v[0])
        out = self._attend(number, q[0], module.scaling)
        return module.o_proj(out.flatten(1))[None]

    def _keep(self, number: int, k: Any, v: Any) -> None:
        """Writes new keys and values to the decoder's own pages."""
        stop = self.tokens - self.context_tokens
        at = self._torch.arange(stop - len(k), stop, device=k.device)
        block, row = at // self.layout.block_size, at % self.layout.block_size
        views = self._own.layers[number]
        assert views.v is not None, "the model's check says that there are K and V"
        views.k[block, row], views.v[block, row] = k, v

    def _attend(self, number: int, q: Any, scale: float) -> Any:
        """Attention over each part, and of them all: disjoint tokens are merged exactly."""
        from kvstore.kernels.attention import merge_states

        torch, own = self._torch, self.tokens - self.context_tokens
        # All of a context is before all new tokens, so there nothing is masked; its parts may
        # come in any order, as keys carry their positions.
        states = [
            self._over(part, number, q, part.capacity, scale, causal=False) for part in self._parts
        ]
        states.append(self._over(self._own, number, q, own, scale, causal=True))
        if len(states) == 1:
            return states[0][0]
        outs, sums = zip(*states, strict=True)
        return merge_states(torch.stack(outs), torch.stack(sums), backend=self._backend)[0]

    def _over(
        self, paged: _Paged, number: int, q: Any, tokens: int, scale: float, causal: bool
    ) -> tuple[Any, Any]:
        from kvstore.kernels.attention import paged_decode, paged_extend

        torch, views = self._torch, paged.layers[number]
        lens = torch.tensor([tokens], dtype=torch.int32, device=q.device)
        shared: dict[str, Any] = {
            "k_pool": views.k, "v_pool": views.v, "block_table": paged.table, "seq_lens": lens,
            "k_scale": views.k_scale, "v_scale": views.v_scale, "sm_scale": scale,
            "kv_format": paged.kv_format, "backend": self._backend,
        }  # fmt: skip
        if len(q) == 1:
            return paged_decode(q, **shared)
        edges = torch.tensor([0, len(q)], dtype=torch.int32, device=q.device)
        return paged_extend(q, cu_q=edges, max_q=len(q), causal=causal, **shared)


class _Paged:
    """One pool with its block table and, by layer, its views."""

    def __init__(self, part: Part, layout: Any) -> None:
        from kvstore.kernels.views import layer_views

        self.table = part.blocks[None]
        self.capacity = len(part.blocks) * layout.block_size
        self.kv_format = layout.kv_format
        self.layers = [layer_views(part.pool, layout, n) for n in range(layout.num_layers)]


def _check_model(model: Any, layout: Any) -> None:
    from transformers import LlamaForCausalLM

    if not isinstance(model, LlamaForCausalLM):
        raise SpecError(f"{type(model).__name__} is no Llama; use kvstore.engines.transformers")
    config, layers = model.config, check_plain(model)
    dtype = str(model.dtype).removeprefix("torch.")
    ours = (layers, 2, config.num_key_value_heads, config.head_dim, dtype)
    theirs = (
        layout.num_layers, layout.kv_factor, layout.num_kv_heads, layout.head_dim, layout.dtype,
    )  # fmt: skip
    if ours != theirs:
        raise SpecError(
            f"the spec has (layers, kv_factor, KV heads, head_dim, dtype) {theirs}, the model "
            f"{ours}; make it with spec_of(model)"
        )


def _check_context(context: Context, layout: Any, device: Any) -> None:
    if context.layout.raw != layout:
        raise SpecError(
            f"the context's blocks are {context.layout.raw}, the decoder's {layout}; restore from "
            "a space of the same spec, in whatever format"
        )
    for part in context.parts:
        if part.pool.device != device:
            raise SpecError(
                f"the context is on {part.pool.device}, the model on {device}; attention reads "
                "blocks where they are, so both must be on one device"
            )
