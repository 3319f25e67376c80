"""Experts chosen in one pass and replayed in another: engine to trainer, old log-probs to update, in every layout.

Why layouts agree: a choice belongs to a token and a layer. It goes wherever the token and the layer are, so once it is
given, a pass is a function of weights and tokens that `expert_rows.py` derives to be the same everywhere; choices
that no router makes show that they are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from layout_keys import of_actor
from ranks import run_ranks
from routed_experts import BOUND, REPLAY, differences, share, tied_config
from scenarios import ALONE, Runs, Scenario
from tiny_models import run_config
from updates import assert_same, collected, relative, run_layout

from megatron_rl.columns import ACTOR_SCORES, ACTOR_UPDATE, SCORING
from megatron_rl.records import row_lengths


@dataclass(frozen=True)
class EnginesExperts:
    """Log-probs agree with the engine's within the dense bound under replay, and are far outside without.

    Routers are made to tie: their rows come in threes that differ by less than rounding does, so that which two of
    three experts a token goes to is decided by the order in which a library adds up. Would not catch an engine whose
    ties fall as the trainer's do: then nothing differs, and the row fails; nor experts that are recorded right only for
    layers that lie alike in both.
    """

    without: float = 100 * BOUND
    """What log-probs without replay are apart at least."""
    least: float = 0.01
    """Share of experts in which engine and routers differ at least."""
    name: str = "engine's experts"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        num_ranks, tp_size, pp_size = scenario.ranks
        keys = {REPLAY: "R3", **scenario.keys, **of_actor(scenario.sizes)}
        ranks = run_ranks(num_ranks, differences, tied_config(runs.path(scenario), tp_size, pp_size, **keys))
        found = [rank for rank in ranks if rank is not None]
        for rank in found:
            assert rank["with"] < BOUND
            assert rank["without"] > self.without and self.least < rank["others"] < 0.9
        assert found


@dataclass(frozen=True)
class ReplayedUpdate:
    """Log-probs, experts that differ, recorded experts, metrics and new weights equal those of one process that packs
    its rows, with experts that no router chooses. Given experts matter: without them log-probs are others.

    Would not catch what all layouts share, nor prompts that are never shared.
    """

    mode: str
    """`R2`: routers' own choices are recorded; `R3`: those of the batch are replayed when scoring, too."""

    @property
    def name(self) -> str:
        return f"update under {self.mode}"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        path, mode = runs.path(scenario), {REPLAY: self.mode}
        keys = {**scenario.keys, **mode}
        found = run_layout(path, *scenario.ranks, keys=keys, update=replayed_update, **scenario.sizes)
        alone = {each: self.alone(runs, path, each) for each in ("R2", "R3")}
        assert_same(found, alone[self.mode], path, fields=("log_probs",), roles=("actor",))
        for field in ("others", *(["recorded"] if self.mode == "R2" else [])):
            assert torch.equal(collected(found, field), collected(alone[self.mode], field)), field
        assert alone["R3"][0]["others"].min() > 0
        assert relative(*(collected(alone[each], "log_probs") for each in ("R2", "R3"))) > 1e-2

    def alone(self, runs: Runs, path: str, mode: str) -> list[dict]:
        """The run of one process."""
        run = partial(run_layout, path, *ALONE, keys={REPLAY: mode}, update=replayed_update)
        return runs.once(("replayed update", path, mode), run)


def replayed_update(config) -> dict:
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


@dataclass(frozen=True)
class ReplayedBits:
    """Gradients and metrics under replay are the same bits with activations that are made again as with kept ones.

    Several micro-batches, of which several are under way at once. Would not catch kernels of CUDA.
    """

    overrides: tuple[tuple, ...]
    """Of the configuration of transformer blocks: which activations are made again, and how."""
    of_routers: bool = False
    """Whether routers' own choices are replayed, and gradients equal those without replay; this would not catch a
    replay that does nothing, which `ReplayedUpdate` does.
    """

    @property
    def name(self) -> str:
        return "bits of its own choices" if self.of_routers else "bits of replayed passes that are run again"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        num_ranks, tp_size, pp_size = scenario.ranks
        keys = {REPLAY: "R2" if self.of_routers else "R3", **scenario.keys, **of_actor(scenario.sizes)}
        config = run_config(runs.path(scenario), tp_size, pp_size, **keys)
        for different in run_ranks(num_ranks, other_bits, config, self.overrides, self.of_routers):
            assert different == dict.fromkeys(map(str, self.overrides), [])


def other_bits(config, overrides: tuple[tuple, ...], of_routers: bool) -> dict[str, list[str]]:
    """What differs by a bit from gradients with activations kept; of_routers: and without replay."""
    from megatron_rl.roles.host import RankHost

    worker, different = RankHost(config), {}
    kept = gradients(worker, (), of_routers, names_experts=not of_routers)
    for override in overrides:
        found = gradients(worker, override, of_routers, names_experts=True)
        assert found.keys() == kept.keys()
        different[str(override)] = [name for name, value in found.items() if not torch.equal(value, kept[name])]
    return different


def gradients(worker, override: tuple, of_routers: bool, names_experts: bool) -> dict[str, torch.Tensor]:
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
