"""Which of a user's files are text and what their texts are: each kind of surprise, read right or refused in a line."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import datamodules.text_files as text_files
import datamodules.text_reading as text_reading
from datamodules import TextDataModule
from datamodules.sources.base import CORPORA
from datamodules.text import read_prompts
from datamodules.text_files import Corpus, TextFile, find_files
from datamodules.text_reading import file_pieces
from datamodules.text_tables import _json_objects, table_rows
from zoo.errors import ZooError

TEXT = "the cat sat on a mat\n" * 20


@pytest.fixture
def told(monkeypatch):
    """What the user is told."""
    lines: list[str] = []
    monkeypatch.setattr(text_files, "rank_zero_info", lines.append)
    return lines


def put(path, content=TEXT):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def names(path, field=None):
    return [file.name for file in find_files(str(path), field)]


def rows(path, field="text", errors="strict"):
    return list(table_rows(Path(path), field, errors))


def texts(path, field=None, errors="strict", shares=(0.05, 0.05)):
    """Text of the documents, split by split."""
    corpus = Corpus(find_files(str(path), field), field, errors, *shares, seed=0)
    found: list[list[str]] = [[], [], []]
    for split, pieces in corpus.iterate():
        found[split].append("".join(pieces))
    return found


# ---------------------------------------------------------------------- which files


HIDDEN = [".env.txt", ".git/x.txt", ".ipynb_checkpoints/a-checkpoint.txt", "__MACOSX/._a.txt", "__MACOSX/b.txt"]


@pytest.mark.parametrize("pattern", ["", "*", "**", "**/*.txt", "**/*", "*.txt"])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_hidden_files_are_left_out_of_folders_and_wildcards(tmp_path, pattern, hidden):
    put(tmp_path / "a.txt")
    put(tmp_path / hidden)
    assert names(tmp_path / pattern) == ["a.txt"]


@pytest.mark.parametrize("named", [".env.txt", ".git", ".git/*.txt", ".*.txt", "__MACOSX/b.txt", "__MACOSX"])
def test_hidden_files_that_are_named_are_meant(tmp_path, named):
    for hidden in HIDDEN:
        put(tmp_path / hidden)
    assert len(names(tmp_path / named)) == 1


def test_links_are_followed_and_no_file_comes_twice(tmp_path, told):
    put(tmp_path / "real" / "b.txt")
    folder = put(tmp_path / "folder" / "s.txt").parent
    (folder / "more").symlink_to("../real")
    (folder / "copy.txt").symlink_to("s.txt")
    (folder / "up").symlink_to("..")
    (folder / "more" / "again").symlink_to("../real")
    (folder / "gone.txt").symlink_to("nowhere")
    assert names(folder) == ["more/b.txt", "s.txt"]
    assert told == [
        f"data.path: left out of {folder}: 1 no files, or links to none, 1 other links to the same files",
    ]
    assert names(folder / "**" / "*.txt") == ["more/b.txt", "s.txt"]


def test_a_folder_says_what_it_leaves_out_and_a_wildcard_too(tmp_path, told):
    for name in ("a.txt", ".env", "b.log", "c.LOG", "d.html", "e.csv", "f.txt.gz"):
        put(tmp_path / name)
    put(tmp_path / "g.txt", "")
    assert names(tmp_path) == ["a.txt"]
    assert names(tmp_path / "*") == ["a.txt"]
    for line in told:
        assert "5 of other kinds ('.log', " in line
        assert all(f"'{kind}'" in line for kind in (".html", ".csv", ".gz"))
        assert "; give data.field for tables; unpack what is compressed)" in line
        assert line.endswith(", 1 empty")
    assert ["1 hidden ('.env')" in line for line in told] == [True, False]


@pytest.mark.parametrize("name", ["a.log", "README", "a.html", "b.tex"])
@pytest.mark.parametrize("by", ["file", "glob"])
def test_a_file_of_a_kind_that_is_not_known_is_plain_text_if_it_is_named(tmp_path, told, name, by):
    put(tmp_path / name)
    path = tmp_path / name
    assert names(path if by == "file" else path.with_name("*" + (path.suffix or "ME"))) == [name]
    kind = path.suffix or name
    line = f"data.path: 1 files are read as plain text, with any markup, since no other way is known for {kind!r}"
    assert told == [line]


def test_names_that_look_alike_are_files_of_their_own(tmp_path):
    for name in ("é.txt", "e\u0301.txt", "a.txt", "A.TXT", "a\u200b.txt", "a b.txt", "[a].txt"):
        put(tmp_path / name, name * 30)
    assert len(names(tmp_path)) == len(names(tmp_path / "*.txt")) + 1 == 7
    assert sorted("".join(text for split in texts(tmp_path) for text in split)) == sorted(
        "".join(name * 30 for name in os.listdir(tmp_path))
    )
    assert names(tmp_path / "[a].txt") == ["[a].txt"]


def test_a_name_that_is_no_utf8_is_refused_in_one_line(tmp_path):
    with open(os.fsencode(tmp_path) + b"/caf\xe9.txt", "w") as file:
        file.write(TEXT)
    with pytest.raises(ZooError, match=r"data\.path: 1 names in .* are no UTF-8: 'caf\\udce9\.txt'; rename them"):
        find_files(str(tmp_path), None)
    with pytest.raises(ZooError, match=r"data\.path: the name .*caf\\udce9\.txt' is no UTF-8; rename it"):
        find_files(str(tmp_path / os.fsdecode(b"caf\xe9.txt")), None)


def test_empty_files_are_no_documents(tmp_path, told):
    for i in range(30):
        put(tmp_path / f"{i:02}" / "__init__.py", "" if i else "\ufeff")
    for i in range(4):
        put(tmp_path / f"{i:02}" / "core.py")
    found = texts(tmp_path)
    assert [len(split) for split in found] == [4, 4, 4]
    assert told == [f"data.path: left out of {tmp_path}: 30 empty"]


def test_the_standard_library_keeps_its_empty_files_so_that_its_split_stays():
    files = CORPORA.get("stdlib")().read().documents.values()
    assert any(path.stat().st_size == 0 for path in files)


@pytest.mark.parametrize(
    ("files", "path", "field", "message"),
    [
        ({"a.txt": ""}, "a.txt", None, r"a\.txt is empty"),
        ({"a.txt": "", "b.txt": "\ufeff"}, "", None, r"is empty; give files with text"),
        ({"a.png": "x", ".b.txt": "x"}, "", None, r"has no \.txt, \.md, \.py file \(found: \.b\.txt, \.png\)"),
        ({"a.jsonl": "x"}, "", None, r"put text there; give data\.field for tables"),
        ({"a.txt.gz": "x"}, "*", None, r"found: \.gz\); put text there; unpack what is compressed"),
        ({"a.txt": TEXT}, "b*", None, r"b\* is no file, no folder and matches nothing"),
        ({"a.txt": TEXT}, "~nobody-here/a.txt", None, r"is no file, no folder"),
        ({"a.txt": TEXT}, "", "text", r"data\.field: got 'text', but .* has no table"),
        *(
            ({f"a{suffix}": "x"}, f"a{suffix}", None, r"data\.field: got none, but .* is a table; name the ")
            for suffix in (".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".JSON")
        ),
    ],
)
def test_a_path_without_text_is_refused_with_a_way_on(tmp_path, files, path, field, message):
    for name, content in files.items():
        put(tmp_path / name, content)
    with pytest.raises(ZooError, match=message) as raised:
        find_files(str(tmp_path / path) if not path.startswith("~") else path, field)
    assert "\n" not in str(raised.value)


def test_a_field_without_a_path_is_refused():
    with pytest.raises(ZooError, match=r"data\.field: got 'text', but the embedded text is no table"):
        TextDataModule(field="text", tokenizer="byte").prepare_data()


@pytest.mark.parametrize("reader", ["files_below", "read_head"])
def test_what_may_not_be_read_is_named(tmp_path, monkeypatch, reader):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "sub/closed")

    put(tmp_path / "a.txt")
    monkeypatch.setattr(text_files, reader, refuse)
    with pytest.raises(ZooError, match=r"data\.path: sub/closed can't be read \(Permission denied\); check"):
        find_files(str(tmp_path), None)


# ---------------------------------------------------------------------- what is no text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TEXT.encode("utf-16"), r"is UTF-16, not UTF-8; convert it \(iconv -f utf-16 -t utf-8\)"),
        (b"\xfe\xff" + TEXT.encode("utf-16-be"), r"is UTF-16"),
        (TEXT.encode("utf-32"), r"is UTF-32"),
        (TEXT.encode("utf-16-le"), r"looks like UTF-16 without a mark.*utf-16le"),
        (TEXT.encode("utf-16-be"), r"looks like UTF-16 without a mark.*utf-16be"),
        ("的一是\n在不了\n".encode("utf-16-le"), r"looks like UTF-16 without a mark.*utf-16le"),
        ("的一是 在不了".encode("utf-16-be"), r"looks like UTF-16 without a mark.*utf-16be"),
        (("😀 " * 4000).encode("utf-16-le"), r"looks like UTF-16 without a mark.*utf-16le"),
        (b"\0\5\26\7Mac OS X        " * 99, "holds NUL bytes"),
        (b"\x1f\x8b\x08\0\0", r"compressed by gzip; unpack it \(gunzip\)"),
        (b"BZh91AY&SY\0", "bunzip2"),
        (b"\xfd7zXZ\0\0", "unxz"),
        (b"\x28\xb5\x2f\xfd\0", "unzstd"),
        (b"PK\3\4\0", "unzip"),
        (b"%PDF-1.7\n", "pdftotext"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.bin", "a.jsonl"])
@pytest.mark.parametrize("errors", ["strict", "ignore"])
def test_what_is_no_text_by_its_content_is_refused_whatever_its_name(tmp_path, content, message, name, errors):
    path = put(tmp_path / name, content)
    with pytest.raises(ZooError, match=rf"data\.path: .*{name} .*{message}") as raised:
        texts(path, "text" if name.endswith("jsonl") else None, errors)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv", "a.jsonl", "a.ndjson", "a.json", "p.txt"])
def test_a_byte_order_mark_is_no_text(tmp_path, name):
    line = json.dumps({"text": "héllo"}, ensure_ascii=False)
    table = {".txt": "héllo\n", ".csv": '"text",n\nhéllo,1\n', ".tsv": "text\tn\nhéllo\t1\n"}.get(name[1:], line + "\n")
    path = put(tmp_path / name, table.encode("utf-8-sig"))
    if name == "p.txt":
        assert read_prompts(path) == ["héllo"]
    elif name == "a.txt":
        assert "".join(file_pieces(path, 0, path.stat().st_size, "strict")) == "héllo\n"
    else:
        assert rows(path) == ["héllo"]


def test_a_byte_order_mark_is_left_out_of_each_of_many_files(tmp_path):
    for i in range(30):
        put(tmp_path / f"{i}.txt", f"{i}\n".encode("utf-8-sig"))
    assert sorted(text for split in texts(tmp_path) for text in split) == sorted(f"{i}\n" for i in range(30))


BAD = "ok caf\xe9 au lait\n".encode("latin-1")
TABLES = {
    "a.txt": (b"%s" % BAD * 3, 6),
    "a.csv": (b"text\n" + BAD, 11),
    "a.tsv": (b"n\ttext\n1\t" + BAD, 15),
    "a.jsonl": (b'{"text": "' + BAD[:-1] + b'"}\n', 16),
    "a.json": (b'[{"text": "' + BAD[:-1] + b'"}]', 17),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("byte", [b"\xe9", b"\0"])
def test_encoding_errors_holds_for_every_kind_of_file(tmp_path, name, byte):
    content, offset = TABLES[name]
    far = b"x" * 20_000 if name == "a.txt" else b""  # past what a file is known by
    path = put(tmp_path / name, far + content.replace(b"\xe9", byte))
    offset += len(far)

    def read(errors):
        if name == "a.txt":
            return "".join(file_pieces(path, 0, path.stat().st_size, errors)).removeprefix(far.decode()).split("\n")[0]
        return rows(path, errors=errors)[0].rstrip("\n")

    assert read("replace") == "ok caf\ufffd au lait"
    assert read("ignore") == "ok caf au lait"
    what = "NUL bytes" if byte == b"\0" else "bytes that are no UTF-8"
    with pytest.raises(ZooError, match=f"{name} has {what}, the first at offset {offset}; .*data.encoding_errors"):
        read("strict")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "p.jsonl"])
def test_half_of_a_surrogate_pair_is_refused_replaced_or_ignored(tmp_path, name):
    field = "prompt" if name == "p.jsonl" else "text"
    path = put(tmp_path / name, '{"text": "fine \\ud83d\\ude00"}\n{"text": "half \\ud83d"}\n'.replace("text", field))

    def read(errors):
        return read_prompts(path, errors) if name == "p.jsonl" else rows(path, errors=errors)

    assert read("replace") == ["fine 😀", "half \ufffd"]
    assert read("ignore") == ["fine 😀", "half "]
    with pytest.raises(ZooError, match=rf"{name} line 2 has half of a surrogate pair \('\\ud83d'\)"):
        read("strict")


@pytest.mark.parametrize("name", ["p.txt", "p.ndjson"])
def test_prompts_are_refused_as_other_text_is(tmp_path, name):
    with pytest.raises(ZooError, match=r"data\.prompts: .* is UTF-16, not UTF-8"):
        read_prompts(put(tmp_path / name, TEXT.encode("utf-16")))


# ---------------------------------------------------------------------- tables


OBJECTS = [{"id": i, "text": f'{i}, "quoted"\nand\ttabbed 😀 \\ud83d'} for i in range(5)]
CELLS = [(str(row["id"]), row["text"]) for row in OBJECTS]


def separated(delimiter):
    quoted = (f'{i}{delimiter}"{text.replace(chr(34), chr(34) * 2)}"\r\n' for i, text in CELLS)
    return f"id{delimiter}text\r\n" + "".join(quoted)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", separated(",")),
        ("a.tsv", separated("\t")),
        ("a.jsonl", "".join(json.dumps(row) + "\n" for row in OBJECTS)),
        ("a.ndjson", "\n\n".join(json.dumps(row) for row in OBJECTS)),
        ("a.JSON", json.dumps(OBJECTS)),
        ("a.json", json.dumps(OBJECTS, indent=2, ensure_ascii=False) + "\n"),
        ("a.json", "".join(json.dumps(row) + "\n" for row in OBJECTS)),
        ("a.json", " \n" + "\r\n".join(json.dumps(row, indent=1) for row in OBJECTS)),
    ],
)
@pytest.mark.parametrize("piece", [1, 2, 7, 1 << 20])
def test_a_table_gives_the_texts_of_its_rows_wherever_it_is_cut(tmp_path, monkeypatch, name, content, piece):
    monkeypatch.setattr(text_reading, "PIECE", piece)
    path = put(tmp_path / name, content)
    assert rows(path) == [row["text"] for row in OBJECTS]


@given(
    values=st.lists(st.dictionaries(st.sampled_from(["text", "a"]), st.text(st.characters(codec="utf-8")))),
    piece=st.integers(1, 9),
)
@settings(deadline=None, max_examples=100)
def test_json_is_read_as_pythons_own_reader_does(values, piece):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_reading, "PIECE", piece)
        for content in (json.dumps(values, ensure_ascii=False, indent=1), "\n".join(map(json.dumps, values))):
            path = put(Path(folder, "a.json"), content.replace("\0", ""))
            assert [value for _, value in _json_objects(path, "strict")] == values


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", '{"data": [{"text": "x"}]}', r"line 1 has data; name a field that every object has"),
        ("a.json", '["x", "y"]', r"line 1 has str"),
        ("a.json", '[\n{"text": "x"},\n{"text": 3}]', r"line 3: 'text' is a int; must be text"),
        ("a.json", '[{"text": "x"}\n{"text": "y"}]', r"line 2 is no JSON \(a comma or the list's end is missing\)"),
        ("a.json", '[{"text": "x"},\n{"text": "y', r"line 2 is no JSON \(Unterminated string"),
        ("a.json", '[{"text": "x"},]', r"line 1 is no JSON"),
        ("a.json", '[{"text": "x"}', r"line 1 is no JSON"),
        ("a.json", '[{"text": "x"}]\n\n{}', r"line 3 is no JSON \(something follows the list's end\)"),
        ("a.json", "nonsense" * 100, r"line 1 is no JSON"),
        ("a.json", "[" * 100_000, r"line 1 is no JSON"),
        ("a.json", " ", r"data\.field: 'text' has no text in any of 0 rows"),
        ("a.jsonl", '[\n{"text": "x"}\n]', r"line 1 is no JSON \(Expecting value\); .*call the file \.json"),
        ("a.csv", "id;text\n1;x\n", r"data\.path: .*a\.csv is separated by ';'.*save it with ','"),
        ("a.csv", '"id";"text"\n"1";"x, y"\n', r"is separated by ';'"),
        ("a.csv", "id\ttext\n1\tx\n", r"is separated by '\\t'; rename it to \.tsv"),
        ("a.tsv", "id,text\n1,x\n", r"is separated by ','; rename it to \.csv"),
        ("a.csv", "id;body\n1;x\n", r"is separated by ';'"),
        ("a.csv", "text,text\nx,y\n", r"has more than one such column"),
        (
            "a.csv",
            "id,text\n1,x,y\n",
            r"line 2 has 3 cells, but the header has 2; .*put texts with ',' in",
        ),
        (
            "a.tsv",
            "id\ttext\n1\tx\ty\n",
            r"line 2 has 3 cells, but the header has 2; .*texts with '\\t' in",
        ),
        ("a.csv", "id,text\n1,\n", r"data\.field: 'text' has no text in any of 1 rows"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_in_one_line_that_says_where(tmp_path, name, content, message):
    path = put(tmp_path / name, content)
    with pytest.raises(ZooError, match=message) as raised:
        texts(path, "text")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_rows_without_text_are_left_out_and_counted(tmp_path, told, name):
    values = ["x" * 100, "", None, "y" * 100]
    lines = [f"{i},{value or ''}" if name == "a.csv" else json.dumps({"text": value}) for i, value in enumerate(values)]
    path = put(tmp_path / name, "\n".join((["id,text"] if name == "a.csv" else []) + lines))
    found = texts(path, "text")
    assert "".join("".join(split) for split in found).count("x") == 100
    assert told == ["data.field: 2 rows without text in 'text' are left out"]


def test_a_folder_of_tables_and_texts_gives_both(tmp_path):
    put(tmp_path / "a.txt")
    put(tmp_path / "b.tsv", "id\ttext\n" + "1\tx\n" * 30)
    put(tmp_path / "c.json", json.dumps([{"text": "y"}] * 30))
    found = sorted(text for split in texts(tmp_path, "text") for text in split)
    assert found == sorted([TEXT, *["x"] * 30, *["y"] * 30])


# ---------------------------------------------------------------------- cuts


@pytest.mark.parametrize("n", [1, 2, 9, 19])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_each_of_few_documents_is_cut_at_line_ends_in_order(tmp_path, n, kind):
    documents = [f"document {i}\n" + f"ligne {i} é\n" * 100 for i in range(n)]
    if kind == "txt":
        for i, document in enumerate(documents):
            put(tmp_path / f"{i:02}.txt", document)
    else:
        put(tmp_path / "a.jsonl", "".join(json.dumps({"text": document}) + "\n" for document in documents))
    found = texts(tmp_path, None if kind == "txt" else "text", shares=(0.1, 0.2))
    assert ["".join(parts) for parts in zip(*found, strict=True)] == documents
    assert all(part.endswith("\n") for split in found for part in split)
    for split, share in zip(found, (0.7, 0.1, 0.2), strict=True):
        assert sum(map(len, split)) == pytest.approx(share * sum(map(len, documents)), rel=0.15)


@given(
    text=st.text(st.sampled_from("ab \n\rä€😀的"), min_size=1, max_size=80),
    mark=st.booleans(),
    piece=st.integers(1, 9),
)
@settings(deadline=None, max_examples=300)
def test_a_document_is_cut_between_characters_and_nothing_comes_twice(text, mark, piece):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_reading, "PIECE", piece)
        path = put(Path(folder, "a.txt"), text.encode("utf-8-sig" if mark else "utf-8"))
        corpus = Corpus([TextFile("a.txt", path)], None, "strict", 0.1, 0.3, 0)
        parts = [(split, "".join(pieces)) for split, pieces in corpus.iterate()]
    assert [split for split, _ in parts] == sorted({split for split, _ in parts})
    assert "".join(part for _, part in parts) == text


@given(data=st.binary(max_size=60), piece=st.integers(1, 9), errors=st.sampled_from(["replace", "ignore"]))
@settings(deadline=None, max_examples=200)
def test_bytes_that_are_no_text_are_mended_the_same_wherever_pieces_end(data, piece, errors):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_reading, "PIECE", piece)
        path = put(Path(folder, "a.txt"), data)
        found = "".join(file_pieces(path, 0, len(data), errors))
        whole = data.removeprefix(b"\xef\xbb\xbf").decode(errors=errors)
        assert found == whole.replace("\0", "\ufffd" if errors == "replace" else "")


@pytest.mark.parametrize("text", ["的一是在不了有和人这", "abcdefghij"])
def test_one_long_line_is_cut_by_share_and_nothing_is_in_two_splits(tmp_path, monkeypatch, text):
    monkeypatch.setattr(text_reading, "PIECE", 1000)
    whole = text * 1000  # ten pieces of letters, thirty of Chinese
    path = put(tmp_path / "a.txt", whole)
    found = ["".join(split) for split in texts(path, shares=(0.05, 0.05))]
    assert "".join(found) == whole
    assert [len(split) for split in found] == pytest.approx([9000, 500, 500], abs=1)
