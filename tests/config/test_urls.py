"""URLs as they may be printed and kept in files that others read."""

from __future__ import annotations

import pytest

from megatron_rl.config.urls import shown_url, without_secrets


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://user:pass@host:1/a", "http://***@host:1/a"),
        ("https://user:p@ss@host/a?token=x&y=2#z", "https://***@host/a?token=***&y=***#***"),
        ("ask http://host?SECRET now", "ask http://host?*** now"),
        ("http://host/a b", "http://host/a b"),
        ("a@b?c=d", "a@b?c=d"),
    ],
)
def test_a_url_is_shown_without_its_secrets(given: str, shown: str) -> None:
    """Would not catch a secret in the path."""
    assert shown_url(given) == shown


def test_settings_for_others_have_no_secrets() -> None:
    settings = {
        "url": "http://u:p@h",
        "kwargs": {"api_key": "k", "judge_token": "j", "hf_token": "t", "eos_token": "e"},
    }
    assert without_secrets({"a": [settings]}) == {
        "a": [
            {
                "url": "http://***@h",
                "kwargs": {"api_key": "***", "judge_token": "j", "hf_token": "***", "eos_token": "e"},
            }
        ]
    }
