"""The tokens that end a response, from the files of a folder that name different ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from small_tokenizers import BARE, CHATML, GLM_ENDS, byte_level, glm
from transformers import LlamaConfig

from megatron_rl.checkpoint.hf_folder import Description, describe_model
from megatron_rl.checkpoint.model_folder import SCORE_AT_END, ModelFolder
from megatron_rl.controller.response_ends import end_token_notes, written_end


def folder_of(path: Path, generation: dict | None, eos: str = "<|im_end|>", template: str | None = CHATML) -> Path:
    """A model's folder whose config.json names token 1, with a generation_config.json or without."""
    LlamaConfig(architectures=["LlamaForCausalLM"], eos_token_id=1).save_pretrained(path)
    byte_level(template, eos).save_pretrained(path)
    (path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


END, EOS = 4, 1  # of small_tokenizers.SPECIAL


@pytest.mark.parametrize(
    ("generation", "ids", "written"),
    [
        ({"eos_token_id": 0, "top_k": 3}, [0, END], {"eos_token_id": [0, END], "top_k": 3}),
        ({"eos_token_id": [6, END]}, [END, 6], {"eos_token_id": [6, END]}),  # it names the tokenizer's, and one more
        ({"temperature": 1.0}, [END], {"temperature": 1.0, "eos_token_id": [END]}),
        (None, [EOS, END], {"eos_token_id": [EOS, END]}),  # config.json's
    ],
)
def test_a_response_ends_where_one_of_the_files_says(tmp_path, generation, ids, written):
    """By hand, and again for the folder that is made of it. Would not catch a file that names no token of the model."""
    source = folder_of(tmp_path / "source", generation)
    assert ModelFolder(source).end_tokens.ids == ids
    made = folder_of(tmp_path / "made", None)
    ModelFolder(source).write_generation_config(made)
    content = json.loads((made / "generation_config.json").read_text())
    assert {name: value for name, value in content.items() if name not in ("bos_token_id", "pad_token_id")} == written
    ends = ModelFolder(made).end_tokens
    assert ends.ids == ids and not ends.disagree


@pytest.mark.parametrize(
    ("generation", "eos", "template", "said"),
    [
        ({"eos_token_id": [END, EOS]}, "<|im_end|>", CHATML, []),
        ({"eos_token_id": [END, EOS]}, "<eos>", CHATML, []),
        ({"eos_token_id": 0}, "<|im_end|>", CHATML, ["its tokenizer 4, its generation_config.json or config.json 0;"]),
        ({"eos_token_id": EOS}, "<eos>", CHATML, ["ends a turn with <|im_end|> (4), at which no response stops; try:"]),
        ({"eos_token_id": EOS}, "<eos>", BARE, []),  # it writes nothing behind an answer
    ],
)
def test_a_line_says_where_the_files_disagree(tmp_path, generation, eos, template, said):
    """Tokenizer, generation_config.json and chat template. Would not catch a template that a prompt's tools change."""
    source = folder_of(tmp_path, generation, eos, template)
    notes = end_token_notes(ModelFolder(source), {}, is_chat=True)
    assert len(notes) == len(said) and all(part in note for part, note in zip(said, notes, strict=True))


def test_what_glm_writes_behind_an_answer():
    """Nothing. Would not catch a mark that is no special token."""
    assert written_end(glm(), {}) is None and written_end(byte_level(), {}) == END
    assert glm().convert_tokens_to_ids(GLM_ENDS[0]) == EOS


@pytest.mark.parametrize(("kind", "is_said"), [("ForCausalLM", False), ("ForSequenceClassification", True)])
def test_what_an_export_says(tmp_path, kind, is_said):
    """Where a response ends, and of a reward model that its score is there. Would not catch a folder with towers."""
    source = folder_of(tmp_path / "source", {"eos_token_id": 0})
    (tmp_path / "export").mkdir()
    describe_model(tmp_path / "export", [], 0, Description(source, f"Llama{kind}", torch.float32))
    assert ModelFolder(tmp_path / "export").end_tokens.declared == (0, END)
    assert getattr(ModelFolder(tmp_path / "export").hf_config, SCORE_AT_END, False) is is_said
