"""Files and folders appear whole or not at all."""

import os

import pytest

from elbowroom.training.files import folder_written_aside, remove_unfinished, write_text, written_aside


def test_a_file_appears_when_it_is_finished(tmp_path):
    path = tmp_path / "inside" / "file.txt"
    with written_aside(path) as aside:
        aside.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new" and [path] == list(path.parent.iterdir())


def test_a_failing_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_text(path, "old")
    with pytest.raises(KeyError), written_aside(path) as aside:
        aside.write_text("half")
        raise KeyError
    assert path.read_text() == "old" and [path] == list(tmp_path.iterdir())


def test_a_folder_appears_when_it_is_finished(tmp_path):
    path = tmp_path / "folder"
    with folder_written_aside(path) as aside:
        (aside / "a").mkdir()
        (aside / "a" / "file").write_text("1")
        assert not path.exists()
    assert (path / "a" / "file").read_text() == "1"
    with pytest.raises(FileExistsError, match="is not overwritten"), folder_written_aside(path):
        pass
    with folder_written_aside(path, replace=True) as aside:
        (aside / "file").write_text("2")
        assert (path / "a" / "file").exists()
    assert [entry.name for entry in path.iterdir()] == ["file"] and [path] == list(tmp_path.iterdir())


def test_a_failing_folder_leaves_the_old_one(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(KeyError), folder_written_aside(path, replace=True) as aside:
        (aside / "file").write_text("half")
        raise KeyError
    assert list(tmp_path.iterdir()) == [path] and not list(path.iterdir())


def test_what_a_killed_process_left_is_removed(tmp_path):
    write_text(tmp_path / "good.txt", "good")
    (tmp_path / ".aside-xyz.txt").write_text("half")
    (tmp_path / ".aside-folder").mkdir()
    assert len(remove_unfinished(tmp_path)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["good.txt"]
    assert remove_unfinished(tmp_path / "nowhere") == []


@pytest.mark.parametrize(("umask", "file_mode", "folder_mode"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_new_files_have_the_permissions_that_the_user_gives_to_new_files(tmp_path, umask, file_mode, folder_mode):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "file.txt", "private?")
        with folder_written_aside(tmp_path / "folder"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "file.txt").stat().st_mode & 0o777 == file_mode
    assert (tmp_path / "folder").stat().st_mode & 0o777 == folder_mode
