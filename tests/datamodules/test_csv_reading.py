"""One reader of CSV files: the same fault is told in the same words, whatever the file was to be."""

import re
from pathlib import Path

import pandas as pd
import pytest

import datamodules
from datamodules.csv_reading import CsvFile
from datamodules.image_labels import read_labels
from datamodules.table_files import read_edges, read_table
from datamodules.text_tables import table_rows
from zoo.errors import ZooError

READERS = {
    "data.path": lambda file: list(table_rows(Path(file), "label", "strict")),
    "data.labels": read_labels,
    "data.features": lambda file: read_table(file, "data.features", ["label"]),
    "data.edges": read_edges,
}
GOOD = "path,label\na,x\nb,y\n"
FAULTS = {
    "": "is empty; give a table with a header and rows",
    GOOD.replace(",", ";"): "is separated by ';', as spreadsheets write",
    GOOD.replace(",", "|"): "is separated by '|'; separate it by ','",
    GOOD + "c\n": "line 4 has 1 cells, but the header has 2; mend that line",
    GOOD + "c,x,1\n": "line 4 has 3 cells, but the header has 2; mend that line",
    GOOD + 'c,"x\n': "is no readable CSV (unexpected end of data); write it again",
    GOOD + "c,\0\n": "has NUL bytes, the first at offset 21; drop them",
    GOOD.encode() + b"c,\xff\n": "has bytes that are no UTF-8, the first at offset 21; convert it",
    GOOD.encode("utf-16"): "is UTF-16, not UTF-8; convert it",
    GOOD.encode("utf-16-le"): "looks like UTF-16 without a mark, not UTF-8; convert it",
    b"\x1f\x8b" + GOOD.encode(): "is compressed by gzip; unpack it (gunzip)",
    b"PK\3\4" + GOOD.encode(): "is a zip archive or a document in one",
}


@pytest.mark.parametrize("content", FAULTS)
@pytest.mark.parametrize("argument", READERS)
def test_a_fault_is_told_alike_whatever_the_file_was_to_be(tmp_path, argument, content):
    file = tmp_path / "t.csv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ZooError) as raised:
        READERS[argument](str(file))
    assert str(raised.value).startswith(f"{argument}: {file} {FAULTS[content]}")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("around", ["{}", "\n{}", "{}\n\n", "{}  \n"])
def test_marks_line_ends_and_blank_lines_make_no_difference(tmp_path, mark, ends, around):
    text = around.format('n,label\n1,NA\n2.5,"a, b"\n').replace("\n", ends)
    (tmp_path / "t.csv").write_bytes(mark + text.encode())
    file = CsvFile(tmp_path / "t.csv", "data.features")
    assert file.header == ["n", "label"]
    assert list(file.rows()) == [["1", "NA"], ["2.5", "a, b"]]
    assert file.texts().to_dict("list") == {"n": ["1", "2.5"], "label": ["NA", "a, b"]}
    assert file.numbers(["label"]).to_dict("list") == {"n": [1.0, 2.5], "label": ["NA", "a, b"]}


def test_texts_are_what_pandas_reads_as_such(tmp_path):
    (tmp_path / "t.tsv").write_text('a\tb\n001\t"x\ny"\n\t""\nnull\t "q" \n', encoding="utf-8")
    found = CsvFile(tmp_path / "t.tsv", "data.edges").texts()
    pd.testing.assert_frame_equal(found, pd.read_csv(tmp_path / "t.tsv", sep="\t", dtype=str, keep_default_na=False))


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path):
    for name in ("none.csv", "."):
        with pytest.raises(ZooError, match=r"^data\.labels: .* can't be read \(.*\); check the path"):
            CsvFile(tmp_path / name, "data.labels", delimiter=",")
    with pytest.raises(ZooError, match="is no readable CSV"):
        CsvFile(tmp_path / "a\0b.csv", "data.labels")


def test_a_column_that_is_there_twice_is_refused_by_who_needs_it(tmp_path):
    (tmp_path / "t.csv").write_text("label,x,x,,\na,1,2,3,4\n")
    file = CsvFile(tmp_path / "t.csv", "data.features")
    assert file.place("label", "data.field") == 0
    with pytest.raises(ZooError, match=r"data\.field: got 'x', but .* has more than one such column"):
        file.place("x", "data.field")
    with pytest.raises(ZooError, match=r"data\.features: .* has more than one column 'x'; rename or drop"):
        file.refuse_same_columns()


def test_nothing_else_reads_csv_files():
    for file in Path(datamodules.__file__).parent.rglob("*.py"):
        if file.name != "csv_reading.py":
            assert not re.search(r"\bcsv\.(reader|DictReader)|read_csv\(\s*[a-z]\w*[,)]", file.read_text()), file
