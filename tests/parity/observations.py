"""What rows of the table look at, and what each of them would not catch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import ulp
from pathlib import Path

import torch
from gradients import hugging_face_gradients, hugging_face_log_probs, policy_gradients
from layout_keys import of_actor
from ranks import run_ranks
from rollout_checks import GREEDY, RANDOM, hugging_face_greedy, logprob_difference, round_trip, tokens
from safetensors.torch import load_file
from saved_updates import updated
from scenarios import Runs, Scenario
from tiny_models import random_batch, run_config
from updates import NUM_ROWS, assert_same, collected, relative, whole_weights

from megatron_rl.checkpoint.export_saved import export_saved
from megatron_rl.columns import ACTOR_UPDATE, SCORING
from megatron_rl.config.megatron import COUNTED_PARTS
from megatron_rl.controller.lifecycle import copy_model_files
from megatron_rl.controller.report import hf_sampled_logits
from megatron_rl.parallel.rank_grid import TrainGrid
from megatron_rl.parallel.stages import StagePlan

EXPERTS = "experts.w13"


@dataclass(frozen=True)
class Update:
    """Scores, metrics, gradient norms and new weights of one update of actor and critic equal those of one process.

    Would not catch an error that one process has, too: `Gradients` and `InAndOut` do.
    """

    norms: float = 1e-6
    """Bound of gradient norms, in which errors of rounding mostly cancel; all else is within 1e-5."""
    shard: tuple[int, int, int] | None = None
    """What a rank has of a layer's stacked [gate; up] of experts."""
    layers: int | None = None
    """Number of the model's layers where each rank's are to be those of its stage."""
    reported: tuple[str, ...] = ()
    """Metrics that one process has, above 0."""
    unreported: tuple[str, ...] = ()
    """Metrics that it has not."""
    name: str = "update"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        alone, found = runs.alone(scenario), runs.updated(scenario)
        assert_same(found, alone, runs.path(scenario), self.norms)
        told = alone[0]["actor"] | alone[0]["critic"]
        assert all(told[name] > 0 for name in self.reported) and not told.keys() & set(self.unreported)
        num_ranks, tp_size, pp_size = scenario.ranks
        cp_size = scenario.sizes.get("context_parallel_size", 1)
        is_dynamic = scenario.sizes.get("dynamic_context_parallel", False)
        dp_size = 1 if is_dynamic else num_ranks // (tp_size * pp_size * cp_size)
        assert {rank["where"].dp_size for rank in found} == {dp_size}
        assert sum(rank["where"].dp_collector for rank in found) == dp_size
        if self.shard is not None:
            shapes = {tuple(p.shape) for rank in found for name, p in rank["actor_weights"].items() if EXPERTS in name}
            assert shapes == {self.shard}
        if self.layers is not None:
            stages, grid = self.stages(scenario), TrainGrid(*scenario.ranks)
            for rank in found:
                decoder = (name for name in rank["actor_weights"] if name.startswith("decoder.layers."))
                expected = stages.layers(grid.pp_rank(rank["where"].rank))
                assert {int(name.split(".")[2]) for name in decoder} == set(chain(*expected))

    def stages(self, scenario: Scenario) -> StagePlan:
        """Which layers each stage of the scenario has."""
        first, last = (f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))
        vpp_size = scenario.sizes.get("virtual_pipeline_model_parallel_size", 1)
        counted = [scenario.sizes.get(part, False) for part in COUNTED_PARTS]
        ends = (scenario.sizes.get(end) for end in (first, last))
        return StagePlan(self.layers, scenario.ranks[2], vpp_size, *ends, *counted)


@dataclass(frozen=True)
class Moves:
    """An update changes every weight, and log-probs with them: a guard against comparing nothing.

    Would not catch an update in the wrong direction.
    """

    name: str = "moves"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        path, found = runs.path(scenario), runs.alone(scenario)
        before, after = load_file(f"{path}/model.safetensors"), whole_weights(found, "actor", path)
        assert before.keys() == after.keys()
        assert [name for name, tensor in before.items() if torch.equal(tensor, after[name])] == []
        assert relative(collected(found, "log_probs_after"), collected(found, "log_probs")) > 1e-4


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of actor and reference in one process are those of transformers, within 2e-5.

    Would not catch what only long rows show.
    """

    name: str = "log-probs"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        expected, found = hugging_face_log_probs(runs.path(scenario)), runs.alone(scenario)
        for ours in (collected(found, "log_probs"), collected(found, "ref_log_probs")):
            assert (ours - expected).abs().max() < 2e-5


@dataclass(frozen=True)
class Gradients:
    """Log-probs, and every parameter's gradient before clipping, are those of transformers, in one process.

    Would not catch errors of splitting, which `Update` does; nor a tie between two experts.
    """

    bound: float = 1e-4
    """Of a gradient, relative to its largest element."""
    together: float | None = None
    """Of all gradients, relative to the norm of all."""
    idle: int = 0
    """How many experts of a layer may have been chosen by no token: their gradients are 0 in both."""
    name: str = "gradients"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        path = runs.path(scenario)
        [found] = run_ranks(1, policy_gradients, run_config(path, 1, 1, **scenario.common, **scenario.keys))
        assert (found["log_probs"] - hugging_face_log_probs(path)).abs().max() < 2e-5
        ours, expected = whole_weights([found], "actor", path), hugging_face_gradients(path)
        # A tied head may be named twice.
        assert ours.keys() - {"lm_head.weight"} == expected.keys() - {"lm_head.weight"}
        idle = [name for name in ours if not expected[name].any()]
        assert all(".experts." in name for name in idle), idle
        assert len({name.rpartition(".experts.")[2].split(".")[0] for name in idle}) <= self.idle
        for name, gradient in ours.items():
            far = relative(gradient, expected[name]) if name not in idle else float(gradient.abs().max())
            assert far < self.bound if name not in idle else far == 0, (name, far)
        if self.together is not None:
            squares = sum(gradient.square().sum() for gradient in expected.values())
            assert sum((ours[name] - expected[name]).square().sum() for name in ours) < self.together**2 * squares


@dataclass(frozen=True)
class Logits:
    """Logits of response tokens in one process are those of transformers, within 2e-5.

    Would not catch rows that are longer than these.
    """

    name: str = "logits"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        path = runs.path(scenario)
        expected = hf_sampled_logits(Path(path), random_batch(NUM_ROWS).read_by(SCORING))
        (logits,) = run_ranks(1, sampled_logits, run_config(path, 1, 1, **scenario.common, **scenario.keys))
        assert (logits - expected).abs().max() < 2e-5


def sampled_logits(config) -> torch.Tensor | None:
    """Of the batch's response tokens, by the actor."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    return worker.roles["actor"].sampled_logits(random_batch(NUM_ROWS).read_by(SCORING))


