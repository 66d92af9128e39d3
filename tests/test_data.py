"""From files to packed batches: contents, order, targets, exact resume, the token store, bad input."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from cad_jax import data
from cad_jax.data import DataConfig, DocumentBatches, reference_entropies
from cad_jax.packed_batch import PackedBatch
from cad_jax.sharding.packing import cut_documents
from cad_jax.sources import Source
from cad_jax.token_store import open_store
from cad_jax.tokenizer import ByteTokenizer, open_tokenizer

END = 256


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 text files, 0 to about 300 bytes: two empty, two of one byte, one not ASCII."""
    rng = np.random.default_rng(7)
    texts = ["", "a", "", "é\u4f60\U0001f600\r\n", "b"]
    texts += ["".join(rng.choice(list("abc \n"), int(n))) for n in rng.geometric(0.02, 35)]
    for index, text in enumerate(texts):
        path = tmp_path / "texts" / f"{index % 3}" / f"{index:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return tmp_path


def text_config(folder: Path, **changes) -> DataConfig:
    settings = {
        "source": "text",
        "paths": (f"{folder}/texts/**/*.txt",),
        "cache_dir": str(folder / "cache"),
        "window": 5,
        "max_context_loss": 1.0,
    }
    return DataConfig(**(settings | changes))


def file_documents(folder: Path) -> list[list[int]]:
    """Every document's tokens, straight from the files."""
    contents = [path.read_bytes() for path in sorted((folder / "texts").rglob("*.txt"))]
    return [[*content, END] if content else [] for content in contents]


def same(a: PackedBatch, b: PackedBatch) -> bool:
    """Equal in every field; arrays compare as lists, dtypes apart."""
    return str([plain(x) for x in a]) == str([plain(x) for x in b])


def plain(field):
    return [plain(x) for x in field] if isinstance(field, tuple) else np.asarray(field).tolist()


@pytest.mark.parametrize(
    ("tokens", "changes", "nano_batches"),
    [
        (397, {}, 1),
        (61, {}, 1),
        (61, {"long_documents": "truncate"}, 1),
        (64, {"max_piece_tokens": 32, "window": 64}, 1),
        (398, {}, 2),
        (150, {}, 2),
        (64, {"max_piece_tokens": 32, "window": 64}, 2),
    ],
)
def test_batches_hold_the_files_tokens(folder, tokens, changes, nano_batches):
    documents = file_documents(folder)
    batches = DocumentBatches(text_config(folder, **changes), tokens, nano_batches)
    assert batches.store.tokens.dtype == np.uint16
    assert batches.max_document_tokens <= changes.get("max_piece_tokens", tokens)
    seen = []
    for batch in (next(batches) for _ in range(120)):
        ids, positions, targets, weights = [], [], [], []
        lost = 0
        assert np.concatenate(batch.nano_lengths).tolist() == batch.lengths.tolist()
        pieces = iter(zip(batch.document_ids, batch.document_starts, strict=True))
        nano_tokens = tokens // len(batch.nano_lengths)
        for nano_batch, lengths in enumerate(batch.nano_lengths):
            for length in lengths:
                document, start = next(pieces)
                piece = documents[document][start : start + length]
                assert len(piece) == length
                seen.append((int(document), int(start), int(length)))
                ids += piece
                positions += range(length)
                targets += piece[1:] + [0] * min(length, 1)
                weights += [1.0] * (length - 1) + [0.0] * min(length, 1)
                lost += length if start > 0 else 0
            for rows in (ids, positions, targets, weights):
                padding = (nano_batch + 1) * nano_tokens - len(rows)
                assert padding >= 0
                rows += [0] * padding
        assert next(pieces, None) is None
        assert len(ids) == nano_tokens * len(batch.nano_lengths) == batch.ids.size
        assert (batch.ids.tolist(), batch.positions.tolist()) == (ids, positions)
        assert (batch.targets.tolist(), batch.weights.tolist()) == (targets, weights)
        assert batch.padding_tokens == tokens - batch.lengths.sum()
        assert batch.target_tokens == sum(weights)
        assert batch.context_lost_tokens == lost
        assert [batch.ids.dtype, batch.positions.dtype, batch.targets.dtype] == [np.int32] * 3
        assert (batch.weights.dtype, batch.lengths.dtype) == (np.float32, np.int64)
        assert len(batch.nano_lengths) <= nano_batches
        assert max(map(int, batch.lengths)) <= nano_tokens
    # Whole epochs: every token of every piece equally often, nothing twice before all once.
    statistics = batches.statistics()
    counts = Counter(seen)
    assert len(counts) == statistics.pieces and max(counts.values()) > 1
    assert sum(length for _, _, length in counts) == statistics.tokens - statistics.truncated_tokens
    assert sum(n for _, start, n in counts if start) == statistics.context_lost_tokens
    assert max(counts.values()) - min(counts.values()) <= 2, "the window spans an epoch's end"


