"""Each patch that experts need, without it and with it, in processes of its own. Nothing else patches those."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def random_tensor(*shape: int, seed: int) -> torch.Tensor:
    return 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_moe(x, w13, w2, weights, ids) -> torch.Tensor:
    """Token by token and expert by expert: sum of weight * w2 @ (silu(gate) * up)."""
    output = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (w13[expert] @ x[token]).chunk(2)
            output[token] += weight * (w2[expert] @ (F.silu(gate) * up))
    return output


def check_router_gemm() -> None:
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    from third_party_patches import is_needed
    from third_party_patches.megatron_core.router_gemm import PATCH

    x, weight = random_tensor(3, 2, 8, seed=0).requires_grad_(), random_tensor(4, 8, seed=1).requires_grad_()
    with pytest.raises(NameError, match="te_general_gemm") if is_needed(PATCH) else nullcontext():
        router_gating_linear(x, weight, None, torch.float32)
    PATCH.apply()
    PATCH.apply()
    logits = router_gating_linear(x, weight, None, torch.float32)
    torch.testing.assert_close(logits, x @ weight.T)
    ours, expected = (torch.autograd.grad(y.square().sum(), (x, weight)) for y in (logits, x @ weight.T))
    torch.testing.assert_close(ours, expected)


def check_permute() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    own = moe_utils.permute
    tokens, probs = random_tensor(5, 8, seed=0).requires_grad_(), random_tensor(5, 4, seed=1).requires_grad_()
    routing = torch.zeros(5, 4, dtype=torch.bool).scatter(1, random_tensor(5, 4, seed=2).topk(2).indices, True)

    from third_party_patches.megatron_core.permute_without_waits import PATCH

    PATCH.apply()
    PATCH.apply()
    assert moe_utils.permute is token_dispatcher.permute is not own
    expected, ours = own(tokens, routing, probs, 10), moe_utils.permute(tokens, routing, probs, 10)
    assert all(torch.equal(one, other) for one, other in zip(expected[:3], ours[:3], strict=True))
    assert ours[3:] == expected[3:]  # what later versions add is None
    gradients = [
        torch.autograd.grad((out * w[:, None]).square().sum(), (tokens, probs)) for out, w, *_ in (expected, ours)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    if len(expected) == 3:  # later versions want the number
        uncounted = moe_utils.permute(tokens, routing, probs, None)
        assert torch.equal(uncounted[2], own(tokens, routing, probs, None)[2])


def check_fused_weight_gradient() -> None:
    from megatron.core.tensor_parallel import layers

    assert not layers._grad_accum_fusion_available
    from third_party_patches.megatron_core.fused_weight_gradient import PATCH, FusedWeightGradient

    PATCH.apply()
    assert layers._grad_accum_fusion_available and layers.fused_weight_gradient_mlp_cuda is FusedWeightGradient
    for dtype in (torch.float32, torch.bfloat16):
        inputs, grads = (
            [random_tensor(6, 2, size, seed=seed + size).to(dtype) for seed in range(3)] for size in (8, 5)
        )
        total = torch.zeros(5, 8)
        expected = torch.zeros(5, 8, dtype=torch.float64)
        for number, (x, grad) in enumerate(zip(inputs, grads, strict=True)):
            rows, columns = grad.view(-1, 5).t(), x.view(-1, 8)
            FusedWeightGradient.wgrad_gemm_accum_fp32(x, grad, total)
            if number == 0 and dtype == torch.float32:
                assert torch.equal(total, rows @ columns)  # the first micro-batch, bit for bit
            expected += rows.double() @ columns.double()
        torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)
    layers.fused_weight_gradient_mlp_cuda = apexs = object()
    PATCH.apply()
    assert layers.fused_weight_gradient_mlp_cuda is apexs


def check_l2_norm() -> None:
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    gradients = [random_tensor(7, seed=0), random_tensor(3, 5, seed=1), 1e-3 * random_tensor(2, seed=2)]
    assert clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm

    from third_party_patches.megatron_core.l2_norm import PATCH, l2_norm

    PATCH.apply()
    assert clip_grads.l2_norm_impl is l2_norm
    norm, _ = l2_norm(1, torch.zeros(1), [gradients], False)
    assert norm.dtype == torch.float32 and norm.item() == torch.norm(torch.tensor([g.norm() for g in gradients])).item()
    clip_grads.l2_norm_impl = nvidias = object()
    PATCH.apply()
    assert clip_grads.l2_norm_impl is nvidias  # transformer-engine's or apex's stays


def dispatched(dispatcher, tokens, routing, probs) -> torch.Tensor:
    """Tokens to their experts and back; expert number e multiplies by e + 1."""
    prepared, weights = dispatcher.dispatch_preprocess(tokens, routing, probs)
    sent = dispatcher.token_dispatch(prepared, weights)
    received, counts, weights = dispatcher.dispatch_postprocess(*sent)
    factors = torch.tensor(dispatcher.local_expert_indices).repeat_interleave(counts.long()) + 1.0
    answered = received * (factors * weights)[:, None]
    return dispatcher.combine_postprocess(dispatcher.token_combine(dispatcher.combine_preprocess(answered)))


def check_token_counts() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from third_party_patches.megatron_core import cpu_token_counts, cpu_torch

    cpu_torch.PATCH.apply()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, create_gloo_process_groups=False)
    rank = dist.get_rank()
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=8
    )
    groups = moe_utils.get_default_pg_collection()
    dispatcher = MoEAlltoAllTokenDispatcher(2, [2 * rank, 2 * rank + 1], config, groups)
    # 3 tokens here, 5 there.
    tokens, chosen = random_tensor(3 + 2 * rank, 8, seed=rank), random_tensor(3 + 2 * rank, 4, seed=9).topk(2).indices
    routing = torch.zeros(len(tokens), 4, dtype=torch.bool).scatter(1, chosen, True)
    probs = routing * torch.tensor([0.1, 0.2, 0.3, 0.4])

    with pytest.raises(TypeError):
        dispatched(dispatcher, tokens, routing, probs)
    cpu_token_counts.PATCH.apply()
    expected = tokens * (probs * torch.arange(1.0, 5.0)).sum(1, keepdim=True)
    torch.testing.assert_close(dispatched(dispatcher, tokens, routing, probs), expected)


def check_dispatcher_lets_go() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from third_party_patches.megatron_core import cpu_torch, dispatcher_lets_go

    cpu_torch.PATCH.apply()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=8
    )
    dispatcher = MoEAlltoAllTokenDispatcher(4, [0, 1, 2, 3], config, moe_utils.get_default_pg_collection())

    def gradient_of_pass() -> tuple[torch.Tensor, weakref.ref[torch.Tensor]]:
        """Of tokens whose weights depend on them; and the leaf of the graph, which the caller does not hold."""
        tokens = random_tensor(5, 8, seed=0).requires_grad_()
        weights = tokens[:, :4].softmax(-1)
        routing = torch.zeros(5, 4, dtype=torch.bool).scatter(1, weights.topk(2).indices, True)
        dispatched(dispatcher, tokens, routing, weights * routing).square().sum().backward()
        return tokens.grad, weakref.ref(tokens)

    before, held = gradient_of_pass()
    assert held() is not None
    dispatcher_lets_go.PATCH.apply()
    dispatcher_lets_go.PATCH.apply()
    after, gone = gradient_of_pass()
    assert gone() is None and held() is None
    assert torch.equal(before, after)


def check_uneven_gather() -> None:
    import torch.distributed as dist
    from megatron.core.tensor_parallel import mappings

    from third_party_patches.megatron_core import cpu_torch, uneven_gather

    cpu_torch.PATCH.apply()
    dist.init_process_group("gloo")
    group, rank, lengths = dist.group.WORLD, dist.get_rank(), [2, 0, 3]
    pieces = [random_tensor(length, 4, seed=number) for number, length in enumerate(lengths)]
    factors = [random_tensor(5, 4, seed=10 + number) for number in range(3)]
    mine = pieces[rank].clone().requires_grad_()

    def gather() -> torch.Tensor:
        return mappings.gather_from_sequence_parallel_region(mine, group=group, output_split_sizes=lengths)

    with pytest.raises(RuntimeError, match="invalid tensor size"):
        gather()
    uneven_gather.PATCH.apply()
    uneven_gather.PATCH.apply()
    gathered = gather()
    torch.testing.assert_close(gathered, torch.cat(pieces))
    (gathered * factors[rank]).sum().backward()
    torch.testing.assert_close(mine.grad, torch.stack(factors).sum(0).split(lengths)[rank])
    # Equal pieces go the way they went.
    even = mappings.gather_from_sequence_parallel_region(torch.full((2, 1), float(rank)), group=group)
    assert even.flatten().tolist() == [0, 0, 1, 1, 2, 2]


def check_unpacked_experts() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as vllm_ps
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    def layer(name: str):
        """vLLM's layer of 4 experts with 48 columns, 2 to a token, after post-processing; and its weight tensors."""
        runner = FusedMoEFactory(4, 2, 32, 48, params_dtype=torch.float32, prefix=name)
        experts, w13, w2 = runner.routed_experts, random_tensor(4, 96, 32, seed=0), random_tensor(4, 32, 48, seed=1)
        experts.w13_weight = torch.nn.Parameter(w13, requires_grad=False)
        experts.w2_weight = torch.nn.Parameter(w2, requires_grad=False)
        experts.quant_method.process_weights_after_loading(experts)
        return runner, w13, w2

    x, logits = random_tensor(5, 32, seed=2), random_tensor(5, 4, seed=3)
    weights, ids = logits.softmax(-1).topk(2)
    weights = weights / weights.sum(-1, keepdim=True)

    def difference(runner, w13, w2) -> float:
        with set_forward_context(None, config, num_tokens=5):
            return float((runner(x, logits) - plain_moe(x, w13, w2, weights, ids)).abs().max())

    config = VllmConfig()
    with set_current_vllm_config(config):
        vllm_ps.init_distributed_environment(1, 0, "env://", 0, "gloo")
        vllm_ps.initialize_model_parallel()
        runner, w13, w2 = layer("packed")
        assert runner.routed_experts.w13_weight.shape != w13.shape
        assert difference(runner, w13, w2) < 1e-5
        w2.mul_(2.0)
        # The trainer's update is not seen.
        assert difference(runner, w13, w2) > 1e-2

        from third_party_patches.vllm.unpacked_experts import PATCH

        PATCH.apply()
        runner, w13, w2 = layer("plain")
        assert runner.routed_experts.w13_weight.data_ptr() == w13.data_ptr()
        assert runner.routed_experts.w2_weight.data_ptr() == w2.data_ptr()
        assert difference(runner, w13, w2) < 1e-5
        w13.mul_(-1.5)
        w2.add_(0.1)
        assert difference(runner, w13, w2) < 1e-5


