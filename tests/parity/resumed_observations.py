"""Roles that were saved and loaded go on as if they had never stopped: weights, optimizer, schedule and metrics.

Why, bit for bit in the same layout: a step is a function of weights, masters, moments, schedule and batch, and all of
these are written and read without arithmetic. Why in another layout: a checkpoint has whole tensors, of which each rank
takes its elements, and from there on the argument is that of `updates.py`. Not exercised: dropout and other
draws of a role, of which there are none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from layout_keys import of_actor
from ranks import run_ranks
from resumed_training import RATES, metrics_of, saved, train
from safetensors.torch import load_file
from scenarios import Runs, Scenario
from tiny_gpt_oss import unpack_by_transformers
from tiny_models import run_config

from megatron_rl.checkpoint.export_saved import export_saved
from megatron_rl.checkpoint.hf_folder import was_quantised
from megatron_rl.checkpoint.saved_tensors import SavedTensors
from megatron_rl.config.task_config import for_task
from megatron_rl.config.tasks import PPO
from megatron_rl.controller.lifecycle import copy_model_files


@dataclass(frozen=True)
class SameLayout:
    """Four steps with a save after the second; the last two once more, from there, in new processes: the same bits.

    Would not catch what both runs lose alike.
    """

    is_adapted: bool = False
    """Whether nothing of the base is saved."""
    name: str = "resumed"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        keys = {**RATES, **scenario.common, **scenario.keys, **of_actor(scenario.sizes)}
        num_ranks, *sizes = scenario.ranks
        run = partial(run_ranks, num_ranks, train, run_config(runs.path(scenario), *sizes, **keys))
        whole, resumed = run(1, 4, {2: folder}), run(3, 4, {}, folder)
        assert metrics_of(resumed) == metrics_of(whole)[2:]
        for ours, theirs in zip(resumed, whole, strict=True):
            for role, state in theirs["state"].items():
                assert ours["state"][role].keys() == state.keys()
                assert all(torch.equal(data, state[name]) for name, data in ours["state"][role].items())
        for role, others in (("actor", set()), ("critic", {"score.weight"})) if self.is_adapted else ():
            names = SavedTensors(folder / role).weights
            assert {name for name in names if ".lora_" not in name} == others


@dataclass(frozen=True)
class Leg:
    """A part of a run in a layout."""

    ranks: tuple[int, int, int]
    steps: int = 2
    sizes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class OtherLayouts:
    """Two steps in the scenario's layout, then some in each of others, against all in the first: within 1e-5 in every
    metric. Adam makes full steps of rounding noise where a gradient is zero, as a key's bias has it.

    Would not catch a wrong weight that no metric depends on, where only metrics are compared.
    """

    legs: tuple[Leg, ...]
    """One goes on from where the one before it stopped."""
    weights: bool = False
    """Whether weights and moments at the end are compared, too."""
    changing: tuple[str, int, float] | None = None
    """A metric, a step, and how far the metric there is at least from the last one: learning that a comparison would
    see. None: the metrics of steps 2 and 3 differ.
    """
    task: str = PPO

    @property
    def name(self) -> str:
        return "resumed elsewhere" + ("" if self.task == PPO else f" {self.task}")

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        last, path = 2 + sum(leg.steps for leg in self.legs), runs.path(scenario)

        def run(leg: Leg, keys: Mapping[str, object], *arguments: object) -> list[dict]:
            all_keys = {**RATES, **scenario.common, **keys, **of_actor(leg.sizes)}
            if self.task != PPO:
                all_keys |= {"critic__model__path": path, "trainer__n_gpus_per_node": leg.ranks[0]}
            config = run_config(path, *leg.ranks[1:], **all_keys)
            return run_ranks(
                leg.ranks[0], train, config if self.task == PPO else for_task(config, self.task), *arguments
            )

        source, whole, first = folder / "half", folder / "whole", Leg(scenario.ranks, 2, scenario.sizes)
        all_steps = run(first, scenario.keys, 1, last, {2: source} | ({last: whole} if self.weights else {}))
        expected, step = metrics_of(all_steps), 2
        for number, leg in enumerate(self.legs):
            end, target = step + leg.steps, folder / str(number)
            is_read = self.weights or end < last
            ours = metrics_of(run(leg, {}, step + 1, end, {end: target} if is_read else {}, source))
            for metrics, theirs in zip(ours, expected[step:end], strict=True):
                assert metrics == pytest.approx(theirs, rel=1e-5, abs=1e-5)
            source, step = target, end
        if self.changing is None:
            assert expected[1] != pytest.approx(expected[2], rel=1e-3)
        else:
            metric, number, least = self.changing
            assert abs(expected[number - 1][metric] - expected[-1][metric]) > least
        for role in all_steps[0]["state"] if self.weights else ():
            ours, theirs = saved(source / role), saved(whole / role)
            assert ours.keys() == theirs.keys()
            assert sum(name.startswith("optimizer.state.exp_avg_sq.") for name in ours) * 3 == len(ours)
            for name, tensor in theirs.items():
                assert (ours[name] - tensor).abs().max() <= 1e-5 * max(1.0, float(tensor.abs().max())), name


@dataclass(frozen=True)
class Untouched:
    """Saved before the first step, exported by one process: the bytes that went in, of actor and critic's trunk; or
    what transformers' function unpacks of a folder in 4 bits, and no word of these.

    Would not catch a mistake in what only training changes.
    """

    in_4_bits: bool = False
    name: str = "saved untouched"

    def check(self, scenario: Scenario, runs: Runs, folder: Path) -> None:
        path, (num_ranks, *sizes), saved_in = runs.path(scenario), scenario.ranks, folder / "saved"
        config = run_config(path, *sizes, **scenario.keys, **of_actor(scenario.sizes))
        run_ranks(num_ranks, train, config, 1, 0, {0: saved_in})
        copy_model_files({"actor": path, "critic": path}, saved_in)
        plain = unpack_by_transformers(path, folder / "plain", torch.float32) if self.in_4_bits else path
        original = load_file(f"{plain}/model.safetensors")
        heads = {"lm_head.weight"} & original.keys()
        for role, differs in (("actor", set()), ("critic", heads | {"score.weight"})):
            export_saved(saved_in, role, folder / role)
            exported = load_file(folder / role / "model.safetensors")
            assert exported.keys() ^ original.keys() == differs
            assert [n for n, t in exported.items() if n not in differs and not torch.equal(t, original[n])] == []
            assert was_quantised(saved_in / role / "huggingface") == self.in_4_bits
            assert not was_quantised(folder / role)
        width = json.loads(Path(path, "config.json").read_text())["hidden_size"]
        assert tuple(exported["score.weight"].shape) == (1, width)
