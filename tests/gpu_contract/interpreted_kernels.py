"""vLLM's Triton kernels on a CPU, on tensors as ours lie, against what the engine on CPUs computes.

    TRITON_INTERPRET=1 PYTHONPATH=.venv/contract/triton python tests/gpu_contract/interpreted_kernels.py

Prints one JSON object: case -> the largest difference of each result, as a share of the largest value, or an exception.
Triton's interpreter runs a kernel with numpy, block after block: values, strides, masks and dtypes are the kernel's,
not its speed. Parts of vLLM that only CUDA has (sorting of tokens to experts) are done by torch.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

CASES: dict[str, Callable[[], dict[str, float]]] = {}
HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def case(function: Callable[[], dict[str, float]]) -> Callable[[], dict[str, float]]:
    CASES[function.__name__] = function
    return function


def let_vllm_have_triton() -> None:
    """Import vLLM's Triton as on a GPU, with the platform of a CPU: its build for CPUs leaves Triton out."""
    import vllm.platforms

    assert vllm.platforms.current_platform.is_cpu()
    asked = vllm.platforms.vllm_version_matches_substr
    vllm.platforms.vllm_version_matches_substr = lambda part: False
    try:
        from vllm.triton_utils import HAS_TRITON
    finally:
        vllm.platforms.vllm_version_matches_substr = asked
    assert HAS_TRITON, "vLLM does not take this Triton"


def let_the_interpreter_count_in_bfloat16() -> None:
    """Give the interpreter's operations bfloat16 as numbers. It keeps their bits as integers, and counts with these."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def of_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *operands: Any) -> Any:
            of_bfloat16 = [isinstance(each, TensorHandle) and each.dtype.scalar == tl.bfloat16 for each in operands]
            if not any(of_bfloat16):
                return operation(self, *operands)
            numbers = [
                TensorHandle((each.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if half else each
                for each, half in zip(operands, of_bfloat16, strict=True)
            ]
            result = operation(self, *numbers)
            if result.dtype != tl.float32 or operation is dot:
                return result
            rounded = torch.from_numpy(np.ascontiguousarray(result.data)).to(torch.bfloat16)
            return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

        return run

    dot = InterpreterBuilder.create_dot
    for name in ("unary_op", "binary_op", "ternary_op", "create_dot"):
        setattr(InterpreterBuilder, name, of_float32(getattr(InterpreterBuilder, name)))


def let_kernels_take_their_first_form() -> None:
    """Leave tuning out, which measures on a GPU: vLLM's own way to do so."""
    from vllm.triton_utils import force_first_config

    force_first_config.install()


def let_names_be_interpreted(package: str) -> None:
    """Give a package's kernels names that are replaced in `tl` alone: `exp` and its like, and indices of loops.

    A compiled loop's index is a tensor, and the interpreter's an int.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def late(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(tl, name)(*args, **kwargs)

    def indices(*bounds: Any) -> Iterator[Any]:
        for index in range(*(int(getattr(bound, "value", bound)) for bound in bounds)):
            yield tl.tensor(TensorHandle(np.array([index], np.int32), tl.int32), tl.int32)

    for module in [each for name, each in sys.modules.items() if name.startswith(package)]:
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", "").startswith("triton.language") and value is getattr(tl, name, None):
                setattr(module, name, late(name))
        vars(module)["range"] = indices


def share(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference as a share of the largest wanted value."""
    return ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


