"""Runs with teachers, as users start them: in one process, in pools of their own, several, ahead of training."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from short_runs import LOCAL, ONE, SHORT, TP2, WITHOUT_RAY, metrics
from sweeps import marks_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(480)]

STUDENT = "assets/demo/model"
LOSS = "distillation.distillation_loss"
FEW = (*SHORT, "trainer.total_training_steps=2", "trainer.export_hf=false", "trainer.save_freq=-1")
CONFIG = "configs/distill_cpu.yaml"
KINDS = {
    "k1": (f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=true"),
    "forward_kl_topk": (f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=4", f"{LOSS}.log_prob_min_clamp=null"),
    "reverse_kl_topk": (f"{LOSS}.loss_mode=reverse_kl_topk", f"{LOSS}.topk=4", f"{LOSS}.log_prob_min_clamp=null"),
    "forward_kl": (f"{LOSS}.loss_mode=forward_kl",),
    "jsd": (f"{LOSS}.loss_mode=jsd",),
}
"""One for everything that is asked of a teacher, and one more."""
BETWEEN_ENGINES = ("training/rollout_", "rollout_corr/", "memory/")
WAITED = ("memory/", "rollout/", "trainer/")


def teacher(path: Path | str, name: str = "carrier", **keys: object) -> list[str]:
    group = f"distillation.teacher_models.{name}"
    return [f"{group}.model_path={path}", *(f"{group}.{key}={value}" for key, value in keys.items())]


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """The demo's model with a tenth of noise in every weight: a teacher that is another model."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(STUDENT, folder)
    generator = torch.Generator().manual_seed(0)
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for weight in weights.values():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
        save_file(weights, file, metadata={"format": "pt"})
    return folder


ROUNDING = 1e-4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2e-3
"""Adam makes full steps of rounding noise, and layouts round further apart without AVX-512: 5e-4 after two steps."""


def numbers(run) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in line.items() if not name.startswith(BETWEEN_ENGINES)}
        for step, line in metrics(run).items()
    }


def rarely(kinds, often: tuple[str, ...] = (), weekly: tuple[str, ...] = ()) -> list:
    return [pytest.param(kind, marks=marks_of(kind, often, weekly)) for kind in kinds]


@pytest.mark.parametrize("kind", rarely(KINDS, ("forward_kl",), weekly=("forward_kl_topk",)))
def test_a_teacher_in_a_pool_and_layout_of_its_own(command_line, other: Path, kind: str) -> None:
    """TP2 there, one actor's rank here: the numbers of one process, task rewards and all. Weekly is what comes from
    teachers as another kind's numbers do. Would not catch what every layout computes wrong;
    tests/parity does.
    """
    keys = (*FEW, *KINDS[kind], f"{LOSS}.use_task_rewards=true")
    apart = teacher(other, pool="teachers", **{"megatron.tensor_model_parallel_size": 2})
    split = command_line(
        *(*keys, *apart, WITHOUT_RAY, "pools.teachers.n_gpus_per_node=2", "trainer.n_gpus_per_node=1"),
        *(f"actor_rollout_ref.actor.megatron.{axis}_model_parallel_size=1" for axis in ("tensor", "pipeline")),
        config=CONFIG,
    )
    assert split.wait() == 0, split.text()
    whole = command_line(*keys, *teacher(other), *LOCAL, config=CONFIG)
    assert whole.wait() == 0, whole.text()
    found, expected = numbers(split), numbers(whole)
    assert list(found) == list(expected) == [1, 2]
    for step, line in expected.items():
        assert abs(line["distillation/loss"]) > 1e-3
        for name, value in line.items():
            assert found[step][name] == pytest.approx(value, rel=ROUNDING, abs=1e-6), (step, name)


@pytest.mark.parametrize("kind", rarely(KINDS, ("jsd",), weekly=("forward_kl", "forward_kl_topk")))
def test_a_student_learns_nothing_from_itself(command_line, kind: str) -> None:
    """Teacher and student are one model: loss and gradient are 0 but for rounding. Weekly are kinds that read of a
    teacher what another kind reads. Would not catch a loss that is always 0; the test above does.
    """
    once = ("actor_rollout_ref.actor.ppo_epochs=1", "trainer.total_training_steps=1")
    run = command_line(*FEW, *once, *KINDS[kind], *teacher(STUDENT), *LOCAL, config=CONFIG)
    assert run.wait() == 0, run.text()
    (line,) = metrics(run).values()
    assert abs(line["distillation/loss"]) < 1e-5 and line["actor/grad_norm"] < 1e-4


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory) -> Path:
    """The demo's prompts as two sources, below 50 and from there on, with the answer as a hint for a teacher."""
    folder = tmp_path_factory.mktemp("two_sources")
    for name in ("train", "test"):
        rows = pq.read_table(f"assets/demo/{name}.parquet").slice(0, 9000 if name == "train" else 300).to_pylist()
        with (folder / f"{name}.jsonl").open("w") as file:
            for row in rows:
                question, answer = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
                row["data_source"] = "small" if int(question.split("+")[0]) < 50 else "large"
                row["extra_info"] = {"hint": [{"role": "user", "content": f"{question}{answer}{question}"}]}
                file.write(json.dumps(row) + "\n")
    return folder


