"""Experts chosen in one pass and replayed in another: engine to trainer, old log-probs to update, in every layout.

Why layouts agree: a choice belongs to a token and a layer. It goes wherever the token and the layer are, so once it is
given, a pass is a function of weights and tokens that `expert_rows.py` derives to be the same everywhere; choices
that no router makes show that they are given.

The models' routers are made to tie: their rows come in threes that differ by less than rounding does, so that which two
of three experts a token goes to is decided by the order in which a library adds up.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from ranks import run_ranks
from rollout_checks import RANDOM, ask, prompts
from sweeps import marks_of, often
from tiny_models import random_batch, run_config, save_qwen3_moe, tie_routers

from megatron_rl.columns import ACTOR_SCORES, ACTOR_UPDATE, SCORING
from megatron_rl.records import ragged, ragged_from_lengths, row_lengths, single_turn

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NUM_ROWS = 11
NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 6, 2
BOUND = 5e-5
"""What dense models keep in float32, engine against trainer."""
REPLAY = "actor_rollout_ref__actor__router_replay__mode"
MEGATRON = "actor_rollout_ref__actor__megatron__"


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> str:
    return tie_routers(save_qwen3_moe(tmp_path_factory.mktemp("tied"), initializer_range=0.3))


def tied_config(path: str, tp_size: int = 1, pp_size: int = 1, **changes):
    return run_config(path, tp_size, pp_size, **{"actor_rollout_ref__rollout__max_num_seqs": 16} | changes)


def differences(config) -> dict | None:
    """Of what the engine sampled: the trainer's log-probs against its own, with replay and without; last stage only."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    actor, asked = worker.roles["actor"], prompts().repeat(3)
    worker.roles["rollout"].enter()
    found = ask(worker.roles["rollout"], asked, dataclasses.replace(RANDOM, with_experts=True))
    worker.roles["rollout"].exit()
    assert torch.equal(row_lengths(found["routed_experts"]), row_lengths(found["input_ids"]) - 1)
    columns = found.read_by(ACTOR_SCORES)
    with_replay, without = actor.log_probs(columns), actor.log_probs_without_replay(columns)
    if with_replay is None:
        return None
    by_engine = found.flat("rollout_log_probs")
    counts = with_replay["num_other_experts"]
    return {
        "with": float((with_replay.flat("old_log_probs") - by_engine).abs().max()),
        "without": float((without.flat("old_log_probs") - by_engine).abs().max()),
        "others": int(counts.sum()) / found.flat("routed_experts").numel(),
    }


SP = {"sequence_parallel": True}
EP2, ETP1 = {"expert_model_parallel_size": 2}, {"expert_tensor_parallel_size": 1}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
ENGINES = {
    "one process": ((1, 1, 1), {}, 1),
    "PP2, VPP2 to TP1": ((2, 1, 2), VPP2, 1),
    "DP2, EP2 to TP2": ((2, 1, 1), EP2, 2),
}
"""Name -> (ranks, tp, pp), further sizes, and TP of generation."""


@pytest.mark.parametrize("layout", often(ENGINES, ("one process",)))
def test_the_engines_experts_make_log_probs_agree(layout, tied) -> None:
    """With replay within the dense bound, without far outside. Would not catch an engine whose ties fall as ours do:
    then nothing differs, and the last line fails.
    """
    (world_size, tp_size, pp_size), sizes, rollout_tp = ENGINES[layout]
    changes = {f"{MEGATRON}{key}": value for key, value in sizes.items()} | {REPLAY: "R3"}
    changes["actor_rollout_ref__rollout__tensor_model_parallel_size"] = rollout_tp
    answers = run_ranks(world_size, differences, tied_config(tied, tp_size, pp_size, **changes))
    for found in (one for one in answers if one is not None):
        assert found["with"] < BOUND
        assert found["without"] > 100 * BOUND
        assert 0.01 < found["others"] < 0.9


def random_choices(lengths: torch.Tensor, seed: int) -> torch.Tensor:
    """Ragged [B, (T), layers, K]: K different experts for every token and layer."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(int(lengths.sum()), NUM_LAYERS, NUM_EXPERTS, generator=generator).argsort(-1)
    return ragged_from_lengths(order[..., :TOP_K].to(torch.uint8), lengths)


def experience_with_choices():
    """Rows of which several share a prompt, with experts that no router would choose, but for the last token of each.

    Rows 0 to 3 have one prompt, whose tokens go to the same experts in rows 0, 1 and 3.
    """
    experience = random_batch(NUM_ROWS)
    lengths, answers = row_lengths(experience["input_ids"]), experience.num_sampled
    rows = list(experience["input_ids"].unbind())
    prompt = rows[0][: lengths[0] - answers[0]]
    for row in (1, 2, 3):
        rows[row] = torch.cat([prompt, rows[row][lengths[row] - answers[row] :]])
    lengths = torch.tensor([len(row) for row in rows])
    choices = list(random_choices(lengths - 1, seed=2).unbind())
    for row in (1, 3):
        choices[row][: len(prompt) - 1] = choices[0][: len(prompt) - 1]
    experience.add(single_turn(ragged(rows), answers))
    experience.add(routed_experts=ragged_from_lengths(torch.cat(choices), lengths - 1))
    return experience


def share(worker):
    """This data-parallel rank's rows."""
    where = worker.coordinates()
    return experience_with_choices()[torch.arange(NUM_ROWS).tensor_split(where.dp_size)[where.dp_rank]]


