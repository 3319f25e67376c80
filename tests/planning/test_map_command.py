"""`megatron-rl map`: its tables, JSON, file and command, kept values, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from placing import ACTOR, FILE, MODELS, ROLLOUT, gpu, request, write_model
from typer.testing import CliRunner

from megatron_rl.cli import app
from megatron_rl.config.keys import value_of
from megatron_rl.config.load import load_config
from megatron_rl.errors import ConfigError
from megatron_rl.planning.layout_search.explain import explain, lines
from megatron_rl.planning.layout_search.placement_files import command_of, write_placement
from megatron_rl.planning.layout_search.request import cluster_of
from megatron_rl.planning.layout_search.search_result import find_placements
from megatron_rl.planning.preflight import preflight

TP = f"{ACTOR}.megatron.tensor_model_parallel_size"


@pytest.fixture
def run(tmp_path):
    def run(*arguments: str):
        """The command on a small GRPO run; the file is in tmp_path."""
        (tmp_path / "run.yaml").write_text(FILE + "algorithm: {adv_estimator: grpo}\n")
        model = f"actor_rollout_ref.model.path={write_model(tmp_path / 'model')}"
        options = ["map", "--config", str(tmp_path / "run.yaml"), "--hardware", "h100", *arguments, "--keep", model]
        return CliRunner().invoke(app, options)

    return run


def test_json_has_the_best_first(run):
    """Keys as promised, times that add up, and settings that are the configuration. Would not catch a slow best."""
    found = run("--gpus", "16", "--json")
    assert found.exit_code == 0, found.output
    content = json.loads(found.stdout)
    first, *_ = candidates = content["candidates"]
    assert 1 < len(candidates) <= 10 and content["search_seconds"] > 0
    assert [one["step_seconds"] for one in candidates] == sorted(one["step_seconds"] for one in candidates)
    assert first["step_seconds"] == pytest.approx(sum(first["seconds"][phase] for phase in first["critical_path"]))
    assert set(first["memory_bytes"]) == set(first["pools"]) and max(first["memory_bytes"].values()) < 85e9
    ranks = sum(pool["nnodes"] * pool["n_gpus_per_node"] for pool in first["pools"].values())
    assert ranks <= 16 and first["settings"]["trainer.nnodes"] >= 1
    assert all(one["lower_bound_seconds"] <= first["step_seconds"] for one in [content])


def test_keys_of_verl_are_kept_under_ours(run, tmp_path):
    """Renamed, ignored and removed ones, and one that the search decides. Would not catch another command's."""
    written = ["trainer.max_actor_ckpt_to_keep=2", "actor_rollout_ref.actor.strategy=megatron", "~trainer.seed"]
    written += ["data.return_raw_chat=true", f"+{TP}=2", "~actor_rollout_ref.actor.ulysses_sequence_parallel_size"]
    best = tmp_path / "best.yaml"
    found = run("--gpus", "4", "--out", str(best), *(word for text in written for word in ("--keep", text)))
    assert found.exit_code == 0, found.output
    read, text = load_config(best), best.read_text()
    assert (read.trainer.max_ckpt_to_keep, value_of(read, TP)) == (2, 2)
    assert "max_actor_ckpt_to_keep" not in text and "strategy" not in text


def test_the_file_and_the_command_are_the_same_run(run, tmp_path):
    """The winner as YAML, and as overrides of the given file; preflight accepts both. Would not catch a key that the
    search should set and does not.
    """
    found = run("--gpus", "8", "--out", str(tmp_path / "best.yaml"), "--json")
    assert found.exit_code == 0, found.output
    content = json.loads(found.stdout)
    assert shlex.split(content["command"]) == ["megatron-rl", "train", "--config", str(tmp_path / "best.yaml")]
    written = load_config(tmp_path / "best.yaml")
    for key, value in content["candidates"][0]["settings"].items():
        assert value_of(written, key) == value
    assert preflight(written, config_only=True) == []
    plain = json.loads(run("--gpus", "8", "--json").stdout)["command"]
    program, method, option, file, *overrides = shlex.split(plain)
    assert (program, method, option) == ("megatron-rl", "train", "--config")
    assert load_config(file, overrides) == written


def test_pools_that_a_placement_does_not_have_are_taken_away(tmp_path):
    """A file with a pool of another name, written and as a command. Would not catch pools that are kept by mistake
    elsewhere.
    """
    file = FILE + "pools: {mine: {nnodes: 1, n_gpus_per_node: 2}}\ncritic: {pool: mine}\n"
    asked = request(tmp_path, 4, file=file)
    best = find_placements(asked, 1).candidates[0]
    assert "mine" not in best.config.pools
    write_placement(asked, best, tmp_path / "best.yaml")
    written = load_config(tmp_path / "best.yaml")
    assert written == best.config
    command = command_of(asked, best, None)
    assert "~pools.mine" in command
    assert load_config(asked.path, command[3:]) == written


