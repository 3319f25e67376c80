"""Rows that are laid as a trie: scores, losses and gradients of a plain loop that reads every row by itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ranks import run_ranks
from routed_experts import random_choices
from rows_with_holes import all_cuts, check_layout, filled, gradients_of, plain_gradients
from sweeps import marks_of, often
from tiny_gpt_oss import save_gpt_oss
from tiny_models import run_config, save_deepseek_v3, save_gemma2, save_qwen2, save_qwen3_moe
from tiny_qwen3_5 import save_qwen3_5

from megatron_rl.columns import ACTOR_SCORES, ACTOR_UPDATE, SCORING
from megatron_rl.experience.micro_batches import MicroBatching
from megatron_rl.experience.prefix_tree import prefix_tree
from megatron_rl.model.cascade_plan import SharedPiece
from megatron_rl.model.segments import Segments
from megatron_rl.parallel.balance import SequenceWork
from megatron_rl.records import Batch, conversations, ragged, ragged_from_lengths, row_lengths
from megatron_rl.roles import pipeline

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

LAYOUTS = {
    "one": ((1, 1, 1), {}),
    "DP2": ((2, 1, 1), {}),
    "TP2": ((2, 2, 1), {}),
    "PP2": ((2, 1, 2), {}),
    "TP2 with sequence parallelism": (
        (2, 2, 1),
        {f"{role}__megatron__sequence_parallel": True for role in ("actor_rollout_ref__actor", "critic")},
    ),
}
MEGATRON = "actor_rollout_ref__actor__megatron"
ROLES = ("actor_rollout_ref__actor", "critic")
CP2 = {f"{role}__megatron__context_parallel_size": 2 for role in ROLES}
IN_CHUNKS = {f"{role}__megatron__virtual_pipeline_model_parallel_size": 2 for role in ROLES}
LAYOUTS |= {"PP2 in two chunks": ((2, 1, 2), IN_CHUNKS)}
LAYOUTS |= {
    f"CP2 by {how}": ((2, 1, 1), CP2 | {f"{MEGATRON}__override_transformer_config__cp_comm_type": how})
    for how in ("p2p", "all_gather", "a2a")
}
CHOSEN = {f"{MEGATRON}__dynamic_context_parallel": True} | {
    f"{role}__{key}": value
    for role in ROLES
    for key, value in (("use_dynamic_bsz", True), ("ppo_max_token_len_per_gpu", 16))
}
UP_TO = {
    "up to CP4": ((4, 1, 1), {f"{role}__megatron__context_parallel_size": 4 for role in ROLES} | CHOSEN),
    "up to CP2 of 4 ranks, a2a": (
        (4, 1, 1),
        CP2 | CHOSEN | {f"{MEGATRON}__override_transformer_config__cp_comm_type": "a2a"},
    ),
    "PP2 in two chunks, up to CP2": ((4, 1, 2), CP2 | CHOSEN | IN_CHUNKS),
}
"""Layouts whose passes choose how many ranks share them."""
CUTS = {
    "all": MicroBatching(12, as_tree=True),
    "three rows": MicroBatching(3, as_tree=True),
    "dynamic": MicroBatching(1, max_tokens=24, as_tree=True, work=SequenceWork(10.0)),
}


def rows_that_branch(anew: bool = False) -> Batch:
    """Twelve rows with holes: four begin alike, one is the beginning of another, two are the same, and one branches off
    within sampled tokens. anew: three rows are conversations that go on from one another's beginnings.
    """
    generator = torch.Generator().manual_seed(3)
    trunk = torch.randint(2, 70, (24,), generator=generator)

    def drawn(*parts: tuple[int, int]) -> torch.Tensor:
        """Parts of (tokens of the trunk, tokens of its own)."""
        own = [torch.randint(2, 70, (number,), generator=generator) for _, number in parts]
        return torch.cat(
            [part for (length, _), mine in zip(parts, own, strict=True) for part in (trunk[:length], mine)]
        )

    rows = [
        drawn((8, 6)),
        drawn((8, 3)),
        drawn((12, 4)),
        drawn((17, 2)),
        trunk[:15],
        drawn((0, 9)),
        trunk[:20],
        drawn((0, 5)),
    ]
    rows += [rows[0].clone(), drawn((6, 4), (10, 3)), drawn((10, 2), (12, 2), (3, 4)), drawn((0, 7), (9, 1))]
    masks = [torch.rand(len(row), generator=generator) < 0.5 for row in rows]
    starts = [torch.zeros_like(mask) for mask in masks]
    for row, places in {9: [10], 10: [12, 26], 11: [7]}.items() if anew else ():
        starts[row][places] = True
    for mask, start in zip(masks, starts, strict=True):
        mask &= ~start
        mask[0] = False
    columns = {"conversation_starts": ragged(starts)} if anew else {}
    return Batch(input_ids=ragged(rows), sampled=ragged(masks), **columns)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


KINDS_OF_ROWS = ("rows", "conversations")


@pytest.fixture(scope="module", params=KINDS_OF_ROWS)
def plain(model_path, request) -> tuple:
    make = partial(rows_that_branch, request.param == "conversations")
    return make, *plain_gradients(model_path, make)


def with_blocks(make, cuts: dict[str, MicroBatching], config) -> dict[str, dict]:
    """`all_cuts`, where some prefixes are met as blocks and others stand in slots, though rows so short do not pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedPiece, "is_worth_a_block", property(lambda piece: piece.keys[0] % 2 == 0))
        rows = make()
        tree = prefix_tree(rows.flat("input_ids"), rows.flat("sampled"), conversations(rows)[1])
        segments = Segments.on_host(tree.segments, (tree.prefix_sizes, tree.prefix_columns), with_pieces=True)
        assert len(segments.pieces) > 1 and segments.prefix_slots is not None
        return all_cuts(make, cuts, config)