def bounded_moe(x, w13, w13_bias, w2, w2_bias, weights, ids) -> torch.Tensor:
    """Token by token and expert by expert, as gpt-oss has it."""
    output = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            mixed = w13[expert] @ x[token] + w13_bias[expert]
            gate, up = mixed[0::2].clamp(max=7.0), mixed[1::2].clamp(-7.0, 7.0)
            hidden = (up + 1.0) * gate * torch.sigmoid(1.702 * gate)
            output[token] += weight * (w2[expert] @ hidden + w2_bias[expert])
    return output


def check_bounded_experts() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as vllm_ps
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    def layer(name: str):
        options = {"params_dtype": torch.float32, "has_bias": True, "activation": "swigluoai"}
        return FusedMoEFactory(4, 2, 32, 48, prefix=name, **options)

    x, logits = random_tensor(5, 32, seed=2), random_tensor(5, 4, seed=3)
    weights, ids = logits.topk(2)
    weights = weights.softmax(-1)
    config = VllmConfig()
    with set_current_vllm_config(config):
        vllm_ps.init_distributed_environment(1, 0, "env://", 0, "gloo")
        vllm_ps.initialize_model_parallel()
        with pytest.raises(NotImplementedError, match="No Unquantized MoE backend"):
            layer("stock")

        from third_party_patches.vllm.unpacked_experts import PATCH

        PATCH.apply()
        runner = layer("plain")
        experts = runner.routed_experts
        tensors = {
            "w13_weight": random_tensor(4, 96, 32, seed=0),
            "w13_bias": 30.0 * random_tensor(4, 96, seed=4),  # beyond the bounds
            "w2_weight": random_tensor(4, 32, 48, seed=1),
            "w2_bias": random_tensor(4, 32, seed=5),
        }
        for kind, tensor in tensors.items():
            setattr(experts, kind, torch.nn.Parameter(tensor, requires_grad=False))
        experts.quant_method.process_weights_after_loading(experts)
        for factor in (1.0, 1.5):
            for tensor in tensors.values():
                tensor.mul_(factor)
            with set_forward_context(None, config, num_tokens=5):
                found = runner(x, logits)
            torch.testing.assert_close(found, bounded_moe(x, *tensors.values(), weights, ids), atol=1e-4, rtol=1e-5)