def one_update(config) -> dict:
    """What one rank knows after scoring the batch and one update with it."""
    from megatron_rl.roles.host import RankHost
    from megatron_rl.roles.model_source import named_parameters

    worker = RankHost(config)
    worker.build("actor")
    actor, mine = worker.roles["actor"], share(worker)
    scores = actor.log_probs(mine.read_by(ACTOR_SCORES))
    mine.add(old_log_probs=mine["advantages"].clone())  # stages before the last do not read them
    found = {"where": worker.coordinates()}
    if scores is not None:
        mine.flat("old_log_probs").copy_(scores.flat("old_log_probs") - 0.1 * mine.flat("advantages"))
        found |= {"log_probs": scores.flat("old_log_probs"), "others": scores.get("num_other_experts")}
        if "routed_experts" in scores:
            assert torch.equal(row_lengths(scores["routed_experts"]), row_lengths(mine["input_ids"]))
            found["recorded"] = scores.flat("routed_experts")
    found["actor"] = actor.update(mine.read_by(ACTOR_UPDATE))
    parameters = named_parameters(actor.trainable.models)
    found["actor_weights"] = {name: p.detach().clone() for name, p in parameters.items()}
    found["place"] = worker.groups.grid.place(worker.groups.rank, vocab_multiple=64)
    return found


CP2 = {"context_parallel_size": 2}
DYNAMIC = {"dynamic_context_parallel": True}
"""Each pass over one rank or two, of sequences of 8 to 19 tokens."""
UNEVEN = {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1}
LAYOUTS = {
    "DP2, EP2": ((2, 1, 1), EP2),
    "TP2, PP2, EP2": ((4, 2, 2), SP | EP2 | ETP1),
    "TP2, PP2, VPP2": ((4, 2, 2), SP | ETP1 | VPP2),
    "TP2, CP2, SP": ((4, 2, 1), SP | ETP1 | CP2),
    "PP2, up to CP2": ((4, 1, 2), UNEVEN | CP2 | DYNAMIC),
}
"""Name -> (ranks, tp, pp), further sizes."""
OPTIMIZER = {"lr": 0.05, "eps": 1.0, "weight_decay": 0.0}
"""With a large eps the step is proportional to the gradient, so that comparing new weights compares gradients."""


def run_layout(path: str, mode: str, ranks: tuple[int, int, int], packed: bool = True, **layout) -> list[dict]:
    world_size, tp_size, pp_size = ranks
    changes = {f"{MEGATRON}{key}": value for key, value in layout.items()}
    changes |= {f"actor_rollout_ref__actor__optim__{key}": value for key, value in OPTIMIZER.items()}
    changes |= {REPLAY: mode, "actor_rollout_ref__model__use_remove_padding": packed}
    if layout.keys() >= DYNAMIC.keys():
        changes |= {
            "actor_rollout_ref__actor__use_dynamic_bsz": True,
            "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 12,
        }
    return run_ranks(world_size, one_update, run_config(path, tp_size, pp_size, **changes))


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> str:
    return save_qwen3_moe(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def one_process(plain) -> dict[str, list[dict]]:
    return {mode: run_layout(plain, mode, (1, 1, 1)) for mode in ("R2", "R3")}


FURTHER = [("TP2, PP2, EP2", "R2")]
"""What runs once a week: R2 records experts on TP2 with stages, and on EP2, in other layouts."""


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        pytest.param(*case, marks=marks_of(case, [("TP2, PP2, VPP2", "R2")], FURTHER))
        for case in itertools.product(LAYOUTS, ("R2", "R3"))
    ],
)
def test_layouts_equal_one_process(layout, mode, plain, one_process) -> None:
    """Log-probs, experts that differ, recorded experts, metrics and new weights, with experts that no router chooses.

    Would not catch what all layouts share: the tests above and below do.
    """
    from updates import collected, relative, whole_weights

    ranks, sizes = LAYOUTS[layout]
    results, reference = run_layout(plain, mode, ranks, **sizes), one_process[mode]
    assert relative(collected(results, "log_probs"), collected(reference, "log_probs")) < 1e-5
    for field in ("others", *(["recorded"] if mode == "R2" else [])):
        assert torch.equal(collected(results, field), collected(reference, field)), field
    ours, expected = next(r["actor"] for r in results if r["where"].dp_collector), reference[0]["actor"]
    assert ours == pytest.approx(expected, rel=1e-5, abs=1e-6)
    weights, expected_weights = (whole_weights(run, "actor", plain) for run in (results, reference))
    for name, tensor in expected_weights.items():
        assert relative(weights[name], tensor) < 1e-5, name