BOTH = [(kind, layout) for kind in KINDS_OF_ROWS for layout in LAYOUTS]
SELDOM = [("conversations", layout) for layout in LAYOUTS if layout not in ("one", "TP2", "CP2 by p2p")]
"""Weekly: conversations only say which tokens come first, as rows do in these layouts."""


@pytest.mark.parametrize(
    ("plain", "layout"),
    [
        pytest.param(*pair, marks=marks_of(pair, [(kind, "one") for kind in KINDS_OF_ROWS], SELDOM), id="-".join(pair))
        for pair in BOTH
    ],
    indirect=["plain"],
)
def test_a_trie_as_a_plain_loop(layout: str, model_path: str, plain: tuple) -> None:
    """Within 1e-5, by rows and by nodes, prefixes of both kinds. Would not catch a column that no loss here reads."""
    check_layout(*LAYOUTS[layout], model_path, plain, CUTS, with_blocks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", UP_TO)
def test_ranks_that_choose_who_shares_a_trie(layout: str, model_path: str, plain: tuple) -> None:
    """Within 1e-5; the longest row needs two ranks. Would not catch tries that are cut into more passes than needed."""
    cuts = {f"{tokens} tokens": MicroBatching(1, tokens, as_tree=True) for tokens in (20, 48)}
    check_layout(*UP_TO[layout], model_path, plain, cuts)


def gradients_of_rows(on_gpus: bool, cut: MicroBatching, config) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and gradients of rows. on_gpus: as if no device met a prompt of several rows once."""
    from megatron_rl.roles.host import RankHost

    with pytest.MonkeyPatch.context() as patch:
        if on_gpus:
            patch.setattr(pipeline, "shares_prompts", lambda device: False)
        worker = RankHost(config)
        worker.build("actor")
        actor, batch = worker.roles["actor"], rows_that_branch(True)
        actor.cut = actor.score_cut = cut
        scores = actor.log_probs(batch.read_by(SCORING)).flat("old_log_probs")
        batch = filled(batch, torch.full((int(batch.num_sampled.sum()),), -4.0))
        gradients = gradients_of(actor, batch.read_by(ACTOR_UPDATE), None)["gradients"]
    return scores, torch.cat([gradient.flatten() for gradient in gradients.values()])


BY_HEADS = {f"{MEGATRON}__override_transformer_config__cp_comm_type": "a2a"}
STATES = ((1, False, {}), (1, True, {}), (2, False, CP2), (2, False, CP2 | CHOSEN), (2, True, CP2 | BY_HEADS))
OTHERS = ((1, False, {}), (1, True, {}), (2, False, CP2), (2, True, CP2 | BY_HEADS))
KINDS = {
    "states": (save_qwen3_5, {"linear_num_key_heads": 4, "linear_num_value_heads": 8}, STATES),
    "latent": (save_deepseek_v3, {}, OTHERS),
    "sinks and windows": (save_gpt_oss, {"sliding_window": 5}, OTHERS),
    "soft caps and windows": (save_gemma2, {"sliding_window": 5}, OTHERS),
}
"""Kind of attention -> how a model is saved, and (ranks, whether as on GPUs, keys)."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_attention_in_a_trie(kind: str, tmp_path) -> None:
    """Log-probs and gradients within 1e-5 of those of one row after another: on one rank, as on GPUs, and on two. Would
    not catch an error of rows apart.
    """
    save, changes, layouts = KINDS[kind]
    path = save(tmp_path, **changes)
    (expected,) = run_ranks(1, partial(gradients_of_rows, False, MicroBatching(1)), run_config(path, 1, 1))
    tree = MicroBatching(12, 24, as_tree=True)
    for ranks, on_gpus, keys in layouts:
        for found in run_ranks(ranks, partial(gradients_of_rows, on_gpus, tree), run_config(path, 1, 1, **keys)):
            for ours, theirs in zip(found, expected, strict=True):
                assert float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max()), (ranks, on_gpus, keys)