def test_statistics_are_those_of_the_files(folder):
    lengths = [len(document) for document in file_documents(folder)]
    statistics = DocumentBatches(text_config(folder), 61).statistics()
    assert statistics.documents == 40 == len(lengths)
    assert statistics.zero_length_documents == 2
    assert statistics.tokens == sum(lengths)
    assert (statistics.min_tokens, statistics.max_tokens) == (0, max(lengths))
    assert statistics.median_tokens == np.quantile(lengths, 0.5)
    assert statistics.p90_tokens == pytest.approx(np.quantile(lengths, 0.9))
    assert statistics.target_tokens == sum(n - 1 for n in lengths if n)
    assert statistics.context_lost_tokens == sum(n - 61 for n in lengths if n > 61)


def test_order_is_a_permutation_per_epoch_and_nothing_but_seed_epoch_index():
    order = data.piece_order(37, seed=5)
    first = [order[index] for index in range(37)]
    second = [order[index] for index in range(37, 74)]
    assert sorted(first) == sorted(second) == list(range(37))
    assert first != second != list(range(37))
    again = data.piece_order(37, seed=5)
    assert [again[index] for index in reversed(range(74))] == (first + second)[::-1]
    other = data.piece_order(37, seed=6)
    assert [other[index] for index in range(37)] != first


@pytest.mark.parametrize("nano_batches", [1, 2])
def test_resume_is_exact_at_every_point(folder, nano_batches):
    config = text_config(folder)
    stream = DocumentBatches(config, 150, nano_batches)
    states, batches = [], []
    for _ in range(45):  # more than an epoch
        states.append(json.dumps(stream.state()))
        batches.append(next(stream))
    assert json.loads(states[-1])["epoch"] >= 1
    fresh = DocumentBatches(config, 150, nano_batches)
    for at, state in enumerate(states):
        fresh.restore(json.loads(state))
        assert json.dumps(fresh.state()) == state
        for batch in batches[at : at + 4]:
            assert same(next(fresh), batch)
    assert max(len(state) for state in states) < 500


@pytest.mark.parametrize("nano_batches", [1, 2])
def test_sampling_lengths_does_not_move_the_stream(folder, nano_batches):
    stream = DocumentBatches(text_config(folder), 150, nano_batches)
    moved = [next(stream) for _ in range(7)]
    before = stream.state()
    samples, by_nano_batch = stream.sample_lengths(7), stream.sample_nano_lengths(7)
    assert stream.state() == before
    assert [sample.tolist() for sample in samples] == [b.lengths.tolist() for b in moved]
    assert [plain(sample) for sample in by_nano_batch] == [plain(b.nano_lengths) for b in moved]


