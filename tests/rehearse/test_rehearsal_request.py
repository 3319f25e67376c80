"""Which ranks are rehearsed, of which models, on how many rows, and what is said of their peaks; no processes."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.cli import app
from megatron_rl.config.load import load_config
from megatron_rl.config.roles import Placement
from megatron_rl.errors import ConfigError
from megatron_rl.planning.memory import plan_stages
from megatron_rl.planning.run_models import RunModels
from megatron_rl.rehearse import rehearsal
from megatron_rl.rehearse.comparison import beyond, peaks_of
from megatron_rl.rehearse.fewer_layers import cut_settings, with_fewer_layers
from megatron_rl.rehearse.rehearsal_request import RankOfPool, RehearsalRequest, chosen_ranks
from megatron_rl.rehearse.synthetic_batches import UNEVEN, lengths_of, num_rows, synthetic_batch

RECIPE = "configs/llama3_70b_ppo.yaml"


@pytest.fixture(scope="module")
def config():
    return load_config(RECIPE)


def test_one_rank_of_each_stage_is_the_default(config):
    """TP8 x PP4 x DP2: 16 ranks a stage. Would not catch ranks of a stage that differ from its first."""
    chosen = chosen_ranks(None, Placement.of(config))
    assert [rank.number for rank in chosen] == [0, 16, 32, 48]


def test_ranks_are_counted_over_all_pools():
    """A pool's ranks are numbered from 0 within it. Would not catch pools in another order than the placement's."""
    config = load_config(
        RECIPE,
        [
            "actor_rollout_ref.rollout.pool=generation",
            "pools.generation.nnodes=4",
            "pools.generation.n_gpus_per_node=8",
        ],
    )
    placement = Placement.of(config)
    first = placement.pools["global_pool"].world_size
    assert chosen_ranks(f"{first + 1},0", placement) == (
        RankOfPool(first + 1, "generation", 1),
        RankOfPool(0, "global_pool", 0),
    )
    assert len(chosen_ranks("all", placement)) == placement.world_size


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("64", "--ranks 64 must be below 64, the ranks of all pools; try: --ranks 63"),
        ("0,99", "try: --ranks 0,63"),
        ("9" * 5000, "must be all, or numbers with commas; try: --ranks 0,63"),
        ("every", "--ranks every must be all, or numbers with commas; try: --ranks 0,63"),
        ("-1", "try: --ranks 0,63"),
        ("", "try: --ranks 0,63"),
    ],
)
def test_unknown_ranks_are_refused(config, text, message):
    """Values, rule and nearest choice. Would not catch a number with blanks in it."""
    with pytest.raises(ConfigError) as raised:
        chosen_ranks(text, Placement.of(config))
    assert message in str(raised.value)


@pytest.mark.parametrize("options", [["--layers", "0"], ["--jobs", "0"], ["--layers", "50"], ["--ranks", "x"]])
def test_bad_options_are_refused_before_anything_starts(options, tmp_path):
    """Code 2, and no file. Would not catch what only a rank finds."""
    answer = CliRunner().invoke(app, ["rehearse", "--config", RECIPE, "--out", str(tmp_path / "out"), *options])
    assert isinstance(answer.exception, ConfigError) and "try: " in str(answer.exception)
    assert not (tmp_path / "out").exists()


def test_a_broken_rule_is_refused(tmp_path):
    """The rule book of `plan`. Would not catch a rule that only CUDA runs break."""
    wrong = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=5"
    answer = CliRunner().invoke(app, ["rehearse", "--config", RECIPE, "--out", str(tmp_path / "out"), wrong])
    assert isinstance(answer.exception, ConfigError) and "pp(5) must divide the 64 ranks" in str(answer.exception)


def test_a_shortened_run_has_layers_for_every_chunk(config, tmp_path):
    """Two layers on each of four stages; the critic's model is cut like the actor's. Would not catch other keys."""
    overrides = with_fewer_layers(config, 2, tmp_path)
    paths = dict(text.split("=") for text in overrides)
    assert set(paths) == {"actor_rollout_ref.model.path", "critic.model.path"}
    before = ModelFolder(config.actor_rollout_ref.model.path).content
    for path in paths.values():
        assert ModelFolder(path).content == before | {"num_hidden_layers": 8}
    with pytest.raises(ConfigError, match="--layers 21 makes 84 layers of role actor, whose model has 80"):
        with_fewer_layers(config, 21, tmp_path)


def test_settings_of_each_layer_are_cut():
    """Would not catch a pattern that is written as a period."""
    settings = {"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"], "eos_token_id": [1, 2]}
    assert cut_settings(settings, 2) == {"num_hidden_layers": 2, "layer_types": ["a", "b"], "eos_token_id": [1, 2]}


def test_rows_fill_the_pipeline(config):
    """One row of 2048 tokens is a micro-batch of the update, and two are one of the log-probs: PP4 has one more.

    Would not catch a schedule that keeps more micro-batches than stages.
    """
    placement = Placement.of(config)
    [pool], actor = placement.pools.values(), placement.roles["actor"]
    assert num_rows(config, pool, actor.update, 256) == 5
    assert num_rows(config, pool, actor.score, 1024) == 10
    assert num_rows(config, pool, actor.update, 4) == 2  # the share of one of two data-parallel ranks


def test_ranks_that_choose_who_shares_a_pass_have_all_rows():
    """Two groups of four: twice the rows of one data-parallel rank. Would not catch a third group."""
    actor = "actor_rollout_ref.actor"
    sizes = [f"{actor}.megatron.context_parallel_size=4", f"{actor}.ppo_max_token_len_per_gpu=32768"]
    config = load_config("configs/recipes/qwen3_30b_a3b_128k_grpo.yaml", sizes)
    placement = Placement.of(config)
    [pool], role = placement.pools.values(), placement.roles["actor"]
    assert num_rows(config, pool, role.update, 256) == 2 * 2
    assert num_rows(config, pool, role.update, 2) == 2 * 1


def test_made_up_rows_have_the_columns_of_sampled_tokens(config):
    """Lengths by hand: the longest, then 40% of them. Would not catch values that a loss cannot take."""
    lengths = lengths_of(config, Placement.of(config).roles["actor"].update, 2, UNEVEN)
    assert lengths == [(1024, 1024), (409, 409)]
    batch = synthetic_batch(lengths, 50, ["advantages"])
    assert batch.num_sampled.tolist() == [1024, 409] and len(batch.flat("input_ids")) == 2 * (1024 + 409)
    assert len(batch.flat("advantages")) == 1024 + 409
    assert int(batch.flat("input_ids").max()) < 50 and int(batch.flat("input_ids").min()) >= 0


def test_peaks_beyond_two_percent_are_named(config):
    """What vLLM holds is left out of the plan; 1.4 GB are not small. Would not catch a phase that has no plan."""
    stage = plan_stages(RunModels(config))[1]
    planned = stage.total("update_actor")
    phases = {"update_actor": {"peak": int(planned * 1.021)}, "old_log_prob": {"peak": stage.total("old_log_prob")}}
    phases["init"] = {"peak": sum(stage.built.values())}
    peaks = peaks_of(config, [{"number": 17, "pool": "global_pool", "pp_rank": 1, "phases": phases}])
    assert {peak.phase: round(peak.difference, 3) for peak in peaks} == {
        "update_actor": 0.021,
        "old_log_prob": 0.0,
        "init": 0.0,
    }
    [sentence] = beyond(peaks)
    assert sentence.startswith("rank 17, update_actor: ") and "+2.1%; at most +2% is allowed" in sentence


def test_a_request_survives_its_file(tmp_path):
    """One process writes it, another reads it. Would not catch a field that JSON changes and nothing compares."""
    request = RehearsalRequest("a.yaml", ("x=1",), "ppo", (RankOfPool(3, "p", 1),), 2, "out", "lib.so")
    request.write(tmp_path / "request.json")
    assert RehearsalRequest.read(tmp_path / "request.json") == request
    assert json.loads((tmp_path / "request.json").read_text())["jobs"] == 2


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo broken; exit 4", "g++ exited with code 4, and says:\nbroken"),
        ("exit 0", "g++ made no library"),
        ('for last in "$@"; do [ "$before" = -o ] && echo junk > "$last"; before=$last; done', "g++ made no library"),
        ("sleep 600", "g++ did not end within 0.5 s"),
    ],
)
def test_a_compiler_that_builds_nothing_is_said(tmp_path, monkeypatch, script, why):
    """Would not catch one that builds another library."""
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(rehearsal, "BUILD_LIMIT_S", 0.5 if "sleep" in script else 60.0)
    with pytest.raises(ConfigError, match=re.escape(why)):
        rehearsal.built_library(tmp_path)
