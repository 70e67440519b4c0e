"""Real English text and a tokenizer for it, both made on the spot: nothing is downloaded.

The text is the Python documentation that ships inside the standard library (`pydoc_data.topics`, the source of
`help("TOPIC")`); the tokenizer is a byte-level BPE trained on it.
"""

import json
import platform
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 2048
"""Entries of the tokenizer: as many as torchtitan's debug models have."""

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


@dataclass(frozen=True)
class TextAssets:
    """Folders that torchtitan reads.

    Attributes:
        tokenizer: holds `tokenizer.json` and `tokenizer_config.json`, for `hf_assets_path`.
        dataset: holds one JSONL file of `{"text": ...}` rows, for `dataloader.dataset_path` with the dataset `c4_test`.
    """

    tokenizer: Path
    dataset: Path


def documents() -> list[str]:
    """The documentation topics of this Python, one document each, in the order of their names."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def prepare_text(cache: Path) -> TextAssets:
    """Make the tokenizer and the dataset under `cache` at first use, and find them there afterwards.

    The folder is made whole beside its place and moved there: an interrupted or concurrent call leaves no half of it.

    Args:
        cache: a folder of the caller, created if missing.
    """
    home = cache / f"python-docs-{platform.python_version()}-bpe{VOCABULARY}"
    if not home.exists():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache, prefix=".making-"))
        try:
            _write_dataset(scratch / "dataset")
            _write_tokenizer(scratch / "tokenizer")
            try:
                scratch.rename(home)
            except OSError:
                # Another process finished first; its folder has the same content.
                if not home.exists():
                    raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return TextAssets(tokenizer=home / "tokenizer", dataset=home / "dataset")


def _write_dataset(folder: Path) -> None:
    """One JSONL row per document."""
    folder.mkdir()
    rows = [json.dumps({"text": text}) for text in documents()]
    (folder / "train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def _write_tokenizer(folder: Path) -> None:
    """Train a byte-level BPE on the documents and write the two files that torchtitan's tokenizer reads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(), trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
