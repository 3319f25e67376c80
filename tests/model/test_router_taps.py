"""One router's tap, without a model: what it replays, takes down, counts, and tells from a pass that is run again."""

from __future__ import annotations

import pytest
import torch

from megatron_rl.model.router_replay import RouterTap, RoutingPlan, choice_dtype

SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.3], [0.8, 0.2, 0.7, 0.6], [0.4, 0.3, 0.2, 0.1]])
OWN = [[1, 2], [0, 2], [0, 1]]


def top_k(scores, topk, num_groups=None, group_topk=None):
    return torch.topk(scores, topk, dim=1)


def asked(tap: RouterTap, scores=SCORES):
    return tap.get_replay_topk(scores, 2, None, None, top_k)


def routing_plan(**changes) -> RoutingPlan:
    """Of three tokens two rows have the first and one the second, and the first is to go to experts 3 and 0."""
    experts = torch.tensor([[[9, 9], [3, 0]], [[9, 9], [2, 1]], [[9, 9], [2, 1]]], dtype=torch.uint8)
    known, num_rows = torch.tensor([True, False, False]), torch.tensor([2, 1, 0])
    return RoutingPlan(
        **({"num_rows": num_rows, "trains": False, "records": True, "experts": experts, "known": known} | changes)
    )


def test_a_known_token_goes_to_its_recorded_experts() -> None:
    """Scores of the recorded experts, with their gradients; others choose. Would not catch Megatron's use of them."""
    tap, scores = RouterTap(1, 4), SCORES.clone().requires_grad_()
    tap.plan = routing_plan()
    values, chosen = asked(tap, scores)
    assert chosen.tolist() == [[3, 0], [0, 2], [0, 1]]
    assert torch.equal(values, SCORES.gather(1, chosen))
    values.sum().backward()
    assert scores.grad.tolist() == [[1, 0, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0]]
    assert tap.own.tolist() == OWN
    assert tap.counts.tolist() == [3, 0, 1, 2]  # filler does not count


def test_a_pass_that_is_run_again_replays_the_same_plan() -> None:
    """Two blocks go forward without gradients, then backward in the same order; nothing is counted twice.

    Would not catch blocks that go backward in another order: Megatron's schedules have none.
    """
    tap, first, second = (
        RouterTap(1, 4),
        routing_plan(trains=True),
        routing_plan(trains=True, known=torch.tensor([True, True, False])),
    )
    with torch.no_grad():
        for plan in (first, second):
            tap.plan = plan
            asked(tap)
    tap.plan = None
    assert asked(tap)[1].tolist() == [[3, 0], [0, 2], [0, 1]]
    assert asked(tap)[1].tolist() == [[3, 0], [2, 1], [0, 1]]
    assert asked(tap)[1].tolist() == OWN  # there is no plan any more
    assert tap.counts.sum() == 12 and not tap.to_recompute


def test_a_score_pass_is_not_run_again() -> None:
    """Without gradients and without training. Would not catch a schedule that scores with gradients."""
    tap = RouterTap(0, 4)
    tap.plan = routing_plan(experts=None, known=None)
    with torch.no_grad():
        values, chosen = asked(tap)
    assert chosen.tolist() == OWN and not tap.to_recompute and torch.equal(values, SCORES.gather(1, chosen))


def test_another_number_of_tokens_is_refused() -> None:
    """Would not catch as many tokens of another block."""
    tap = RouterTap(0, 4)
    tap.plan = routing_plan()
    with pytest.raises(RuntimeError, match="2 tokens where its pass is about 3"):
        asked(tap, SCORES[:2])


def test_numbers_of_experts_are_small() -> None:
    """Would not catch a type that NCCL does not send: bytes are sent."""
    assert [choice_dtype(number) for number in (2, 256, 257)] == [torch.uint8, torch.uint8, torch.int16]
