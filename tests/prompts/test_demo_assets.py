"""The parts of scripts/make_demo_assets.py that need no training."""

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

SCRIPTS = Path(__file__).parents[2] / "scripts"


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
    assert script.finished(tmp_path, seed=4) is None

    (tmp_path / "assets.json").rename(tmp_path / "letters.txt")
    with pytest.raises(SystemExit) as exit_info:
        script.main(["--output", str(tmp_path)])
    assert exit_info.value.code == 2
    assert (tmp_path / "letters.txt").exists()


def test_demo_reward_is_an_exact_match():
    """Would not catch a caller that forgets to strip the end-of-sequence token."""
    compute_score = load("demo_reward").compute_score
    assert compute_score("demo/addition", "042", "042") == 1.0
    assert compute_score("demo/addition", "42", "042", extra_info={}) == 0.0
