from __future__ import annotations

import json
from pathlib import Path

import pytest

from elbowroom.training.data.captions import Captions, read_captions
from elbowroom.training.data.errors import DataError
from elbowroom.training.data.walk import walk


def folder(root: Path, files: dict[str, str | bytes]) -> Path:
    """Write files; images may be empty here, because captions are read by name."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def read(root: Path, files: dict[str, str | bytes]) -> Captions:
    return read_captions(folder(root, files), walk(root))


def table(*entries: dict[str, str | None]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


@pytest.mark.parametrize(
    ("content", "caption"),
    [
        (b"\xef\xbb\xbffirst line\r\nsecond line\r\n", "first line second line"),
        ("one\n\n  two  \n", "one two"),
        ("old\rmac", "old mac"),
        ("  spaces around ", "spaces around"),
        ("an “Ünïcode” 猫", "an “Ünïcode” 猫"),
        ("word " * 4000, ("word " * 4000).strip()),
    ],
)
def test_captions_become_one_clean_line(tmp_path: Path, content: str | bytes, caption: str):
    """E05: byte-order mark, CRLF, several lines, 20 kB."""
    captions = read(tmp_path, {"a.png": b"", "a.txt": content})
    assert captions == Captions({"a.png": caption}, {}, ())


@pytest.mark.parametrize("content", [b"", b"   ", b"\r\n\r\n", b"\xef\xbb\xbf"])
def test_empty_captions_count_as_missing(tmp_path: Path, content: bytes):
    """E05: empty, and only spaces."""
    assert read(tmp_path, {"a.png": b"", "a.txt": content}).texts == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("café".encode("latin-1"), "is not UTF-8 (byte 0xe9 at position 3)"),
        ("text".encode("utf-16"), "is not UTF-8 (byte 0xff at position 0)"),
        ("text".encode("utf-16-le"), "is not UTF-8 (it contains zero bytes)"),
    ],
)
def test_other_encodings_are_named(tmp_path: Path, content: bytes, reason: str):
    """E05: a decoding error names the file."""
    captions = read(tmp_path, {"sub/a.png": b"", "sub/a.txt": content})
    assert captions.texts == {}
    assert captions.unreadable == {"sub/a.png": f"its caption sub/a.txt {reason}; save it as UTF-8"}


def test_file_names_of_captions(tmp_path: Path):
    """E05: A.TXT, a.png.txt, a caption without an image."""
    captions = read(
        tmp_path,
        {
            "A.png": b"",
            "A.TXT": "capital extension",
            "b.png": b"",
            "b.png.txt": "full name",
            "c.d.jpg": b"",
            "c.d.txt": "dots",
            "c.txt": "of nothing",
        },
    )
    assert captions.texts == {"A.png": "capital extension", "b.png": "full name", "c.d.jpg": "dots"}
    assert captions.warnings == ("1 × captions without an image: c.txt",)


def test_two_images_share_the_caption_of_their_stem(tmp_path: Path):
    """E06: a.png and a.jpg beside one a.txt: both get it, and it is reported."""
    captions = read(tmp_path, {"a.png": b"", "a.jpg": b"", "a.txt": "shared"})
    assert captions.texts == {"a.jpg": "shared", "a.png": "shared"}
    assert captions.warnings == ("1 × one caption file for several images, all of them get it: a.txt (a.jpg, a.png)",)


def test_the_most_exact_caption_wins_and_a_conflict_is_reported(tmp_path: Path):
    """E06: ambiguous captions are reported."""
    files: dict[str, str | bytes] = {
        "a.png": b"",
        "metadata.jsonl": table({"file_name": "a.png", "text": "from table"}),
    }
    assert read(tmp_path, files).texts == {"a.png": "from table"}
    captions = read(tmp_path, {"a.txt": "from stem"})
    assert captions.texts == {"a.png": "from stem"}
    assert "a.png (from a.txt, not from metadata.jsonl line 1)" in captions.warnings[0]
    captions = read(tmp_path, {"a.png.txt": "from name"})
    assert captions.texts == {"a.png": "from name"}
    assert "a.png (from a.png.txt, not from a.txt, metadata.jsonl line 1)" in captions.warnings[0]


def test_equal_captions_are_no_conflict_and_empty_ones_give_way(tmp_path: Path):
    entry = table({"file_name": "a.png", "text": "same"})
    assert read(tmp_path, {"a.png": b"", "a.txt": "same\n", "metadata.jsonl": entry}).warnings == ()
    captions = read(tmp_path, {"a.txt": "\n"})
    assert captions == Captions({"a.png": "same"}, {}, ())


def test_tables_reach_folders_below_and_the_nearest_wins(tmp_path: Path):
    captions = read(
        tmp_path,
        {
            "sub/a.png": b"",
            "sub/b.png": b"",
            "metadata.jsonl": table(
                {"file_name": "sub/a.png", "text": "far"}, {"file_name": "./sub/b.png", "text": "b\nof two lines"}
            ),
            "sub/metadata.jsonl": table({"file_name": "a.png", "text": "near"}),
        },
    )
    assert captions.texts == {"sub/a.png": "near", "sub/b.png": "b of two lines"}
    assert "sub/a.png (from sub/metadata.jsonl line 1, not from metadata.jsonl line 1)" in captions.warnings[0]


def test_table_may_have_blank_lines_other_keys_and_no_caption(tmp_path: Path):
    lines = '\ufeff{"file_name": "a.png", "text": "one", "score": 3}\r\n\r\n{"file_name": "b.png", "text": null}\r\n'
    captions = read(tmp_path, {"a.png": b"", "b.png": b"", "metadata.jsonl": lines})
    assert captions == Captions({"a.png": "one"}, {}, ())


def test_table_entries_without_an_image_are_reported(tmp_path: Path):
    rows = table({"file_name": "gone.png", "text": "x"}, {"file_name": "../a.png", "text": "outside"})
    assert read(tmp_path, {"a.png": b"", "metadata.jsonl": rows}) == Captions(
        {}, {}, ("2 × captions without an image: metadata.jsonl line 1, metadata.jsonl line 2",)
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"file_name": "a.png", "text": "x"', "is not JSON"),
        (b"[1, 2]", "is not an object"),
        (b'{"text": "x"}', "has no 'file_name', only 'text'"),
        (b'{"file_name": "a.png", "caption": "x"}', "has no 'text', only 'file_name', 'caption'"),
        (b'{"file_name": "a.png", "text": 3}', "has 3 as 'text'"),
        (b'{"file_name": null, "text": "x"}', "has None as 'file_name'"),
        (b'{"file_name": "a.png", "text": "caf\xe9"}', "is not UTF-8"),
    ],
)
def test_a_malformed_line_is_an_error_with_its_number(tmp_path: Path, line: bytes, problem: str):
    good = table({"file_name": "a.png", "text": "x"}).encode()
    with pytest.raises(DataError, match=r"metadata\.jsonl, line 3: ") as caught:
        read(tmp_path, {"a.png": b"", "metadata.jsonl": good + b"\n" + line + b"\n" + good})
    assert problem in str(caught.value)


def test_long_lists_are_shortened(tmp_path: Path):
    (warning,) = read(tmp_path, {f"{number}.txt": "x" for number in range(8)}).warnings
    assert warning == "8 × captions without an image: 0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 3 more"
