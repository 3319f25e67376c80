"""Links that somebody put where a run writes: what they lead to stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.checkpoint.durable import write_text
from megatron_rl.observe.appended_file import AppendedFile, opened_to_append, replace_file


@pytest.mark.parametrize("name", ["view.html", "view.html.unfinished"])
@pytest.mark.parametrize("write", [lambda file: replace_file(file, b"new"), lambda file: write_text(file, "new")])
def test_a_link_in_place_of_a_file_is_not_written_through(tmp_path: Path, name: str, write) -> None:
    """Also one to nothing, which would make a file elsewhere. Would not catch a link in place of a folder."""
    mine = tmp_path / "mine"
    for mine_is_there in (True, False):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to(mine)
        mine.write_text("mine") if mine_is_there else mine.unlink()
        write(tmp_path / "view.html")
        assert (tmp_path / "view.html").read_text() == "new" and not (tmp_path / "view.html").is_symlink()
        assert mine.read_text() == "mine" if mine_is_there else not mine.exists()
    assert not (tmp_path / "view.html.unfinished").is_symlink()


def test_nothing_is_appended_to_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "mine")
    for opened in (AppendedFile, opened_to_append):
        with pytest.raises(OSError, match="symbolic links"):
            opened(tmp_path / "metrics.jsonl")
    assert (tmp_path / "mine").read_text() == "mine"
