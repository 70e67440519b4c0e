"""Text and tokenizer of the main job; needs `tokenizers`, not torchtitan."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from torch_remat_titan.text import BEGIN, END, VOCABULARY, documents, prepare_text

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed here (extra: titan)")


def test_the_text_is_the_documentation_of_this_python():
    found = documents()
    assert sum(map(len, found)) > 300_000
    assert any('The "if" statement' in document for document in found)


def test_dataset_and_tokenizer_hold_the_whole_text(tmp_path):
    assets = prepare_text(tmp_path)
    rows = [json.loads(line) for line in (assets.dataset / "train.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == documents()
    tokenizer = tokenizers.Tokenizer.from_file(str(assets.tokenizer / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCABULARY
    config = json.loads((assets.tokenizer / "tokenizer_config.json").read_text())
    assert tokenizer.token_to_id(config["bos_token"]) == tokenizer.token_to_id(BEGIN) == 0
    assert tokenizer.token_to_id(config["eos_token"]) == tokenizer.token_to_id(END) == 1
    for document in documents()[:5]:
        ids = tokenizer.encode(document).ids
        assert tokenizer.decode(ids) == document
        assert len(ids) < len(document) / 2


def test_concurrent_first_uses_leave_one_folder(tmp_path):
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: prepare_text(tmp_path), range(3)))
    assert len(set(found)) == 1
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".making-")] == []


def test_an_interrupted_first_use_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(folder: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("torch_remat_titan.text._write_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        prepare_text(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert prepare_text(tmp_path).tokenizer.is_dir()