def check_sigmoid_routing() -> None:
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    logits, bias = random_tensor(7, 6, seed=0), 3.0 * random_tensor(6, seed=1)
    router = CPURouter(2, 6, scoring_func="sigmoid", e_score_correction_bias=bias)
    plain = CPURouter(2, 6)
    expected = plain._compute_routing(logits, logits, None)
    with pytest.raises(AssertionError):
        router._compute_routing(logits, logits, None)

    from third_party_patches.vllm.sigmoid_routing import PATCH

    PATCH.apply()
    PATCH.apply()
    weights, ids = router._compute_routing(logits, logits, None)
    scores = logits.sigmoid()
    chosen = (scores + bias).topk(2).indices
    assert torch.equal(ids.sort(-1).values.long(), chosen.sort(-1).values)
    assert not torch.equal(chosen.sort(-1).values, scores.topk(2).indices.sort(-1).values)
    own = scores.gather(1, ids.long())
    torch.testing.assert_close(weights, own / own.sum(-1, keepdim=True))
    for ours, before in zip(plain._compute_routing(logits, logits, None), expected, strict=True):
        assert torch.equal(ours, before)


def check_experts_of_other_ranks() -> None:
    from third_party_patches.vllm.unpacked_experts import plain_experts

    x, w13, w2 = random_tensor(5, 32, seed=2), random_tensor(4, 96, 32, seed=0), random_tensor(4, 32, 48, seed=1)
    weights, ids = random_tensor(5, 4, seed=3).softmax(-1).topk(2)
    # This rank holds experts 2 and 3 as its 0 and 1; the other two answer nothing here.
    local = torch.tensor([-1, -1, 0, 1])[ids]
    expected = plain_moe(x, w13, w2, torch.where(ids >= 2, weights, 0.0), ids)
    torch.testing.assert_close(plain_experts(x, w13[2:], w2[2:], weights, local, False), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        plain_experts(x, w13, w2, weights, ids, True),
        plain_moe(x, w13, w2, torch.ones_like(weights), ids),
        atol=1e-5,
        rtol=0,
    )
    halves = [tensor.bfloat16() for tensor in (x, w13, w2)]
    found = plain_experts(*halves, weights, ids, False).float()
    torch.testing.assert_close(found, plain_moe(x, w13, w2, weights, ids), atol=0.02, rtol=0.02)