def test_microbatches_are_divided_where_they_can_be(folder):
    """Each piece longer than half of one takes an undivided microbatch, and nothing else does."""
    stream = DocumentBatches(text_config(folder), 150, nano_batches=2)
    lengths = stream.pieces.lengths
    assert stream.tokens_per_nano_batch == 75
    assert stream.undivided_microbatches == (lengths > 75).sum() > 0
    assert DocumentBatches(text_config(folder), 150).undivided_microbatches == 0
    drawn = []
    for batch in (next(stream) for _ in range(400)):
        long = int((batch.lengths > 75).sum())
        drawn.append(long)
        assert long == (len(batch.nano_lengths) == 1)
    epochs = stream.state()["next_index"] / len(lengths)
    assert abs(sum(drawn) - epochs * stream.undivided_microbatches) <= 5, (
        "the window holds the rest"
    )


def test_division_is_part_of_the_order(folder):
    """States written before microbatches could be divided belong to undivided ones."""
    undivided, divided = (DocumentBatches(text_config(folder), 150, n) for n in (1, 2))
    states = [stream.state() for stream in (undivided, divided)]
    assert "nano_batches" not in states[0]["identity"]
    with pytest.raises(
        ValueError,
        match="written with nano_batches=1 and this run has 2: resume with the same --overlap",
    ):
        divided.restore(states[0])
    with pytest.raises(
        ValueError,
        match="written with nano_batches=2 and this run has 1: resume with the same --overlap",
    ):
        undivided.restore(states[1])
    undivided.restore(states[0])
    with pytest.raises(ValueError, match="must be even.*got 151: use an even number"):
        DocumentBatches(text_config(folder), 151, nano_batches=2)
    with pytest.raises(ValueError, match="nano_batches must be 1 .* got 3"):
        DocumentBatches(text_config(folder), 150, nano_batches=3)


def test_hosts_agree_however_many_they_are(folder):
    """Four hosts run 7 steps, two others and eight others go on: one order throughout."""
    config = text_config(folder)
    alone = [next(b) for b in [DocumentBatches(config, 150)] for _ in range(20)]
    hosts = [DocumentBatches(config, 150) for _ in range(4)]
    for step in range(7):
        assert all(same(next(host), alone[step]) for host in hosts)
    states = [host.state() for host in hosts]
    assert all(state == states[0] for state in states)
    for count in (2, 8):
        hosts = [DocumentBatches(config, 150) for _ in range(count)]
        for host in hosts:
            host.restore(states[0])
        for step in range(7, 20):
            assert all(same(next(host), alone[step]) for host in hosts)


def test_another_process_draws_the_same(folder):
    script = """
import sys, json
from cad_jax.data import DataConfig, DocumentBatches
stream = DocumentBatches(DataConfig(**json.loads(sys.argv[1])), 150)
print(json.dumps([next(stream).document_ids.tolist() for _ in range(20)] + [stream.state()]))
"""
    settings = {"source": "text", "paths": [f"{folder}/texts/**/*.txt"], "window": 5}
    settings |= {"cache_dir": str(folder / "other cache"), "max_context_loss": 1.0}
    result = subprocess.run(
        [sys.executable, "-c", script, json.dumps(settings)],
        check=True,
        capture_output=True,
        timeout=120,
        env={"PYTHONHASHSEED": "123", "JAX_PLATFORMS": "cpu"},
    )
    stream = DocumentBatches(text_config(folder), 150)
    here = [next(stream).document_ids.tolist() for _ in range(20)]
    assert json.loads(result.stdout) == [*here, stream.state()]