def flat_views(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Random tensors in one flat buffer, one after the other from an odd place on, as a role's parameters lie."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = (torch.randn(3 + sum(sizes)) * 0.5).to(dtype)
    return [part.view(shape) for part, shape in zip(flat[3:].split(sizes), shapes, strict=True)]


@case
def lora() -> dict[str, float]:
    """Shrink and expand of 13 tokens, two of them without the adapter, in slices of unlike width (keys and values)."""
    from vllm.lora.ops.torch_ops import bgmv_expand_slice, bgmv_shrink
    from vllm.lora.ops.triton_ops.lora_expand_op import _lora_expand
    from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta
    from vllm.lora.ops.triton_ops.lora_shrink_op import _lora_shrink

    found, widths, rank, hidden, scale = {}, (80, 48), 8, 96, 4.0
    adapter = torch.zeros(13, dtype=torch.int32)
    adapter[[4, 9]] = -1
    for name, dtype in HALF.items():
        views = flat_views(*[(rank, hidden)] * 2, *((width, rank) for width in widths), dtype=dtype)
        lora_a, lora_b = [view[None, None] for view in views[:2]], [view[None, None] for view in views[2:]]
        meta = LoRAKernelMeta.make(1, len(adapter), device="cpu")
        meta.prepare_tensors(adapter)
        arguments = meta.meta_args(len(adapter), False)
        tokens, has = torch.randn(len(adapter), hidden).to(dtype), adapter >= 0
        middle = torch.zeros(len(widths), len(adapter), rank)
        _lora_shrink(tokens, lora_a, middle, *arguments, scale)
        wanted = torch.zeros_like(middle)
        for each, weight in zip(wanted, lora_a, strict=True):
            part = torch.zeros(int(has.sum()), rank)
            bgmv_shrink(tokens[has], weight, part, adapter[has].long(), scale)
            each[has] = part
        found[f"shrink_{name}"] = share(middle, wanted)
        output = torch.randn(len(adapter), sum(widths)).to(dtype)
        wanted, start = output.float(), 0
        for each, weight, width in zip(middle, lora_b, widths, strict=True):
            part = wanted[has]
            bgmv_expand_slice(each[has].to(dtype), weight, part, adapter[has].long(), start, width, add_inputs=True)
            wanted[has], start = part, start + width
        _lora_expand(middle, lora_b, output, *arguments, 0, True)
        found[f"expand_{name}"] = share(output, wanted)
    return found


def sorted_to_experts(expert_ids: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of tokens by expert, an expert's padded to blocks with the number of places; each block's expert."""
    flat, places, owners = expert_ids.flatten(), [], []
    for expert in range(experts):
        mine = (flat == expert).nonzero().flatten().tolist()
        mine += [len(flat)] * (-len(mine) % block)
        places += mine
        owners += [expert] * (len(mine) // block)
    return torch.tensor(places, dtype=torch.int32), torch.tensor(owners, dtype=torch.int32)


def expert_products(tokens: torch.Tensor, stacks: Any, biases: Any, weights: torch.Tensor, ids: torch.Tensor) -> Any:
    """Both products of experts by vLLM's kernel, with gpt-oss's gate between them, [T, H]."""
    import triton.language as tl
    from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel

    from third_party_patches.vllm.unpacked_experts import bounded_gate

    config = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}
    places, owners = sorted_to_experts(ids, len(stacks[0]), config["BLOCK_SIZE_M"])
    padded, compute = torch.tensor([len(places)], dtype=torch.int32), getattr(tl, str(tokens.dtype).split(".")[1])
    options = dict.fromkeys(
        ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant"), False
    )

    def product(rows: torch.Tensor, which: int, last: bool) -> torch.Tensor:
        out = torch.zeros(*ids.shape, stacks[which].shape[1], dtype=rows.dtype)
        invoke_fused_moe_triton_kernel(
            rows, stacks[which], out, None, None, weights, places, owners, padded, last, 1 if last else ids.shape[1],
            config, compute_type=compute, B_bias=biases[which], **options,
        )  # fmt: skip
        return out

    middle = bounded_gate(product(tokens, 0, last=False)).flatten(0, 1)
    return product(middle, 1, last=True).sum(1)


@case
def biased_experts() -> dict[str, float]:
    """gpt-oss's experts of odd widths, with biases, for 21 tokens with two of five experts each; one has none."""
    from third_party_patches.vllm.unpacked_experts import Biases, bounded_gate, plain_experts

    found, experts, hidden, inner = {}, 5, 72, 40
    for name, dtype in {**HALF, "float32": torch.float32}.items():
        w13, w2, b13, b2 = flat_views(
            (experts, 2 * inner, hidden), (experts, hidden, inner), (experts, 2 * inner), (experts, hidden), dtype=dtype
        )
        tokens = torch.randn(21, hidden).to(dtype)
        ids = torch.stack([torch.randperm(experts - 1)[:2] for _ in tokens])
        weights = torch.rand(21, 2)
        wanted = plain_experts(
            tokens.float(), w13.float(), w2.float(), weights, ids, False, bounded_gate, Biases(b13, b2)
        )
        found[name] = share(expert_products(tokens, (w13, w2), (b13, b2), weights, ids), wanted)
    return found


class DeltaLayer:
    """What kernels read of a layer of the gated delta rule: 2 heads of keys, 4 of values, of 16 numbers each."""

    heads, values, size, taps = 2, 4, 16, 4

    def __init__(self, dtype: torch.dtype) -> None:
        self.width = (2 * self.heads + self.values) * self.size
        views = flat_views((self.values,), (self.values,), (self.width, 1, self.taps), dtype=dtype)
        self.A_log, self.dt_bias, self.weight = views

    def rearrange_mixed_qkv(self, mixed: torch.Tensor) -> list[torch.Tensor]:
        """Cut into heads, as vLLM's layer does: [T, M] -> three of [1, T, heads, 16]."""
        sizes = [self.heads * self.size, self.heads * self.size, self.values * self.size]
        return [part.unflatten(-1, (-1, self.size))[None] for part in mixed.split(sizes, -1)]


LENGTHS = [70, 5, 130]


@case
def gated_delta_prompts() -> dict[str, float]:
    """Convolution and rule for prompts of 70, 5 and 130 tokens from given states, parameters of each dtype."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn
    from vllm.third_party.flash_linear_attention.ops import chunk_gated_delta_rule, fused_post_conv_prep

    from third_party_patches.vllm.cpu_gated_delta import many_steps, tokens_of

    found, slots = {}, torch.tensor([2, 1, 4], dtype=torch.int32)
    let_names_be_interpreted("vllm.third_party.flash_linear_attention")
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    for name, dtype in HALF.items():
        layer = DeltaLayer(dtype)
        mixed = (torch.randn(sum(LENGTHS), layer.width) * 0.5).to(dtype)
        a, b = (torch.randn(sum(LENGTHS), layer.values).to(dtype) for _ in range(2))
        states = torch.randn(len(LENGTHS), layer.values, layer.size, layer.size) * 0.3
        before = torch.randn(5, layer.width, layer.taps - 1).to(dtype)
        inputs = [
            torch.cat([before[slot].float(), part.T], -1)
            for slot, part in zip(slots.tolist(), mixed.float().split(LENGTHS), strict=True)
        ]
        convolved = causal_conv1d_fn(
            mixed.T, layer.weight.view(layer.width, -1), None, before, starts, slots,
            torch.ones(len(slots), dtype=torch.bool), "silu",
        ).T  # fmt: skip
        parts = fused_post_conv_prep(
            convolved.contiguous(), a, b, layer.A_log, layer.dt_bias, layer.heads, layer.size, layer.size, True, False
        )
        output, last = chunk_gated_delta_rule(
            *(part[None] for part in parts), initial_state=states.transpose(-1, -2).contiguous(),
            output_final_state=True, cu_seqlens=starts,
        )  # fmt: skip
        wanted, ends = [], []
        for row, (given, start) in enumerate(zip(inputs, starts.tolist(), strict=False)):
            plain = F.conv1d(given[None], layer.weight.float(), groups=layer.width).transpose(1, 2)
            cut = slice(start, start + plain.shape[1])
            outputs, state = many_steps(tokens_of(layer, plain, b[None, cut], a[None, cut]), states[row : row + 1])
            wanted.append(outputs[0])
            ends.append(state)
        found[f"outputs_{name}"] = share(output[0], torch.cat(wanted))
        found[f"states_{name}"] = share(last.transpose(-1, -2), torch.cat(ends))
        kept = torch.stack([given[:, 1 - layer.taps :] for given in inputs])
        found[f"convolution_{name}"] = share(before[slots.long()], kept)
    return found


@case
def gated_delta_token() -> dict[str, float]:
    """One more token of three requests, in slots of the cache that are not in order."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update
    from vllm.third_party.flash_linear_attention.ops import fused_recurrent_gated_delta_rule_packed_decode

    from third_party_patches.vllm.cpu_gated_delta import one_step, tokens_of

    found, slots = {}, torch.tensor([2, 1, 4], dtype=torch.int32)
    let_names_be_interpreted("vllm.third_party.flash_linear_attention")
    for name, dtype in HALF.items():
        layer = DeltaLayer(dtype)
        mixed = (torch.randn(3, layer.width) * 0.5).to(dtype)
        a, b = (torch.randn(3, layer.values).to(dtype) for _ in range(2))
        before, states = torch.randn(5, layer.width, layer.taps - 1).to(dtype), torch.randn(5, layer.values, 16, 16)
        inputs = torch.cat([before[slots.long()].float(), mixed.float()[..., None]], -1)
        plain = tokens_of(layer, (inputs * layer.weight[:, 0]).sum(-1), b, a)
        wanted, after = one_step(plain, states[slots.long()].transpose(-1, -2))
        out = torch.zeros(3, 1, layer.values, layer.size, dtype=dtype)
        convolved = causal_conv1d_update(
            mixed, before, layer.weight.view(layer.width, -1), None, "silu", conv_state_indices=slots
        )
        fused_recurrent_gated_delta_rule_packed_decode(
            convolved, a, b, layer.A_log, layer.dt_bias, layer.size**-0.5, states, out, slots,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        found[f"outputs_{name}"] = share(out[:, 0], wanted)
        found[f"states_{name}"] = share(states[slots.long()].transpose(-1, -2), after)
        found[f"convolution_{name}"] = share(before[slots.long()], inputs[..., 1:])
    return found


@case
def gated_attention() -> dict[str, float]:
    """Norm, rotation and gate of Qwen3.5's attention, which vLLM joins on CUDA alone; a quarter is rotated."""
    from vllm.model_executor.layers.fused_qk_norm_rope import fused_qk_rmsnorm_rope_gate

    found, heads, keys, size, rotated = {}, 4, 2, 32, 8
    positions = torch.tensor([7, 0, 3, 3, 63])
    angles = torch.outer(torch.arange(64.0), 10000.0 ** -(torch.arange(0, rotated, 2) / rotated))
    for name, dtype in HALF.items():
        query_weight, key_weight = flat_views((size,), (size,), dtype=dtype)
        mixed = torch.randn(len(positions), heads, 2, size).to(dtype)
        key = torch.randn(len(positions), keys, size).to(dtype)
        table = torch.cat([angles.cos(), angles.sin()], -1).to(dtype)
        cos, sin = table[positions].float().chunk(2, -1)

        def turned(vector: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            vector = vector.float() * (vector.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + weight)
            first, second = vector[..., :rotated].chunk(2, -1)
            parts = [first * cos - second * sin, second * cos + first * sin, vector[..., rotated:]]
            return torch.cat(parts, -1).flatten(1)

        outputs = fused_qk_rmsnorm_rope_gate(
            mixed.flatten(1), key.flatten(1), query_weight, key_weight, table, positions, 1e-6, heads, keys, size,
            rotated, norm_beta=1.0,
        )  # fmt: skip
        cos, sin = cos[:, None], sin[:, None]
        found[f"query_{name}"] = share(outputs[0], turned(mixed[:, :, 0], query_weight.float(), cos, sin))
        found[f"key_{name}"] = share(outputs[1], turned(key, key_weight.float(), cos, sin))
        found[f"gate_{name}"] = share(outputs[2], mixed[:, :, 1].flatten(1))
    return found


def seen_scores(query: torch.Tensor, key: torch.Tensor, window: int, cap: float) -> torch.Tensor:
    """Scores [N, T, S] of the last T of S positions, -inf for what a position does not see."""
    scores = torch.einsum("tnd,snd->nts", query, key) * query.shape[-1] ** -0.5
    if cap:
        scores = cap * (scores / cap).tanh()
    at = torch.arange(len(key))[-len(query) :, None] - torch.arange(len(key))
    return scores.masked_fill((at < 0) | ((at >= window) if window else False), -torch.inf)


@case
def attention() -> dict[str, float]:
    """vLLM's attention of GPUs before Hopper, for a prompt of 20 tokens and token 38 of another: sinks, window, cap."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    found, heads, keys, size, block, lengths = {}, 4, 2, 32, 16, (20, 38)
    starts, used = torch.tensor([0, 20, 21], dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    table = torch.tensor([[6, 2, 0], [1, 5, 3]], dtype=torch.int32)
    for name, dtype in HALF.items():
        query = torch.randn(21, heads, size).to(dtype)
        caches = [torch.randn(7, block, keys, size).to(dtype) for _ in range(2)]
        sinks = flat_views((heads,), dtype=dtype)[0]
        for kind, window, cap, given in (("plain", 0, 0.0, None), ("sinks", 8, 0.0, sinks), ("cap", 0, 3.0, None)):
            wanted, out = [], torch.zeros_like(query)
            for row, length in enumerate(lengths):
                key, value = (cache[table[row].long()].flatten(0, 1)[:length] for cache in caches)
                key, value = (part.double().repeat_interleave(heads // keys, 1) for part in (key, value))
                scores = seen_scores(query[starts[row] : starts[row + 1]].double(), key, window, cap)
                extra = torch.full((heads, scores.shape[1], 1), -torch.inf)
                extra = extra if given is None else given.double()[:, None, None].expand_as(extra)
                weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
                wanted.append(torch.einsum("nts,snd->tnd", weights, value))
            unified_attention(
                query, *caches, out, starts, 20, used, max(lengths), size**-0.5, True,
                (window - 1, 0) if window else (-1, -1), table, cap, None, None, None, sinks=given,
            )  # fmt: skip
            found[f"{kind}_{name}"] = share(out, torch.cat(wanted))
    return found


@case
def sampler() -> dict[str, float]:
    """Tokens of the sampler of CUDA's model runner: frequencies, greedy requests, and draws that rows do not move."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample

    draws, logits = 600, torch.randn(1, 11) * 1.5
    temperature, seed = torch.tensor([0.7, 0.0]), torch.tensor([123456789012345, 5])
    rows, positions = torch.zeros(draws, dtype=torch.int32), torch.arange(draws)

    def drawn(order: torch.Tensor, row: int) -> torch.Tensor:
        """Tokens of one request at each position, positions in the given order of rows."""
        many = logits.repeat(draws, 1)
        given = (rows + row, temperature, seed, positions[order])
        apply_temperature(many, *given[:2])
        return gumbel_sample(many, *given, apply_temperature=False, is_drafting=False)

    forward, backward = drawn(positions, 0), drawn(positions.flip(0), 0)
    frequencies = torch.bincount(forward, minlength=11) / draws
    wanted = (logits[0] / temperature[0]).softmax(-1)
    deviations = (frequencies - wanted) / (wanted * (1 - wanted) / draws).sqrt()
    return {
        "largest_deviation": deviations.abs().max().item(),
        "moved_by_rows": (forward != backward.flip(0)).float().mean().item(),
        "not_greedy": (drawn(positions, 1) != logits.argmax()).float().mean().item(),
    }


def main() -> None:
    let_vllm_have_triton()
    let_the_interpreter_count_in_bfloat16()
    let_kernels_take_their_first_form()
    results: dict[str, Any] = {}
    for name, run in CASES.items():
        torch.manual_seed(0)
        try:
            results[name] = run()
        except Exception:  # what an interpreter cannot run is a result
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