@dataclass(frozen=True)
class Generation:
    """Engine and trainer agree around an update: greedy tokens before it and after are those of transformers on what
    goes in and what comes out, and not the same; log-probs of greedy and of random samples are the trainer's.

    Would not catch a rare tie, nor what only a GPU's kernels do.
    """

    rate: float | None = 0.02
    """Learning rate of the update; None: the default."""
    bound: float = 5e-5
    """Of the largest difference of log-probs."""
    least: float = 0.0
    """The smallest that any may be: above 0 where a dtype must show."""
    is_greedy: bool = True
    """Whether greedy answers are compared; rounding to bfloat16 changes them."""
    name: str = "generation"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        num_ranks, tp_size, pp_size = scenario.ranks
        path, keys = runs.path(scenario), {**scenario.common, **scenario.keys, **of_actor(scenario.sizes)}
        if self.rate is not None:
            keys["actor_rollout_ref__actor__optim__lr"] = self.rate
        config = run_config(path, tp_size, pp_size, **keys)
        ranks = run_ranks(num_ranks, around_an_update, config, folder, self.is_greedy)
        if self.is_greedy:
            expected = [hugging_face_greedy(path), hugging_face_greedy(str(folder))]
            assert all(answers == expected for answers, _ in ranks)
            assert expected[0] != expected[1]
        far = [one for _, differences in ranks for one in differences if one is not None]
        assert len(far) == (4 if self.is_greedy else 2) * num_ranks // pp_size
        assert self.least <= min(far) and max(far) < self.bound, far


def around_an_update(config, exported: Path, is_greedy: bool) -> tuple[list[list[list[int]]], list[float | None]]:
    """Greedy answers before an update and after; log-prob differences of engine and trainer over these and over random
    samples, None before the last stage; the updated model as a folder.
    """
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    answers, far = [], []

    def look() -> None:
        for sampling in (GREEDY, RANDOM) if is_greedy else (RANDOM,):
            found, _ = round_trip(worker, sampling)
            far.append(logprob_difference(worker, found))
            if sampling is GREEDY:
                answers.append(tokens(found))

    look()
    rows = random_batch(NUM_ROWS)[worker.groups.dp_rank :: worker.groups.grid.dp_size]
    rows.add(old_log_probs=rows["advantages"].clone())
    worker.roles["actor"].update(rows.read_by(ACTOR_UPDATE))
    look()
    if is_greedy:
        worker.roles["actor"].export_hf(exported)
    return answers, far


@dataclass(frozen=True)
class Saved:
    """Saved in the layout after an update and resumed in one process: the same greedy tokens; exported without ranks:
    the bytes of the live export.

    Would not catch moments of Adam.
    """

    exported: str
    """A tensor that the export must have."""
    left_out: str
    """One that it must not have."""
    name: str = "saved"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        num_ranks, tp_size, pp_size = scenario.ranks
        path, cut, whole = runs.path(scenario), folder / "cut", folder / "whole"
        keys = {**scenario.common, "actor_rollout_ref__actor__optim__lr": 0.02}
        further = {**scenario.keys, **of_actor(scenario.sizes)}
        ranks = run_ranks(num_ranks, updated, run_config(path, tp_size, pp_size, **keys, **further), cut)
        copy_model_files({"actor": path}, cut / "saved")
        (one,) = run_ranks(1, updated, run_config(path, 1, 1, **keys), whole, cut / "saved")
        assert all(rank["greedy"] == one["greedy"] for rank in ranks)
        export_saved(cut / "saved", "actor", folder / "alone")
        folders = (cut / "exported", folder / "alone", whole / "exported")
        live, alone, resumed = (load_file(each / "model.safetensors") for each in folders)
        assert live.keys() == alone.keys() == resumed.keys() == load_file(f"{path}/model.safetensors").keys()
        assert all(torch.equal(live[name], other[name]) for name in live for other in (alone, resumed))
        assert self.exported in live and self.left_out not in live


LOGITS = Logits()
UPDATE, MOVES, LOG_PROBS, GRADIENTS, GENERATION = Update(), Moves(), LogProbs(), Gradients(), Generation()
BITWISE = Generation(bound=ulp(0.0), name="equal bits")