def data_of(folder: Path) -> tuple[str, ...]:
    return (f"data.train_files={folder / 'train.jsonl'}", f"data.val_files={folder / 'test.jsonl'}")


APART = (*teacher("self", pool="other"), "pools.other.nnodes=1", "pools.other.n_gpus_per_node=1")


@pytest.mark.parametrize(
    ("kind", "apart"),
    [
        ("forward_kl_topk", TP2),
        *(
            pytest.param(kind, (*ONE, *APART), marks=pytest.mark.exhaustive)
            for kind in ("forward_kl_topk", "forward_kl")
        ),
    ],
)
def test_a_teacher_that_is_the_actor(command_line, two_sources: Path, kind: str, apart) -> None:
    """It reads another prompt: TP2, and a pool of the teacher's own, have the numbers of one process, and the loss is
    not 0. Would not catch a prompt that is another row's.
    """
    keys = (*FEW, *KINDS[kind], *data_of(two_sources), "actor_rollout_ref.actor.ppo_epochs=1")
    own = teacher("self", prompt_key="hint", max_prompt_length=32)
    runs = [command_line(*keys, *own, *where, config=CONFIG) for where in (LOCAL, (*apart, WITHOUT_RAY))]
    assert [run.wait() for run in runs] == [0, 0], [run.text() for run in runs]
    expected, found = map(numbers, runs)
    for step, line in expected.items():
        assert line["distillation/loss"] > 1e-2
        for name, value in line.items():
            assert found[step][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (step, name)


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> Path:
    """The demo's model with 48 rows more than its tokenizer has tokens, which a distribution over all rows prefers."""
    folder = tmp_path_factory.mktemp("padded") / "model"
    shutil.copytree(STUDENT, folder)
    settings = json.loads((folder / "config.json").read_text())
    num_rows = settings["vocab_size"]
    (folder / "config.json").write_text(json.dumps(settings | {"vocab_size": num_rows + 48}))
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if len(weight) == num_rows and weight.dim() == 2:
                weights[name] = torch.cat([weight, 2 * weight[:48]])
        save_file(weights, file, metadata={"format": "pt"})
    return folder


def test_ids_that_the_tokenizer_lacks_are_never_sampled(command_line, other: Path, padded: Path) -> None:
    """The teacher has no row for them. Engine and trainer state one distribution, over the tokens; the export, which is
    compared with the trainer, has all rows. Would not catch ids without a token below the tokenizer's last one.
    """
    keys = (*FEW, *KINDS["reverse_kl_topk"], "trainer.total_training_steps=1", "trainer.export_hf=true")
    run = command_line(*keys, *teacher(other), f"actor_rollout_ref.model.path={padded}", *LOCAL, config=CONFIG)
    assert run.wait() == 0, run.text()
    (line,) = metrics(run).values()
    assert line["training/rollout_logprob_diff_max"] < 5e-5 and line["response_length/mean"] < 8
    assert 1e-3 < line["distillation/loss"] < 10 and math.isfinite(line["actor/grad_norm"])


BAD = {
    "source": (teacher(STUDENT, key="small"), "leave prompts with large in column data_source without"),
    "key": (
        [*teacher(STUDENT, key="small"), *teacher(STUDENT, "two", key="larg")],
        "must be in column data_source of a training prompt; there are large, small; did you mean: large",
    ),
    "prompt": (teacher(STUDENT, prompt_key="hints"), "prompt_key=hints must be an entry of extra_info of every"),
    "length": (teacher(STUDENT, prompt_key="hint", max_prompt_length=12), "max_prompt_length=12 must be at least"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_prompts_lack_is_said_before_ranks_start(command_line, two_sources: Path, case: str) -> None:
    """One sentence, code 2, no rank. Would not catch a lack in held-out prompts, which no teacher reads."""
    keys, sentence = BAD[case]
    run = command_line(*FEW, *keys, *data_of(two_sources), *LOCAL, config=CONFIG)
    assert run.wait() == 2, run.text()
    assert sentence in " ".join(run.text().split()) and "Traceback" not in run.text()


@pytest.mark.parametrize("kind", rarely(["forward_kl", "reverse_kl_topk"], weekly=("forward_kl",)))
def test_a_resumed_run_is_the_whole_one(command_line, other: Path, kind: str, tmp_path: Path) -> None:
    """2 + 2 steps equal 4, bit for bit. Weekly with the kind for which the student sends nothing to its teacher. Would
    not catch another layout, which has nothing of the teacher's.
    """
    lasting = ("trainer.save_freq=1", "actor_rollout_ref.actor.optim.lr_decay_style=constant")
    keys = (*FEW, *KINDS[kind], *teacher(other), *LOCAL, *lasting)
    four = command_line(*keys, "trainer.total_training_steps=4", config=CONFIG)
    assert four.wait() == 0, four.text()
    for steps in (2, 4):
        run = command_line(*keys, f"trainer.total_training_steps={steps}", config=CONFIG, folder=tmp_path / "parts")
        assert run.wait() == 0, run.text()
    found, expected = (
        {step: {name: n for name, n in line.items() if not name.startswith("val-")} for step, line in run.items()}
        for run in (numbers(run), numbers(four))
    )
    assert found == expected  # but for the validation at the end of each start


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["k1", pytest.param("forward_kl", marks=pytest.mark.weekly)])
def test_ahead_of_training(command_line, other: Path, kind: str) -> None:
    """With a correction, a run ahead repeats its own schedule bit for bit. Would not catch another schedule."""
    correction = "algorithm.rollout_correction.rollout_is=token"
    enabled = ("distillation.enabled=true", f"{LOSS}.use_policy_gradient=false")
    keys = (*FEW, *enabled, *KINDS[kind], *teacher(other), correction, WITHOUT_RAY, "trainer.total_training_steps=4")
    first = command_line(*keys, config="configs/async_cpu.yaml")
    assert first.wait() == 0, first.text()
    again = command_line(*keys, f"--replay={first.run}", config="configs/async_cpu.yaml")
    assert again.wait() == 0, again.text()
    found, expected = (
        {step: {name: n for name, n in line.items() if not name.startswith(WAITED)} for step, line in run.items()}
        for run in (metrics(again), metrics(first))
    )
    assert found == expected
    assert all(math.isfinite(line["distillation/loss"]) for line in expected.values())


@pytest.fixture
def carrier(recorded) -> Path:
    """What the demo leaves: a model that can carry."""
    return recorded("the demo in one process", *LOCAL, "trainer.test_freq=0").run / "hf_model"


@pytest.mark.parametrize("seed", rarely([1, 2, 3], weekly=(1, 2, 3)))
def test_the_demo_learns_without_rewards(command_line, carrier: Path, seed: int) -> None:
    """configs/distill_cpu.yaml, 20 steps, TP2 x PP2; further seeds weekly. Would not catch other tasks."""
    run = command_line(*teacher(carrier), WITHOUT_RAY, f"trainer.seed={seed}", validates_all=True, config=CONFIG)
    assert run.wait() == 0, run.text()
    summary = json.loads((run.run / "summary.json").read_text())
    assert summary["val_accuracy_before"] < 0.4 and summary["val_accuracy_after"] >= 0.97


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_two_teachers_each_teach_their_own(command_line, carrier: Path, two_sources: Path) -> None:
    """Small numbers by the one that carries, large ones by the one that seldom does, in 40 steps. Would not catch
    teachers of other widths; tests/parity does.
    """
    both = (*teacher(carrier, key="small"), *teacher(STUDENT, "forgetter", key="large"))
    run = command_line(*both, *data_of(two_sources), *LOCAL, "trainer.total_training_steps=40", config=CONFIG)
    assert run.wait() == 0, run.text()
    first, *_, last = list(metrics(run).values())[1:]
    accuracies = {source: last[f"val-core/{source}/acc/mean@1"] for source in ("small", "large")}
    assert accuracies["small"] >= 0.95 and accuracies["large"] <= 0.6, accuracies
    assert last["distillation/loss"] < 0.15 * first["distillation/loss"]


@pytest.mark.exhaustive
def test_online_dpo_learns_the_demo(command_line) -> None:
    """From pairs that the policy draws and the rule judges, 20 steps. Would not catch another beta."""
    keys = (
        *("algorithm.adv_estimator=online_dpo", "algorithm.online_dpo_beta=0.5"),
        *("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum", "algorithm.use_kl_in_reward=false"),
    )
    run = command_line(*keys, *LOCAL, config="configs/grpo_cpu.yaml")
    assert run.wait() == 0, run.text()
    summary = json.loads((run.run / "summary.json").read_text())
    assert summary["val_accuracy_after"] >= 0.9
