"""Which samples of a step are recorded, and what each of their tokens adds to the loss, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.config.schema import ActorConfig
from megatron_rl.controller.recorded_samples import first_prompts, loss_terms, recorded_columns
from megatron_rl.records import Batch, ragged


def rows(**more: list[list[float]]) -> Batch:
    """Answers of two tokens and of one."""
    columns = {"advantages": [[1.0, 2.0], [-4.0]], **more}
    return Batch(
        input_ids=ragged([torch.tensor([5, 6, 7]), torch.tensor([5, 8])]),
        sampled=ragged([torch.tensor([False, True, True]), torch.tensor([False, True])]),
        **{name: ragged([torch.tensor(row) for row in values]) for name, values in columns.items()},
    )


def config(mode: str):
    actor = ActorConfig(loss_agg_mode=mode)
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=actor), longest_response=10)


@pytest.mark.parametrize(
    ("mode", "more", "terms"),
    [
        ("token-mean", {}, [-1 / 3, -2 / 3, 4 / 3]),
        ("seq-mean-token-mean", {}, [-1 / 4, -2 / 4, 4 / 2]),
        ("seq-mean-token-sum-norm", {}, [-1 / 20, -2 / 20, 4 / 20]),
        ("token-mean", {"kept": [[1.0, 0.0], [1.0]]}, [-1 / 2, 0.0, 4 / 2]),
        ("token-mean", {"kept": [[1.0, 1.0], [1.0]], "trained": [[0.0, 1.0], [0.0]]}, [0.0, -2.0, 0.0]),
        ("token-mean", {"rollout_weights": [[0.5, 1.0], [2.0]]}, [-0.5 / 3, -2 / 3, 8 / 3]),
    ],
)
def test_terms_of_tokens_in_the_loss(mode, more, terms):
    """-advantage x weight x share in the mean. Would not catch a loss that has another value at ratio 1."""
    assert torch.allclose(loss_terms(rows(**more), config(mode)), torch.tensor(terms))


@pytest.mark.parametrize(("number", "chosen"), [(1, [1, 3]), (2, [0, 1, 3]), (9, [0, 1, 2, 3]), (-1, [0, 1, 2, 3])])
def test_whole_groups_are_recorded(number, chosen):
    """In the order of their numbers. Would not catch groups that share a number."""
    assert first_prompts(torch.tensor([5, 2, 9, 2]), number).tolist() == chosen


def test_columns_of_several_numbers_a_token_are_left_out():
    """Experts stay: a step on the record needs them. Would not catch a large column of one number a token."""
    batch = rows()
    for name, values in (("teacher_hidden", torch.ones(3, 4)), ("routed_experts", torch.ones(5, 2, 1).byte())):
        sizes = batch["advantages" if name == "teacher_hidden" else "input_ids"].offsets()
        batch._columns[name] = torch.nested.nested_tensor_from_jagged(values, sizes)
    kept = {name: (values.shape, sizes) for name, values, sizes in recorded_columns(batch)}
    assert kept.keys() == {"input_ids", "sampled", "advantages", "routed_experts"}
    assert kept["routed_experts"][0] == (5, 2, 1) and kept["input_ids"][1].tolist() == [3, 2]