@pytest.mark.parametrize(
    ("changes", "tokens", "name"),
    [
        ({"seed": 1}, 150, "seed=0"),
        ({"window": 6}, 150, "window=5"),
        ({}, 151, "tokens_per_microbatch=150"),
        ({"max_piece_tokens": 50}, 150, "max_piece_tokens=None"),
        ({"seed": 77, "window": 3}, 150, r"seed=\d+ and this run has 77, window=\d+ and .* 3: set"),
        ({"long_documents": "truncate"}, 150, "long_documents='split'"),
        ({"paths": ("{folder}/texts/0/*.txt",)}, 150, "data='"),
    ],
)
def test_state_of_another_order_is_refused(folder, changes, tokens, name):
    state = DocumentBatches(text_config(folder), 150).state()
    if "paths" in changes:
        changes = {"paths": (changes["paths"][0].format(folder=folder),)}
    other = DocumentBatches(text_config(folder, **changes), tokens)
    before = other.state()
    with pytest.raises(ValueError, match=f"written with {name}.* it back, or start a new run"):
        other.restore(state)
    assert other.state() == before


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ({"window": [0, 0]}, r"different indices below next_index=\d+, got \[0, 0\]"),
        ({"window": [10**6]}, r"got \[1000000\]"),
        ({"window": None}, "malformed"),
        ({"next_index": "x"}, "malformed"),
        ({"format": 9}, "must have format 1, this one has 9"),
    ],
)
def test_malformed_state_is_refused(folder, damage, text):
    stream = DocumentBatches(text_config(folder), 150)
    next(stream)
    with pytest.raises(ValueError, match=text):
        stream.restore(stream.state() | damage)


# Sources


def test_jsonl_documents(tmp_path):
    lines = [
        '\ufeff{"text": "one\\nline", "id": 1}',
        '{"id": 2, "text": ""}',
        "",
        '{"text": "\\u00e9 \\ud83d\\ude00"}',
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))  # no newline at the end
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n')
    source = Source("jsonl", (f"{tmp_path}/*.jsonl", f"{tmp_path}/a*"))
    documents = list(source.documents(source.content_digest()))
    assert [d.decode() for d in documents] == ["first", "one\nline", "", "é \U0001f600"]


def test_the_standard_library_is_a_corpus(tmp_path):
    config = DataConfig(max_piece_tokens=2048, cache_dir=str(tmp_path))
    batches = DocumentBatches(config, 4096)
    statistics = batches.statistics()
    assert statistics.documents > 500 and statistics.zero_length_documents > 0
    assert next(batches).padding_tokens < 2048
    entropies = reference_entropies(batches.store)
    assert entropies.bigram_nats is not None
    assert 2.2 < entropies.bigram_nats < 2.6 < 3.0 < entropies.unigram_nats < 3.5
    names = [path.as_posix() for path in Source("stdlib").files()]
    assert any(name.endswith("/json/decoder.py") for name in names)
    assert not any("site-packages" in name for name in names)


def bad_text(folder: Path) -> None:
    (folder / "bad.txt").write_bytes(b"fine\nalso fine\nnot \xff fine")


def bad_link(folder: Path) -> None:
    (folder / "bad.txt").symlink_to(folder / "gone.txt")


def other_format(name: str, magic: bytes):
    def write(folder: Path) -> None:
        (folder / name).write_bytes(magic + bytes([0x15, 0xFF, 0, 10]))

    return write


def only_empty(folder: Path) -> None:
    (folder / "bad.txt").touch()
    (folder / "bad2.txt").touch()


def json_lines(*lines: str):
    def write(folder: Path) -> None:
        (folder / "bad.jsonl").write_text('{"text": "x"}\n\n' + "\n".join(lines))

    return write


