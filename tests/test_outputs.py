"""Outputs are asked for before any work, and a write that fails leaves what was there."""

import resource
import signal

import pytest

from arvideo_rl.config import ConfigError
from arvideo_rl.outputs import check_file, check_folder
from arvideo_rl.training.rundir import write_text


def test_folders_that_do_not_exist_yet_are_fine_and_are_not_made(tmp_path):
    check_file(tmp_path / "a" / "b" / "c.csv", suffixes=(".csv",))
    check_folder(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


def test_a_link_to_nowhere_is_no_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="link is not a folder"):
        check_folder(tmp_path / "link" / "x")


def test_a_folder_without_the_right_to_write_is_refused(tmp_path, monkeypatch):
    """By asking the system, as root may write everywhere."""
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=f"out={tmp_path}/a/b.csv: no right to write in {tmp_path}"):
        check_file(tmp_path / "a" / "b.csv")


def test_a_write_the_system_cuts_short_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "x.json"
    write_text(path, "old")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, old[1]))
    try:
        with pytest.raises(OSError, match="x.json"):
            write_text(path, "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
