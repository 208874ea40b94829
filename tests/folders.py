"""A tiny checkpoint with a tokenizer: a folder that LLM, the oracle and the command line load."""

import errno
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from nanoserve.tokenizer import byte_alphabet
from tests.checkpoints import edit_json, random_model, save

SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 256 + 2 + len(SPECIAL)  # bytes, merges, special tokens
BOS, IM_START, IM_END = 258, 259, 260
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    "{% endfor %}<|im_start|>assistant\n"
)


def tokenizer_json(add_bos: bool = False) -> str:
    """A byte-level BPE: ids 0 to 255 are bytes in the alphabet's order, then "he" and "ll"."""
    vocab = {char: i for i, char in enumerate(byte_alphabet())} | {"he": 256, "ll": 257}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS)]
        )
    return tokenizer.to_str()


def write_checkpoint(
    folder: Path,
    kind: str = "llama-gqa",
    add_bos: bool = False,
    eos: int | list[int] | None = IM_END,
    **changes: Any,
) -> Path:
    """Write a random model of a kind and its tokenizer in the Hugging Face layout."""
    changes = {"vocab_size": VOCABULARY, "bos_token_id": BOS} | changes
    save(random_model(kind, **changes), folder)
    for name in ("config.json", "generation_config.json"):
        edit_json(folder / name, eos_token_id=eos)
    (folder / "tokenizer.json").write_text(tokenizer_json(add_bos), encoding="utf-8")
    config = {"bos_token": "<s>", "add_bos_token": add_bos, "chat_template": TEMPLATE}
    if not add_bos:
        del config["bos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@contextmanager
def denied(file: Path) -> Iterator[None]:
    """Make opening `file` fail with a permission error (root could open any file)."""

    def opened(path: Path, *args: Any, real=Path.open, **options: Any) -> Any:
        if path == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real(path, *args, **options)

    with mock.patch.object(Path, "open", opened):
        yield
