"""What text is read, how it is split, and which batch a step gets."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from timelyfreeze.cli.data import is_held_out, read_corpus, training_batch, validation_batch

NUM_FILES = 60


def write_tree(root: Path, num_files: int = NUM_FILES) -> None:
    for index in range(num_files):
        folder = root / f"part{index % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.txt").write_text(f"file {index} says something of its own, {index * index}\n")


def test_split_is_by_file_and_depends_on_the_relative_path_alone(tmp_path: Path) -> None:
    write_tree(tmp_path / "here")
    write_tree(tmp_path / "elsewhere" / "deeper")
    here = read_corpus([tmp_path / "here"], sequence_length=8)
    there = read_corpus([tmp_path / "elsewhere" / "deeper"], sequence_length=8)
    assert here.fingerprint == there.fingerprint
    held_out = bytes(here.validation).split(b"\0")[:-1]
    assert 0 < len(held_out) < NUM_FILES // 2
    assert here.split == "file"
    for index in range(NUM_FILES):
        text = f"file {index} says something of its own, {index * index}\n".encode()
        expected = is_held_out(f"part{index % 3}/{index}.txt")
        assert (text in held_out) == expected
        assert (text in bytes(here.train).split(b"\0")) == (not expected)


def test_one_more_file_moves_no_other_across_the_split(tmp_path: Path) -> None:
    write_tree(tmp_path)
    before = set(bytes(read_corpus([tmp_path], sequence_length=8).validation).split(b"\0"))
    (tmp_path / "part0" / "new.txt").write_text("one more")
    after = set(bytes(read_corpus([tmp_path], sequence_length=8).validation).split(b"\0"))
    assert before - {b"one more"} == after - {b"one more"}


def test_about_one_path_in_twenty_is_held_out() -> None:
    assert 0.04 < sum(is_held_out(f"{index}.py") for index in range(10_000)) / 10_000 < 0.06


def test_binary_hidden_empty_and_unreadable_files_are_left_out(tmp_path: Path) -> None:
    write_tree(tmp_path)
    plain = read_corpus([tmp_path], sequence_length=8)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\0\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "gone.txt")
    os.mkfifo(tmp_path / "pipe")  # opening it to read would block for ever
    corpus = read_corpus([tmp_path], sequence_length=8)
    assert (corpus.num_files, corpus.num_binary, corpus.num_unreadable) == (NUM_FILES, 1, 2)
    assert corpus.fingerprint == plain.fingerprint
    assert "1 binary, 2 unreadable" in corpus.describe()


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    write_tree(tmp_path)
    assert read_corpus([tmp_path, tmp_path / "part1" / "1.txt"], sequence_length=8).num_files == NUM_FILES


def test_bytes_of_any_encoding_are_text(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(bytes(range(1, 256)) * 4)
    assert read_corpus([tmp_path], sequence_length=8).num_files == 1


def test_a_single_file_is_split_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(bytes([1]) * 950 + bytes([2]) * 50)
    corpus = read_corpus([path], sequence_length=8)
    assert corpus.split == "tail"
    assert (corpus.train.size, corpus.validation.size) == (951, 50)
    assert "too few files" in corpus.describe()


def test_default_text_is_the_library_without_its_tests() -> None:
    corpus = read_corpus(sequence_length=128)
    everything = bytes(corpus.train) + bytes(corpus.validation)
    assert b"class JSONDecoder" in everything
    assert b"class TestCase(unittest.TestCase)" not in everything
    assert 0.01 < corpus.validation.size / len(everything) < 0.12
    assert corpus.train.size > 3e6


@pytest.mark.parametrize(
    ("text", "sequence_length", "message"),
    [
        (b"", 8, "there is no text to train on"),
        (b"binary \0", 8, "got 1 binary and 0 unreadable files"),
        (b"too short", 8, "the text is too short: expected at least 18 bytes"),
        (b"enough for eight, not for more", 1000, "--sequence-length"),
    ],
)
def test_text_that_cannot_train_is_refused(tmp_path: Path, text: bytes, sequence_length: int, message: str) -> None:
    (tmp_path / "a.txt").write_bytes(text)
    with pytest.raises(ValueError, match=message):
        read_corpus([tmp_path], sequence_length=sequence_length)


def test_every_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)2 problems.*'nowhere/a'.*'nowhere/b'"):
        read_corpus(["nowhere/a", tmp_path, "nowhere/b"], sequence_length=8)


def test_shortest_text_that_trains(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * 17)  # and a separator: one sequence of 8 + 1 bytes for each part
    corpus = read_corpus([tmp_path], sequence_length=8)
    assert (corpus.train.size, corpus.validation.size) == (9, 9)
    x, y = training_batch(corpus.train, batch_size=3, sequence_length=8, seed=0, step=1)
    assert x.shape == y.shape == (3, 8)
    assert validation_batch(corpus.validation, batch_size=3, sequence_length=8)[0].shape == (3, 8)


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    text = np.random.default_rng(0).integers(1, 256, 5000).astype(np.uint8)

    def batch(seed: int, step: int) -> torch.Tensor:
        return training_batch(text, batch_size=4, sequence_length=16, seed=seed, step=step)[0]

    torch.manual_seed(1)
    first = batch(3, 7)
    torch.manual_seed(2)
    assert torch.equal(first, batch(3, 7))
    assert not torch.equal(first, batch(3, 8))
    assert not torch.equal(first, batch(4, 7))


def test_target_is_the_next_byte_and_windows_reach_both_ends() -> None:
    text = np.arange(12, dtype=np.uint8)
    seen = set()
    for step in range(40):
        x, y = training_batch(text, batch_size=4, sequence_length=4, seed=0, step=step)
        assert torch.equal(x + 1, y)
        seen |= set(x[:, 0].tolist())
    assert seen == set(range(8))
    x, y = validation_batch(text, batch_size=8, sequence_length=4)
    assert x[:, 0].tolist() == list(range(8))
    assert y[-1].tolist() == [8, 9, 10, 11]
