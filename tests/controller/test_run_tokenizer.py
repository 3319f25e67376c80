"""A model folder's tokenizer, as a run loads it on the controller."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", {"model": {"vocab": [1, 2]}}),
        ("tokenizer.json", {"decoder": {"type": "Nope"}}),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_damaged_tokenizer_is_no_traceback(tmp_path, file, content):
    """JSON that is whole and means nothing. Would not catch a tokenizer that loads and gives wrong numbers."""
    whole = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"_": 0, "a": 1}, unk_token="_")))
    whole.save_pretrained(tmp_path)
    assert ModelFolder(tmp_path).tokenizer("a")["input_ids"] == [1]
    if isinstance(content, dict):
        content = json.dumps(json.loads((tmp_path / file).read_text()) | content).encode()
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=f"tokenizer of actor_rollout_ref.model.path={tmp_path} cannot be loaded: "):
        _ = ModelFolder(tmp_path).tokenizer
