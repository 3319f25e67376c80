"""Router replay as a user gets it: by overrides, on a tiny mixture of experts, with several mini-batches and epochs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import stopped_in
from short_runs import LOCAL, MEGATRON, ONE, WITHOUT_RAY, metrics, reached, steps_saved
from sweeps import often
from test_agent_runs import DETERMINISTIC, environment
from test_async_runs import events, numbers, replicas
from test_several_nodes import tiny_moe

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SHORT = (
    *("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4", f"{ROLLOUT}.n=4", "trainer.total_training_steps=2"),
    *("trainer.val_before_train=false", "trainer.test_freq=5040", "trainer.export_hf=false"),
    *(f"{ACTOR}.ppo_micro_batch_size_per_gpu=8", f"{ACTOR}.ppo_epochs=2"),
)
SMALL_STEPS = f"{ACTOR}.optim.lr=1e-12"
"""A larger one moves the rows of a gate apart by more than rounding, and nothing ties any more."""
GRPO = "configs/grpo_cpu.yaml"
DIFFERENCE, OTHERS = "training/rollout_logprob_diff_max", "training/rollout_experts_diff"


def test_the_engines_experts_are_replayed(command_line, tmp_path: Path) -> None:
    """R3 in one process, with routers that tie: the engine's log-probs are the trainer's, and without replay not.

    Would not catch a replay in the scoring pass alone: `tests/parity` does.
    """
    from tiny_models import tie_routers

    model = tie_routers(str(tiny_moe(tmp_path / "model")))
    replays = (f"{ACTOR}.router_replay.mode=R3", f"{ACTOR}.router_replay.compare_freq=2", SMALL_STEPS)
    layout = ("trainer.n_gpus_per_node=1", f"{MEGATRON}.tensor_model_parallel_size=1", "--local")
    run = command_line(*SHORT, *replays, *layout, f"actor_rollout_ref.model.path={model}", config=GRPO)
    assert run.wait() == 0, run.text()
    first, second = metrics(run).values()
    for step in (first, second):
        assert 0 < step[DIFFERENCE] < 5e-5
        assert 1 <= step["actor/expert_load/mean"] <= step["actor/expert_load/max"] <= 3
        assert step["actor/expert_load/layer_3"] <= step["actor/expert_load/max"]
        assert step[OTHERS] > 0.01
    assert f"{DIFFERENCE}_without_replay" not in first and second[f"{DIFFERENCE}_without_replay"] > 5e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mode", "is_on_policy", "options"),
    [
        ("disabled", True, ("--local", "--collapse")),
        ("R2", True, ("--local", "--collapse")),
        ("R3", False, (WITHOUT_RAY,)),
    ],
)
def test_modes(mode, is_on_policy, options, command_line, tmp_path: Path) -> None:
    """The engine's experts are known in every mode, also where a step's only update makes the old log-probs; one
    on EP2, the others in one process. Would not catch a mode that does nothing.
    """
    keys = (f"{ACTOR}.router_replay.mode={mode}", f"{ROLLOUT}.enable_rollout_routing_replay=true")
    if is_on_policy:
        keys += (f"{ACTOR}.ppo_epochs=1", f"{ACTOR}.ppo_mini_batch_size=8")
    sizes = ("expert_model_parallel_size=2", "tensor_model_parallel_size=1")
    layout = ("trainer.n_gpus_per_node=2", *(f"{MEGATRON}.{size}" for size in sizes))
    model = f"actor_rollout_ref.model.path={tiny_moe(tmp_path / 'model')}"
    run = command_line(*SHORT, *keys, *layout, *options, model, config=GRPO)
    assert run.wait() == 0, run.text()
    for step in metrics(run).values():
        assert step[DIFFERENCE] < 5e-5 and step[OTHERS] < 0.01
    assert json.loads((run.run / "summary.json").read_text())["steps"] == 2


STALE = ("algorithm.rollout_correction.rollout_is=token", "async_training.partial_rollout=true")
ONE_POOL = (*LOCAL, *STALE, "trainer.rollout_ahead=2", "async_training.slice_steps=1", f"{ROLLOUT}.max_num_seqs=8")
OWN_POOL = (
    *(*STALE, "actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2"),
    *("trainer.rollout_ahead=1", "async_training.slice_steps=2", DETERMINISTIC, *ONE, WITHOUT_RAY),
    "trainer.held_bytes=1",
)
PTX = ("ptx.coef=0.1", "ptx.mini_batch_size=4", "ptx.files=FILE")
TURNS = environment("Retry")
PAIRS = {
    "turns": (*LOCAL, *TURNS),
    "partial": ONE_POOL,
    "ptx": (*LOCAL, *PTX),
    "ahead": OWN_POOL,
    "all in one pool": (*ONE_POOL, *TURNS, *PTX, "trainer.save_freq=1"),
}
OFTEN = ("ptx", "all in one pool")
READ_ONCE = ("ptx", "ahead")
"""Where the engine reads no token again, so that routers may tie: elsewhere ties may fall otherwise the second time."""


@pytest.mark.parametrize("pair", often(PAIRS, OFTEN))
def test_what_goes_with_the_engines_experts(command_line, tmp_path: Path, pair: str) -> None:
    """Two steps, in each of which log-probs agree within the dense bound, of tied routers too; a replay of the
    schedule, whose experts pass through the driver, has the same metrics, all of them. Would not catch what longer runs
    show: `tests/dist/test_replay_in_slices.py` follows each token.
    """
    from tiny_models import tie_routers

    folder, examples = str(tiny_moe(tmp_path / "model")), tmp_path / "examples.jsonl"
    model = tie_routers(folder) if pair in READ_ONCE else folder
    examples.write_text("".join(json.dumps({"text": f"{n}+{n}={2 * n}"}) + "\n" for n in range(40)))
    asked = (*SHORT, *PAIRS[pair], f"{ACTOR}.router_replay.mode=R3", SMALL_STEPS)
    keys = [key.replace("FILE", str(examples)) for key in (*asked, f"actor_rollout_ref.model.path={model}")]
    run = command_line(*keys, config=GRPO)
    assert run.wait() == 0, run.text()
    steps = metrics(run)
    assert len(steps) == 2
    for step in steps.values():
        assert step.get(DIFFERENCE, 0.0) < 5e-5
        assert step[OTHERS] > 0.01 if pair in READ_ONCE else step[OTHERS] < 0.01
    if (run.run / "schedule.jsonl").exists():
        passed = ("trainer.save_freq=0", "trainer.held_bytes=null")
        again = command_line(*keys, *passed, f"--replay={run.run}", config=GRPO)
        assert again.wait() == 0, again.text()
        assert numbers(again) == numbers(run)


MANY = 8


@pytest.mark.exhaustive
def test_a_killed_run_continues_with_its_experts(command_line, tmp_path: Path) -> None:
    """Responses that outlive a step, killed behind a checkpoint: the metrics of the run that was left alone. Would not
    catch a checkpoint without an unfinished response.
    """
    keys = (*SHORT, *ONE_POOL, f"{ACTOR}.router_replay.mode=R3", "trainer.save_freq=1", "trainer.held_bytes=1")
    keys += (f"trainer.total_training_steps={MANY}", f"actor_rollout_ref.model.path={tiny_moe(tmp_path / 'model')}")
    whole = command_line(*keys, config=GRPO)
    assert whole.wait() == 0, whole.text()
    life = command_line(*keys, config=GRPO)
    life.wait_for(reached(life, 3), interval=0.01)
    life.kill_all()
    saved = steps_saved(life)[0]
    last = command_line(*keys, folder=life.folder, config=GRPO)
    assert last.wait() == 0, last.text()
    assert f"resuming after step {saved}" in last.text() and 0 < saved < MANY
    assert numbers(last)[saved:] == numbers(whole)[saved:]


@pytest.mark.exhaustive
def test_experts_of_a_replica_outlive_it(command_line, tmp_path: Path) -> None:
    """A replica is killed in a slice: its requests continue elsewhere, with the experts that it has reported and holds.
    A replay, in which it is not lost, has the same metrics. Would not catch a node that is lost.
    """
    keys = (*SHORT, *OWN_POOL, f"{ACTOR}.router_replay.mode=R3", f"trainer.total_training_steps={MANY}")
    keys += (f"actor_rollout_ref.model.path={tiny_moe(tmp_path / 'model')}",)
    run, lost = command_line(*keys, config=GRPO), []
    run.wait_for(lambda: len(events(run, "taken")) >= 2, interval=0.01)
    known = replicas(run)
    run.wait_for(lambda: lost.extend(filter(None, [stopped_in(known, "rollout.advance")])) or lost, interval=0.001)
    lost[0].kill()
    assert run.wait() == 0, run.text()
    assert len(events(run, "lost")) == 1 and run.left_over() == []
    again = command_line(*keys, f"--replay={run.run}", config=GRPO)
    assert again.wait() == 0, again.text()
    assert numbers(again) == numbers(run)


def test_a_dense_model_is_refused(command_line) -> None:
    """The key, the rule and the nearest choice, with code 2. Would not catch what is refused later."""
    run = command_line(f"{ACTOR}.router_replay.mode=R3")
    assert run.wait() == 2
    assert "try: actor_rollout_ref.actor.router_replay.mode=disabled" in run.text() and "has no experts" in run.text()