def test_tables_show_pools_times_and_limits(run):
    """Would not catch bad taste."""
    found = run("--gpus", "16", "--explain", TP)
    assert found.exit_code == 0, found.output
    for said in ("Placements, fastest first", "Seconds of each phase", "what limits it", "rollout TP", "update_actor"):
        assert said in found.stdout
    assert f"{TP}=" in found.stdout and "megatron-rl train --config" in found.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "kept",
    [f"{TP}=4", f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.pool=elsewhere", "trainer.nnodes=1",
     "actor_rollout_ref.hybrid_engine=true", f"{ACTOR}.ppo_max_token_len_per_gpu=1024",
     f"{ACTOR}.megatron.optimizer_offload=true", f"{ROLLOUT}.drop_train_weights=true",
     f"{ROLLOUT}.kv_cache_memory_bytes=3000000000",
     f"{ACTOR}.megatron.override_transformer_config.recompute_granularity=full"],
)  # fmt: skip
def test_kept_values_stay(tmp_path, kept):
    """In every candidate. Would not catch a better placement that also keeps it."""
    asked = request(tmp_path, 16, "algorithm.adv_estimator=grpo", kept)
    key, _, value = kept.partition("=")
    found = find_placements(asked, 3).candidates
    assert found and all(str(value_of(one.config, key)).lower() == value for one in found)
    plain = find_placements(request(tmp_path, 16, "algorithm.adv_estimator=grpo"), 1).candidates[0]
    assert plain.seconds <= found[0].seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ((f"{TP}=3",), r"tp\(3\) must divide num_attention_heads\(16\)"),
        (("actor_rollout_ref.hybrid_engine=true", f"{ROLLOUT}.pool=gen"), "do not go together: true means"),
        ((f"{TP}=8", f"{ACTOR}.megatron.pipeline_model_parallel_size=4"), r"tp\(8\) \* pp\(4\) must divide the 16"),
        (("trainer.rollout_ahead=1",), "nothing would correct for that"),
        (
            (
                "trainer.rollout_ahead=1",
                "actor_rollout_ref.hybrid_engine=true",
                "algorithm.rollout_correction.rollout_is=token",
            ),
            "only unfinished responses outlast a step",
        ),
        ((f"{ACTOR}.megatron.context_parallel_size=3",), r"no layout that passes every check .* --gpus 24"),
        (("data.train_batch_size=0",), "data.train_batch_size=0 and .* must be >= 1"),
    ],
)
def test_kept_values_that_contradict_are_refused_with_their_rule(tmp_path, keep, said):
    """Would not catch a contradiction that no rule names."""
    with pytest.raises(ConfigError, match=said):
        find_placements(request(tmp_path, 16, "algorithm.adv_estimator=grpo", *keep))


def test_nothing_fits(tmp_path):
    """What is missing in bytes, and the smallest cluster that would do: on it something fits, on half of it nothing.
    Would not catch a smaller cluster of another shape.
    """
    small = gpu(3.0)
    wide = write_model(tmp_path / "wide", hidden_size=2048, num_attention_heads=16, intermediate_size=5632)
    with pytest.raises(ConfigError) as raised:
        find_placements(request(tmp_path, 1, model=wide, hardware=small))
    said = str(raised.value)
    assert "bytes are missing on a rank" in said and "GB on the worst rank" in said
    enough = int(said.rpartition("--gpus ")[2])
    assert enough > 1
    assert find_placements(request(tmp_path, enough, model=wide, hardware=small), 1).candidates
    with pytest.raises(ConfigError, match="no placement fits"):
        find_placements(request(tmp_path, enough // 2, model=wide, hardware=small))


@pytest.mark.parametrize(("gpus", "per_node", "said"), [
    (0, None, "--gpus 0 must be >= 1"), (12, None, "multiple of the 8.*try: --gpus 8"),
    (10, 4, "multiple of the 4.*try: --gpus 8"), (10**6, None, "try: --gpus 16384"),
])  # fmt: skip
def test_clusters_that_are_refused(tmp_path, gpus, per_node, said):
    """Would not catch machines of different sizes."""
    asked = request(tmp_path, 8)
    with pytest.raises(ConfigError, match=said):
        cluster_of(asked.config, gpus, per_node, asked.keeps)
    with pytest.raises(ConfigError, match="at most the 8 GPUs"):
        kept = request(tmp_path, 8, "trainer.nnodes=4", "trainer.n_gpus_per_node=8")
        cluster_of(kept.config, 8, None, kept.keeps)


def test_explained_values_are_the_best_on_the_same_pools(tmp_path):
    """Others are no faster; what cannot be says its rule. Would not catch values that are not tried."""
    asked = request(tmp_path, 8, model=MODELS / "llama-3-8b", hardware=gpu())
    mapped = find_placements(asked, 1)
    found = explain(mapped, TP)
    assert [other.value for other in found[1:]] == [size for size in (1, 2, 4, 8) if size != found[0].value]
    for other in found[1:]:
        if other.candidate is not None:
            assert value_of(other.candidate.config, TP) == other.value
            assert other.candidate.seconds >= mapped.candidates[0].seconds * (1 - 1e-9)
            assert {c.block for c in other.candidate.placed.choices} == {
                c.block for c in mapped.candidates[0].placed.choices
            }
    assert len(lines(found, TP)) == 4
    with pytest.raises(ConfigError, match="must be a key that the search decides; did you mean"):
        explain(mapped, "trainer.seed")


def test_the_picture_has_a_lane_for_every_pool(run, tmp_path):
    """Would not catch bars of a wrong colour."""
    found = run("--gpus", "8", "--json", "--picture", str(tmp_path / "new" / "map.png"))
    assert found.exit_code == 0, found.output
    lanes = sum(len(one["pools"]) for one in json.loads(found.stdout)["candidates"])
    picture = (tmp_path / "new" / "map.png").read_bytes()
    height = int.from_bytes(picture[20:24], "big")
    assert picture.startswith(b"\x89PNG") and height > 0.34 * 120 * lanes


def test_written_paths_are_the_files(tmp_path):
    """Would not catch a file system that is full."""
    asked = request(tmp_path, 2)
    best = find_placements(asked, 1).candidates[0]
    target = Path(tmp_path / "deep" / "best.yaml")
    write_placement(asked, best, target)
    assert target.read_text().startswith(f"# {asked.path} on 2 h100")