def test_choices_follow_tokens_in_packed_rows(plain, one_process) -> None:
    """A block of rows under each other, and one in which rows share a prompt: the same log-probs, counts and weights.

    The choices matter: without them log-probs are others. Would not catch prompts that are never shared.
    """
    from updates import collected, relative

    packed, padded = one_process["R3"], run_layout(plain, "R3", (1, 1, 1), packed=False)
    assert relative(collected(padded, "log_probs"), collected(packed, "log_probs")) < 1e-5
    assert torch.equal(padded[0]["others"], packed[0]["others"]) and packed[0]["others"].min() > 0
    for name, tensor in packed[0]["actor_weights"].items():
        assert relative(padded[0]["actor_weights"][name], tensor) < 1e-5, name
    assert relative(collected(one_process["R2"], "log_probs"), collected(packed, "log_probs")) > 1e-2


FULL = ("full", "uniform", 1)
BLOCK = ("full", "block", 1)
SELECTIVE = ("selective", None, None, ["moe"])


def gradients(worker, override, of_routers: bool, names_experts: bool) -> dict[str, torch.Tensor]:
    """Of one mini-batch, by an actor built anew. of_routers: where tokens go is what its own routers chose before."""
    from megatron_rl.config.megatron import OverrideTransformerConfig
    from megatron_rl.roles.model_source import named_parameters

    actor_config = worker.config.actor_rollout_ref.actor
    actor_config.megatron.override_transformer_config = OverrideTransformerConfig(*override)
    worker.build("actor")
    actor, mine = worker.roles["actor"], share(worker)
    mine.add(old_log_probs=0.1 * mine["advantages"])
    if of_routers:
        scores = actor.log_probs(mine.read_by(SCORING))
        mine.add(routed_experts=scores["routed_experts"])
    batch = mine.read_by(ACTOR_UPDATE)
    metrics = actor.compute_gradients(batch if names_experts else batch.without("routed_experts"))
    found = {name: p.main_grad.clone() for name, p in named_parameters(actor.trainable.models).items()}
    assert all(value.abs().max() > 0 for name, value in found.items() if "experts" not in name)
    return found | {f"metric {name}": torch.tensor(value) for name, value in metrics.items()}


def own_choices_change_nothing(config, overrides: list) -> dict[tuple, list[str]]:
    """What differs by a bit between gradients without replay and with replay of the routers' own choices."""
    from megatron_rl.roles.host import RankHost

    worker, different = RankHost(config), {}
    kept = gradients(worker, (), True, names_experts=False)
    for override in ((), *overrides):
        found = gradients(worker, override, True, names_experts=True)
        assert found.keys() == kept.keys()
        different[str(override)] = [name for name, value in found.items() if not torch.equal(value, kept[name])]
    return different


def test_own_choices_leave_every_gradient_as_it_is(plain) -> None:
    """Bit for bit, the gates' too, with activations kept and made again. Would not catch a replay that does nothing:
    the tests of layouts do.
    """
    [different] = run_ranks(1, own_choices_change_nothing, run_config(plain, 1, 1, **{REPLAY: "R2"}), [FULL, SELECTIVE])
    assert len(different) == 3 and not any(different.values()), different


def recomputed(config, overrides: list) -> dict[str, list[str]]:
    """What differs by a bit between gradients with activations kept and made again, both under replay."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    kept = gradients(worker, (), False, names_experts=True)
    different = {}
    for override in overrides:
        found = gradients(worker, override, False, names_experts=True)
        different[str(override)] = [name for name, value in found.items() if not torch.equal(value, kept[name])]
    return different


RECOMPUTED = {
    "one process": ((1, 1, 1), {}, [FULL, BLOCK, SELECTIVE]),
    "PP2, VPP2": ((2, 1, 2), VPP2, [FULL, SELECTIVE]),
    "TP2, EP2": ((2, 2, 1), SP | EP2 | ETP1, [FULL, SELECTIVE]),
}


@pytest.mark.parametrize("layout", often(RECOMPUTED, ("PP2, VPP2",)))
def test_a_forward_pass_that_is_run_again_replays_the_same(layout, plain) -> None:
    """Several micro-batches, of which several are under way at once. Would not catch kernels of CUDA."""
    (world_size, tp_size, pp_size), sizes, overrides = RECOMPUTED[layout]
    changes = {f"{MEGATRON}{key}": value for key, value in sizes.items()} | {REPLAY: "R3"}
    changes["actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"] = 2
    for different in run_ranks(world_size, recomputed, run_config(plain, tp_size, pp_size, **changes), overrides):
        assert len(different) == len(overrides) and not any(different.values()), different