@pytest.mark.parametrize(
    ("write", "path", "text"),
    [
        (bad_text, "*.txt", r"UTF-8, .*bad\.txt:3 has byte 0xff at offset 19.*convert the file"),
        (bad_link, "*.txt", r"readable, '.*bad\.txt' is not \(No such file.*correct its perm"),
        (only_empty, "*.txt", "at least one token, 2 documents were read and all are empty: point"),
        (only_empty, "*.md", r"match at least one file, '.*\*\.md' matches none: correct the path"),
        (only_empty, "", r"matches none: .*it is a folder: write '.*/\*\*/\*'"),
        (other_format("bad.txt", b"PAR1"), "*.txt", r"bad\.txt is parquet: .*as JSON lines"),
        (other_format("bad.jsonl", b"\x1f\x8b"), "*.jsonl", r"bad\.jsonl is compressed with gzip"),
        (json_lines('{"text": 3'), "*.jsonl", r"JSON object in UTF-8, .*bad\.jsonl:3 is not"),
        (json_lines('{"a": "b"}'), "*.jsonl", r"'text', .*:3 does not \(it has \['a'\]\): name"),
        (json_lines('{"text": 3}'), "*.jsonl", r"as a string in field 'text', .*:3 does not"),
        (json_lines('["text"]'), "*.jsonl", r":3 does not \(it has list\)"),
        (json_lines('{"text": "\\ud800"}'), "*.jsonl", r":3 is not \(surrogates not allowed\)"),
    ],
)
def test_bad_data_is_named_and_leaves_nothing(tmp_path, write, path, text):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in")
    kind = "jsonl" if path == "*.jsonl" else "text"
    cache = tmp_path / "cache"
    config = DataConfig(source=kind, paths=(f"{tmp_path}/in/{path}",), cache_dir=str(cache))
    with pytest.raises(ValueError, match=text):
        DocumentBatches(config, 100)
    assert not cache.exists() or not list(cache.iterdir())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"source": "text"}, "'text' needs at least one path, got paths="),
        ({"source": "stdlib", "paths": ("x",)}, "'stdlib' takes no paths"),
        ({"source": "csv"}, "one of stdlib, text, jsonl, got 'csv'"),
        ({"window": 0}, "window must hold at least 1 document, got 0"),
        ({"seed": -1}, "seed must be from 0 to"),
        ({"max_context_loss": 2.0}, r"fraction from 0 to 1, got 2\.0: 1% is 0\.01"),
        ({"max_piece_tokens": 1}, "max_piece_tokens must be at least 2"),
        ({"max_piece_tokens": 101}, "exceed a microbatch of 100 tokens, got 101"),
        ({"tokenizer": "/no/such.json"}, r"'/no/such\.json' \(No such file.*correct the path"),
        ({"tokenizer": __file__}, "must be a Hugging Face tokenizer.json, .* is not one"),
        ({"end_of_document": "</s>"}, "got '</s>' with the byte tokenizer.*leave it None"),
        ({"cache_dir": f"{__file__}/cache"}, "folder that can be written, .*name another one"),
    ],
)
def test_bad_settings_are_named(changes, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        DocumentBatches(DataConfig(**({"cache_dir": str(tmp_path)} | changes)), 100)


def test_long_documents_are_refused_with_the_numbers(folder):
    longest = max(len(document) for document in file_documents(folder))
    with pytest.raises(ValueError, match=f"step of 61 tokens .*has {longest}"):
        DocumentBatches(text_config(folder, long_documents="refuse"), 61)
    with pytest.raises(ValueError, match=r"max_context_loss=1\.00%.*\(--training\.tokens-per"):
        DocumentBatches(text_config(folder, max_context_loss=0.01), 61)


# Tokenizers


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[str, tokenizers.Tokenizer]:
    """A byte-level BPE tokenizer as Llama 3's: begin-of-text by post-processor, here also with the
    truncation and padding that must not touch documents."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<begin>", "<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", tokenizer.token_to_id("<begin>"))]
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    plain = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return str(path), plain


def test_tokenizer_file(trained, folder):
    path, plain = trained
    stream = DocumentBatches(text_config(folder, tokenizer=path, end_of_document="<end>"), 800)
    assert stream.vocab_size == plain.get_vocab_size() == 300
    files = sorted((folder / "texts").rglob("*.txt"))
    end = plain.token_to_id("<end>")
    store = stream.store
    for document, file in enumerate(files):
        text = file.read_bytes().decode()
        expected = [*plain.encode(text).ids, end] if text else []
        assert store.tokens[slice(*store.offsets[document : document + 2])].tolist() == expected
    batch = next(stream)
    assert (
        batch.weights.sum() == batch.target_tokens == (batch.lengths[batch.lengths > 0] - 1).sum()
    )


def test_tokenizer_file_takes_text_as_text(trained):
    path, plain = trained
    closed = open_tokenizer(path, "<end>")
    (ids,) = closed.encode([b"a <end> b"])
    assert plain.token_to_id("<end>") not in ids
    assert plain.decode(ids.tolist(), skip_special_tokens=True) == "a <end> b"
    (ids,) = closed.encode([b"caf\xe9"])
    assert plain.decode(ids.tolist(), skip_special_tokens=True) == "caf\ufffd"
    unclosed = open_tokenizer(path)
    assert unclosed.end_of_document_id is None
    assert unclosed.fingerprint != closed.fingerprint
    with pytest.raises(ValueError, match="'<stop>' is not one of them: use the token that ends"):
        open_tokenizer(path, "<stop>")


# The token store


def test_store_is_found_again_by_content_alone(folder):
    tokenizer, cache = ByteTokenizer(), folder / "cache"
    source = Source("text", (f"{folder}/texts/**/*.txt",))
    store = open_store(source, tokenizer, cache)
    (built,) = cache.iterdir()
    stamp = (built / "tokens.bin").stat().st_mtime_ns
    (folder / "texts").rename(folder / "moved")
    moved = Source("text", (f"{folder}/moved/**/*.txt",))
    again = open_store(moved, tokenizer, cache)
    assert again.digest == store.digest and np.array_equal(again.tokens, store.tokens)
    assert (built / "tokens.bin").stat().st_mtime_ns == stamp
    first = moved.files()[0]
    first.write_bytes(first.read_bytes() + b"!")
    assert open_store(moved, tokenizer, cache).digest != store.digest
    assert len(list(cache.iterdir())) == 2


def test_where_files_divide_is_part_of_the_content(tmp_path):
    digests = set()
    for name, parts in {"a": ["ab", "c"], "b": ["a", "bc"], "c": ["abc"], "d": ["abc", ""]}.items():
        (tmp_path / name).mkdir()
        for number, part in enumerate(parts):
            (tmp_path / name / str(number)).write_text(part)
        digests.add(Source("text", (f"{tmp_path}/{name}/*",)).content_digest())
    assert len(digests) == 4


def test_files_that_change_while_they_are_read_are_refused(folder):
    source = Source("text", (f"{folder}/texts/**/*.txt",))
    digest = source.content_digest()
    source.files()[-1].write_text("changed")
    with pytest.raises(ValueError, match="must not change while they are read.*start again"):
        list(source.documents(digest))


def test_damaged_store_is_named(folder):
    source = Source("text", (f"{folder}/texts/**/*.txt",))
    open_store(source, ByteTokenizer(), folder / "cache")
    (built,) = (folder / "cache").iterdir()
    whole = (built / "tokens.bin").read_bytes()
    for damaged in (whole[:-2], b""):
        (built / "tokens.bin").write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged .*delete the folder, it is built again"):
            open_store(source, ByteTokenizer(), folder / "cache")


BUILD = """
import os, signal, sys, time
from cad_jax import token_store
from cad_jax.sources import Source
from cad_jax.tokenizer import ByteTokenizer
paths, cache, moment = sys.argv[1:]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class Dying(Source):
    def documents(self, digest):
        for number, document in enumerate(super().documents(digest)):
            if number == 20 and moment == "documents":
                die()
            if number == 20 and moment == "wait":
                print("ready", flush=True)
                sys.stdin.read()
            yield document

syncs, rename, fsync = [], os.rename, os.fsync
def dying_fsync(descriptor):
    syncs.append(descriptor)
    if moment == f"sync {len(syncs)}":
        die()
    fsync(descriptor)
def dying_rename(*names):
    if moment == "before rename":
        die()
    rename(*names)
    if moment == "after rename":
        die()
os.fsync, os.rename = dying_fsync, dying_rename
token_store._BATCH_BYTES = 1000
store = token_store.open_store(Dying("text", (paths,)), ByteTokenizer(), cache)
print(store.digest, int(store.tokens.astype("int64").sum()))
"""


def start_build(folder: Path, moment: str) -> subprocess.Popen:
    command = [sys.executable, "-c", BUILD, f"{folder}/texts/**/*.txt", f"{folder}/cache", moment]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_killed_build_leaves_no_store(folder):
    documents = file_documents(folder)
    source = Source("text", (f"{folder}/texts/**/*.txt",))
    moments = ["documents", "sync 1", "sync 2", "sync 3", "before rename", "after rename"]
    for moment in moments:
        process = start_build(folder, moment)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == -9, errors
        entries = [entry.name for entry in (folder / "cache").iterdir()]
        complete = [name for name in entries if not name.startswith(".building-")]
        assert bool(complete) == (moment == "after rename"), moment
    left = len(list((folder / "cache").glob(".building-*")))
    assert left == len(moments) - 1
    store = open_store(source, ByteTokenizer(), folder / "cache")
    assert store.tokens.tolist() == sum(documents, [])
    assert np.diff(store.offsets).tolist() == [len(document) for document in documents]


def test_what_killed_builds_left_is_removed_after_a_day(folder, monkeypatch):
    abandoned, running = (folder / "cache" / f".building-{name}" for name in "ab")
    for place in (abandoned, running):
        place.mkdir(parents=True)
        (place / "tokens.bin").write_text("x")
    source = Source("text", (f"{folder}/texts/0/*.txt",))
    open_store(source, ByteTokenizer(), folder / "cache")
    assert abandoned.exists() and running.exists()
    now = (running / "tokens.bin").stat().st_mtime
    monkeypatch.setattr("cad_jax.token_store.time.time", lambda: now + 25 * 3600)
    future = (now + 25 * 3600 - 60,) * 2
    os.utime(running / "tokens.bin", future)
    open_store(Source("text", (f"{folder}/texts/1/*.txt",)), ByteTokenizer(), folder / "cache")
    assert not abandoned.exists() and running.exists()


def test_processes_that_build_at_once_agree(folder):
    processes = [start_build(folder, "wait") for _ in range(3)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "all are midway before one goes on"
    results = [process.communicate("", timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, results
    assert len({output for output, _ in results}) == 1
    (built,) = (folder / "cache").iterdir()
    tokens = np.fromfile(built / "tokens.bin", np.uint16)
    assert tokens.tolist() == sum(file_documents(folder), [])


# Reference entropies


@pytest.mark.parametrize("chunk", [1, 7, 1 << 22])
def test_entropies_by_counting(folder, monkeypatch, chunk):
    monkeypatch.setattr(data, "_ENTROPY_CHUNK_TOKENS", chunk)
    store = DocumentBatches(text_config(folder), 61).store
    pairs = Counter(p for d in file_documents(folder) for p in zip(d, d[1:], strict=False))
    total = pairs.total()
    before, after = Counter(), Counter()
    for (a, b), count in pairs.items():
        before[a] += count
        after[b] += count
    unigram = -sum(n / total * math.log(n / total) for n in after.values())
    bigram = -sum(n / total * math.log(n / before[a]) for (a, _), n in pairs.items())
    found = reference_entropies(store)
    assert found.unigram_nats == pytest.approx(unigram, rel=1e-12)
    assert found.bigram_nats == pytest.approx(bigram, rel=1e-12)
    monkeypatch.setattr(data, "_MAX_BIGRAM_VOCABULARY", 100)
    assert reference_entropies(store) == data.ReferenceEntropies(found.unigram_nats, None)


def test_statistics_of_lengths_alone():
    lengths = np.array([0, 4, 30, 10, 1], np.int64)
    found = data.document_statistics(lengths, cut_documents(lengths, 10, max_context_loss=1.0))
    assert (found.documents, found.pieces, found.tokens, found.max_tokens) == (5, 7, 45, 30)
    assert (found.target_tokens, found.context_lost_tokens) == (41, 20)