def test_router_gemm() -> None:
    """Without: a missing name. With: values and gradients of a product. Would not catch a router in bfloat16."""
    run_ranks(1, check_router_gemm, timeout=100)


def test_token_counts() -> None:
    """Without: all-to-all refuses its sizes. With: 2 ranks' experts answer all tokens. Would not catch capacities."""
    run_ranks(2, check_token_counts, timeout=100)


def test_dispatcher_lets_go() -> None:
    """Without: the tokens of a pass live on. With: they do not, and gradients are the same bit for bit. Would not catch
    other dispatchers.
    """
    run_ranks(1, check_dispatcher_lets_go, timeout=100)


def test_uneven_gather() -> None:
    """Without: gloo refuses. With: pieces of 2, 0 and 3 rows, forward and backward. Would not catch other dtypes."""
    run_ranks(3, check_uneven_gather, timeout=100)


def test_unpacked_experts() -> None:
    """Without: weights are padded, packed, copied. With: read where they lie. Would not catch a width that vLLM's other
    layers refuse.
    """
    run_ranks(1, check_unpacked_experts, timeout=100)


def test_experts_with_biases_and_bounded_gates() -> None:
    """Without: 48 columns are refused. With: values by hand, before and after all change in place. Would not catch
    bfloat16.
    """
    run_ranks(1, check_bounded_experts, timeout=100)


def test_sigmoid_routing() -> None:
    """Without: an assertion. With: scores and bias by hand, and a softmax as before. Would not catch scaled weights."""
    run_ranks(1, check_sigmoid_routing, timeout=100)


def test_experts_of_other_ranks() -> None:
    """-1 is nobody's; weighted inputs; bfloat16. Would not catch an expert map that vLLM makes wrongly."""
    run_ranks(1, check_experts_of_other_ranks, timeout=100)


def test_permute() -> None:
    """Tokens, weights, order and gradients are Megatron's bit for bit. Would not catch a mask with another number."""
    run_ranks(1, check_permute, timeout=100)


def test_l2_norm() -> None:
    """The number is Megatron's bit for bit. Would not catch tensors on several devices."""
    run_ranks(1, check_l2_norm, timeout=100)


def test_fused_weight_gradient() -> None:
    """Three micro-batches of both dtypes beside float64, and the first one bit for bit; Megatron refuses the option
    without. Would not catch a GPU's product.
    """
    run_ranks(1, check_fused_weight_gradient, timeout=100)
