"""Multi-head latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron_rl.model.parts.param_spec import ParamSpec, by_heads, single, whole
from megatron_rl.model.parts.part import FP32, AttentionPart, Cut, LayerBlock
from megatron_rl.parallel.sharding import LogicalTensor, Segment

Q_RANK = "q_lora_rank"
DEFAULT_Q_RANK = 1536
"""The default of transformers and vLLM. With an explicit null the query is made from the hidden state."""
SIZE_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


BLOCK_SIZES = {"cpu": 16, "cuda": 64}
"""Tokens of one block of vLLM's cache. Its kernel on CPU accepts 16 only; those on CUDA 16 to 128, most of them 64."""
CPU_SIZES = (512, 64)
"""The only (kv_rank, rope) for which vLLM has a kernel on CPU: those of every released DeepSeek-V2 and V3."""


@dataclass(frozen=True)
class LatentAttention(AttentionPart):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), read from config.json.

    q_rank, kv_rank: elements of the latent vectors of queries (None: they have none) and of keys and values.
    nope, rope: elements per head of the unrotated and the rotated part of a query and a key; value: of a value. The
    rotated part of a key is made from the hidden state, one for all heads.
    """

    block_sizes = BLOCK_SIZES
    cpu_engine_arguments: ClassVar[Mapping[str, object]] = {
        # On CPUs with matrix tiles another backend would pack copies of the weights and drop the trainer's.
        "attention_backend": "CPU_MLA",
        # vLLM's rotary kernel on CPU rotates wrong elements if pairs are adjacent in several heads.
        "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    }
    whole_prompts: ClassVar[frozenset[str]] = frozenset({"cpu"})
    unreplayable: ClassVar[Mapping[str, str]] = {
        "cpu": "on trainer.device=cpu vLLM keeps no prefixes of latent attention, without which it hands out no experts"
    }

    hidden: int
    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int

    @classmethod
    def from_hf(cls, settings: Mapping[str, Any]) -> LatentAttention:
        """Read it from the settings of a config.json. Raises KeyError if a number is missing."""
        sizes = (settings[key] for key in SIZE_KEYS)
        q_rank = settings.get(Q_RANK, DEFAULT_Q_RANK)
        return cls(settings["hidden_size"], settings["num_attention_heads"], q_rank, *sizes)

    @property
    def query(self) -> int:
        """Elements of one head of a query and a key."""
        return self.nope + self.rope

    @property
    def cached(self) -> int:
        """Elements per token and layer in the KV cache, for all heads; every TP rank has them."""
        return self.kv_rank + self.rope

    def params(self, mega: str, hf: str) -> dict[str, ParamSpec]:
        """Projections to latent vectors are whole on every TP rank, as in vLLM; projections from them are sharded."""
        mega, hf = f"{mega}self_attention.", f"{hf}self_attn."
        hidden, heads = self.hidden, self.num_heads
        kv_a = Segment("kv_a", (self.cached, hidden), 1)
        if self.q_rank is None:
            params = {
                f"{mega}linear_down.weight": single(f"{hf}kv_a_proj_with_mqa.weight", kv_a, 0),
                f"{mega}linear_q.weight": by_heads(f"{hf}q_proj.weight", heads, self.query, hidden),
            }
        else:
            both = (Segment("q_a", (self.q_rank, hidden), 1), kv_a)
            names = (f"{hf}q_a_proj.weight", f"{hf}kv_a_proj_with_mqa.weight")
            params = {
                f"{mega}linear_down.weight": ParamSpec(LogicalTensor(f"{hf}fused_qkv_a_proj.weight", both, 0), names),
                f"{mega}q_layernorm.weight": whole(f"{hf}q_a_layernorm.weight", (self.q_rank,)),
                f"{mega}linear_q_up.weight": by_heads(f"{hf}q_b_proj.weight", heads, self.query, self.q_rank),
            }
        o_proj = Segment("columns", (hidden, heads * self.value), heads)
        up = by_heads(f"{hf}kv_b_proj.weight", heads, self.nope + self.value, self.kv_rank)
        return params | {
            f"{mega}kv_layernorm.weight": whole(f"{hf}kv_a_layernorm.weight", (self.kv_rank,)),
            f"{mega}linear_kv_up.weight": up,
            f"{mega}linear_proj.weight": single(f"{hf}o_proj.weight", o_proj, 1),
        }

    @property
    def token_elements(self) -> int:
        return 4 * self.hidden * self.query_columns  # as if keys and values were made for every head alone

    @property
    def query_columns(self) -> int:
        return self.num_heads * self.query

    def kept_bytes(self, block: LayerBlock, cut: Cut) -> float:
        """Latent vectors and their norms, queries, keys, values and the output."""
        heads = self.num_heads // cut.tp_size
        ranks, q = (self.q_rank or 0) + self.kv_rank, heads * self.query
        inner = block.tokens * cut.sequence_share * ((2 * ranks + self.rope) * cut.element + 2 * FP32)
        value, up = heads * self.value, heads * (self.nope + self.value)
        statistics = block.slots * heads * FP32
        if block.num_sharing > 1 or (block.is_packed and not cut.copies(block)):
            # Values and outputs are as wide as keys, and the output is copied without that.
            return inner + statistics + block.tokens * (4 * q + value) * cut.element
        if cut.copies(block):
            return inner + statistics + (block.slots * (2 * q + 2 * value) + block.tokens * value) * cut.element
        return inner + statistics + block.tokens * (2 * q + up + 2 * value) * cut.element

    def again_bytes(self, block: LayerBlock, cut: Cut, module: str) -> float:
        if module != self.recomputed_as:
            return 0.0
        q = self.num_heads // cut.tp_size * self.query
        statistics = block.slots * (self.num_heads // cut.tp_size) * FP32
        if not cut.copies(block):
            return statistics + block.tokens * q * cut.element  # its output: the next layer keeps a copy
        return statistics + (block.slots * 4 * q - block.tokens * 3 * q) * cut.element

    def widest_elements(self, block: LayerBlock, cut: Cut, *, backward: bool) -> float:
        return self.num_heads // cut.tp_size * self.query * 3 * block.slots * 3

    def columns(self, cut: Cut) -> float:
        return 4 * (self.num_heads // cut.tp_size) * self.query

    def engine_elements(self, tp_size: int) -> int:
        # Latent vectors are gone when the MLP works, whose tensors are added to these.
        return 3 * self.query_columns // tp_size

    def cached_elements(self, tp_size: int) -> int:
        return self.cached

    def exchanged_bytes(self, block: LayerBlock, cut: Cut, num_ranks: int, *, backward: bool) -> float:
        # Keys, and values that are padded to their width; gradients and this rank's output accumulate in float32.
        q = self.num_heads // cut.tp_size * self.query
        return block.tokens * q * (num_ranks * 2 * (cut.element + (FP32 if backward else 0)) + FP32)

    def engine_problem(self, device: str) -> tuple[str, str] | None:
        """On CUDA vLLM chooses a kernel by the GPU."""
        if device != "cpu" or (self.kv_rank, self.rope) == CPU_SIZES:
            return None
        sizes = f"kv_lora_rank({self.kv_rank}) and qk_rope_head_dim({self.rope})"
        return sizes, "must be 512 and 64: vLLM has no kernel for other latent vectors on trainer.device=cpu"

    def megatron_settings(self) -> dict[str, object]:
        # Megatron computes the angles, so it needs only the rotated part.
        return {"num_query_groups": self.num_heads, "kv_channels": self.rope}