def without_slots(make, cuts: dict[str, MicroBatching], config) -> dict[str, dict]:
    """`all_cuts`, where attention goes block by block as on GPUs, whose kernels take no slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "has_varlen_attention", lambda example: True)
        return all_cuts(make, cuts, config)


@pytest.mark.parametrize("layout", often(("one", "CP2 by a2a"), ("one",)))
def test_attention_without_slots(layout: str, model_path: str, plain: tuple) -> None:
    """Within 1e-5, on one process and by heads. Would not catch what flash attention on GPUs does otherwise."""
    check_layout(*LAYOUTS[layout], model_path, plain, CUTS, without_slots)


def replayed(anew: bool, config) -> dict[str, torch.Tensor]:
    """Scores and gradients of rows as a trie, and apart, whose tokens go to given experts; two rows that begin alike
    differ in the experts of their fourth token.
    """
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker = RankHost(config)
    worker.build("actor")
    actor, batch = worker.roles["actor"], rows_that_branch(anew)
    num_read = row_lengths(batch["input_ids"]) - conversations(batch)[0]
    choices = list(random_choices(num_read, seed=2).unbind())
    for row in (1, 2, 3, 4, 6, 8, 9):
        common = min(6, len(choices[row]))
        choices[row][:common] = choices[0][:common]
    choices[3][3] = choices[3][3].flip(-1)
    batch.add(routed_experts=ragged_from_lengths(torch.cat(choices), num_read))
    found = {}
    for name, cut in {"tree": CUTS["all"], "apart": MicroBatching(1)}.items():
        actor.cut = actor.score_cut = cut
        scores = actor.log_probs(batch.read_by(ACTOR_SCORES))
        found[f"scores {name}"], found[f"others {name}"] = scores.flat("old_log_probs"), scores["num_other_experts"]
    batch = filled(batch, found["scores apart"])
    for name, cut in {"tree": CUTS["all"], "apart": MicroBatching(1)}.items():
        actor.cut = cut
        metrics = actor.compute_gradients(batch.read_by(ACTOR_UPDATE))
        found[f"metrics {name}"] = torch.tensor([metrics[key] for key in sorted(metrics)])
        parameters = named_parameters(actor.trainable.models)
        found[f"gradients {name}"] = torch.cat([p.main_grad.flatten().clone() for p in parameters.values()])
    return found


@pytest.mark.parametrize(
    ("num_ranks", "anew"), [(1, False), (1, True), pytest.param(2, True, marks=pytest.mark.exhaustive)]
)
def test_tokens_that_go_to_other_experts_are_not_shared(tmp_path, num_ranks: int, anew: bool) -> None:
    """With replayed experts, also of rows of several conversations, and with half of the experts on each of two ranks.
    Would not catch ranks with other rows.
    """
    keys = {"actor_rollout_ref__actor__router_replay__mode": "R3"}
    keys |= {f"{MEGATRON}__expert_model_parallel_size": num_ranks}
    for found in run_ranks(num_ranks, partial(replayed, anew), run_config(save_qwen3_moe(tmp_path), 1, 1, **keys)):
        assert torch.equal(found["others tree"], found["others apart"])
        for name in ("scores", "metrics"):
            torch.testing.assert_close(found[f"{name} tree"], found[f"{name} apart"], atol=1e-5, rtol=1e-5)
        largest = float(found["gradients apart"].abs().max())
        assert float((found["gradients tree"] - found["gradients apart"]).abs().max()) < 1e-5 * largest
