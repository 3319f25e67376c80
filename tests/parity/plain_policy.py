"""Log-probs and PPO's loss of a token on transformers' model, and gradients over all data-parallel ranks."""

from __future__ import annotations

import torch


def row_log_probs(model: torch.nn.Module, ids: torch.Tensor, length: int) -> torch.Tensor:
    """[length, vocabulary]: transformers' log-probs where each response token was chosen."""
    return model(ids[None]).logits[0, :-1].log_softmax(-1)[-length:]


def hugging_face_model(path: str) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def reduced_gradients(actor, dp_group) -> dict[str, torch.Tensor]:
    """Every parameter's gradient over all data-parallel ranks: each has the reduced one of its own shard only."""
    from megatron_rl.roles.model_source import named_parameters

    gradients = {p: torch.zeros_like(p.main_grad) for p in named_parameters(actor.trainable.models).values()}
    for parameter, start, state in actor.trainable.adam.runs():
        run = slice(start, start + len(state["param"]))
        gradients[parameter].view(-1)[run] = parameter.main_grad.view(-1)[run]
    for gradient in gradients.values():
        torch.distributed.all_reduce(gradient, group=dp_group)
    return {name: gradients[p] for name, p in named_parameters(actor.trainable.models).items()}


def token_loss(ratio, advantage: float) -> torch.Tensor:
    """PPO's clip with ranges of 0.2, and the dual clip at 3, which ratios of whole answers never reach here."""
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -gain if advantage >= 0 else -torch.maximum(gain, torch.tensor(3.0 * advantage))
