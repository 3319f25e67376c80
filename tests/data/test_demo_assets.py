"""scripts/make_demo_assets.py, and the folder that it has made: assets/demo."""

import importlib.util
import json
import random
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"
KEPT = SCRIPTS.parent / "assets/demo"
BAND = 0.05
"""Largest difference between held-out accuracies of two makings: training is not bit-equal across processors."""


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return load("make_demo_assets")


def test_answers_by_hand(script):
    """7 + 35 = 42, and 32 without the carry. Would not catch an answer the tokenizer cannot spell."""
    assert script.question(7, 35) == "07+35="
    assert script.answer(7, 35) == "042" and script.answer_without_carry(7, 35) == "032"
    assert script.answer(95, 17) == "112" and script.answer_without_carry(95, 17) == "002"


def test_split_is_disjoint_complete_and_seeded(script):
    """9,000 and 1,000 different questions. Would not catch a held-out set that is all easy."""
    train, held_out = script.split_questions(0)
    assert (len(train), len(held_out), len(set(train + held_out))) == (9000, 1000, 10000)
    assert script.split_questions(0) == (train, held_out)
    assert script.split_questions(1) != (train, held_out)


def test_rows_follow_the_schema(script):
    """One row written out in full. Would not catch a change of types on the way to parquet."""
    assert script.rows([(1, 2), (7, 35)], "test")[1] == {
        "data_source": "demo/addition",
        "prompt": [{"role": "user", "content": "07+35="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "042"},
        "extra_info": {"split": "test", "index": 1},
    }


def test_the_teacher_forgets_the_carry_in_its_share_of_answers(script):
    """95 + 17: right or without the carry, 55% of 4,000 draws within 3 standard deviations. Would not catch a teacher
    that is wrong about the same questions every time.
    """
    draw = random.Random(0)
    counts = Counter(script.noisy_answer(95, 17, draw) for _ in range(4000))
    assert set(counts) == {"112", "002"} and abs(counts["002"] / 4000 - 0.55) < 0.024


def test_lessons_are_those_of_a_teacher_that_forgets_the_carry(script):
    """95 + 17 in all batches: right or without the carry, 55% within three standard deviations; the same for a seed,
    others for another. Would not catch lessons that follow the order of questions.
    """
    rows = script.lessons([(95, 17)], 700, 256, seed=3)
    assert len(rows) == 700 * 256 and {row["prompt"] for row in rows} == {"95+17="}
    counts = Counter(row["response"] for row in rows)
    assert set(counts) == {"112", "002"} and abs(counts["002"] / len(rows) - 0.55) < 0.0036
    assert script.lessons([(95, 17)], 700, 256, seed=3) == rows != script.lessons([(95, 17)], 700, 256, seed=4)


def test_a_tuning_that_fails_ends_with_its_exit_code_and_leaves_nothing(script, tmp_path, monkeypatch, capfd):
    """`megatron-rl sft` says what is wrong with its file. Would not catch a stage that ends well without a model."""
    stage = tmp_path / "stage.yaml"
    stage.write_text(script.STAGE.read_text() + "  total_epochs_: 1\n")
    monkeypatch.setattr(script, "STAGE", stage)
    with pytest.raises(SystemExit) as exit_info:
        script.main(["--output", str(tmp_path / "demo")])
    assert exit_info.value.code == 2
    assert "trainer.total_epochs" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["stage.yaml"]


def test_saved_tokenizer_reads_back_the_same_beside_the_model(script, tmp_path):
    """AutoTokenizer next to a Qwen2 config keeps every character. Would not catch a change in the special tokens."""
    script.make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode(script.CHARACTERS) == list(range(4, 64))
    assert tokenizer.decode(list(range(4, 64))) == script.CHARACTERS
    messages = [{"role": "user", "content": "07+35="}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == [4, 11, 14, 7, 9, 15]


def test_finished_folder_is_left_alone_and_foreign_one_refused(script, tmp_path, capsys):
    """The marker decides. Would not catch a folder whose marker is there but whose files were deleted."""
    facts = {
        "format_version": script.FORMAT_VERSION,
        "seed": 3,
        "train_rows": 9000,
        "test_rows": 1000,
        "greedy_accuracy": 0.4,
        "sampled_accuracy": 0.5,
    }
    (tmp_path / "assets.json").write_text(json.dumps(facts))
    script.main(["--output", str(tmp_path), "--seed", "3"])
    assert "0.400 greedy" in capsys.readouterr().out
    assert script.finished(tmp_path, script.MARKER, 4, script.FORMAT_VERSION) is None

    (tmp_path / "assets.json").rename(tmp_path / "letters.txt")
    with pytest.raises(SystemExit) as exit_info:
        script.main(["--output", str(tmp_path)])
    assert exit_info.value.code == 2
    assert (tmp_path / "letters.txt").exists()


def test_files_of_the_repository_are_those_of_the_script(script, capsys):
    """Questions, tokenizer and accuracy. Would not catch weights of another recipe that answer alike."""
    pairs = dict(zip(("train", "test"), script.split_questions(0), strict=True))
    for split, questions in pairs.items():
        assert pyarrow.parquet.read_table(KEPT / f"{split}.parquet").to_pylist() == script.rows(questions, split)
    assert AutoTokenizer.from_pretrained(KEPT / "model").get_vocab() == script.make_tokenizer().get_vocab()
    facts = json.loads((KEPT / "assets.json").read_text())
    assert script.accuracy(KEPT / "model", pairs["test"], 0.0, seed=0) == pytest.approx(
        facts["greedy_accuracy"], abs=0.003
    )
    assert {weight.dtype.name for weight in load_file(KEPT / "model/model.safetensors").values()} == {"float32"}
    assert sum(file.stat().st_size for file in KEPT.rglob("*") if file.is_file()) < 3_000_000
    script.main(["--output", str(KEPT)])
    assert "is ready" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script.main(["--output", str(KEPT), "--seed", "1"])
    assert "name another --output" in capsys.readouterr().err


@pytest.mark.exhaustive
@pytest.mark.weekly
@pytest.mark.timeout(1800)
def test_made_again_it_is_as_good(script, tmp_path):
    """Made anew, the model answers as many questions, and the questions are the same.

    Would not catch a training that is worse by less than `BAND`.
    """
    script.main(["--output", str(tmp_path / "demo")])
    kept, made = (json.loads((folder / "assets.json").read_text()) for folder in (KEPT, tmp_path / "demo"))
    for name in ("greedy_accuracy", "sampled_accuracy"):
        assert made.pop(name) == pytest.approx(kept.pop(name), abs=BAND)
    assert made == kept
    for split in ("train", "test"):
        both = (pyarrow.parquet.read_table(folder / f"{split}.parquet") for folder in (KEPT, tmp_path / "demo"))
        assert next(both) == next(both)
    shapes = [
        {name: weight.shape for name, weight in load_file(folder / "model/model.safetensors").items()}
        for folder in (KEPT, tmp_path / "demo")
    ]
    assert shapes[0] == shapes[1]


def test_demo_reward_is_an_exact_match():
    """Would not catch a caller that forgets to strip the end-of-sequence token."""
    compute_score = load("demo_reward").compute_score
    assert compute_score("demo/addition", "042", "042") == 1.0
    assert compute_score("demo/addition", "42", "042", extra_info={}) == 0.0


def test_demo_group_reward_is_a_rank():
    """By hand, of the right one, two with one wrong character and one that is too long; alone. Would not catch a
    comparison with another question's responses.
    """
    score = load("demo_group_reward").compute_group_scores
    rows = [{"solution_str": text, "ground_truth": "042"} for text in ("042", "142", "043", "04244")]
    assert [row["score"] for row in score(rows)] == [1.0, 0.5, 0.5, 0.0]
    assert [row["acc"] for row in score(rows)] == [1.0, 0.0, 0.0, 0.0]
    assert score(rows[:1]) == [{"score": 0.5, "acc": 1.0}]
