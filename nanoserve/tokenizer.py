"""Text to token ids and back: tokenizer, chat template, and a detokeniser for streams."""

import codecs
import json
import threading
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from pathlib import Path

import tokenizers

from nanoserve.config import read_json
from nanoserve.fetch import resolve
from nanoserve.gguf_file import check_readable, gguf_tokenizer


def byte_alphabet() -> dict[str, int]:
    """{character: byte}: how a byte-level vocabulary (GPT-2) writes the 256 bytes as characters.

    A printable Latin-1 byte stands for itself; the 68 others take the characters from U+0100 on,
    in order, so that a space is "Ġ" and a newline "Ċ".
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """A checkpoint's own tokenizer: text to token ids and back, and its chat template."""

    def __init__(self, tokenizer_json: str, config: dict) -> None:
        """Takes the text of tokenizer.json and the content of tokenizer_config.json."""
        self._config = config
        self._full = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._lock = threading.Lock()  # encode() switches a setting of _full
        self._added = dict(self._full.get_added_tokens_decoder())
        self.vocab_size = self._full.get_vocab_size()
        decoder = json.dumps(json.loads(tokenizer_json).get("decoder"))
        self._byte_level = "ByteLevel" in decoder
        # SentencePiece puts a space before the text that it encodes.
        self._space_first = '"Strip"' in decoder or "Metaspace" in decoder

    @cached_property
    def prefix_ids(self) -> list[int]:
        """The ids that the checkpoint's tokenizer puts before a text: its BOS token, or nothing.

        Only the post-processor of tokenizer.json decides, as in transformers 5.
        """
        encoded = self._full.encode("a")
        marked = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        return [i for i, _ in takewhile(lambda pair: pair[1], marked)]

    def encode(self, text: str, parse_special: bool = False) -> list[int]:
        """Text to token ids, without a prefix.

        A special token in the text becomes one id only with parse_special. Other added tokens, such
        as <think>, always become one id. A byte without a token is dropped, as in the checkpoint's
        own tokenizer (SmolLM2 has no tokens for six control characters). Raises ValueError for text
        with a lone surrogate.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: {error}") from None
        with self._lock:
            self._full.encode_special_tokens = not parse_special
            return self._full.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Token ids to a whole text; bytes that are not UTF-8 become U+FFFD.

        With skip_special, special tokens are left out. Raises ValueError for an id outside the
        vocabulary.
        """
        kept = (i for i in ids if not (skip_special and self.is_special(i)))
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._space_first else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token: from a part of a character to several words.

        Raises ValueError for an id outside the vocabulary.
        """
        token = self._full.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        if token_id in self._added:
            return token.encode("utf-8")
        if self._byte_level:
            return bytes(self._bytes[character] for character in token)
        if token.startswith("<0x") and token.endswith(">"):  # SentencePiece's byte fallback
            return bytes([int(token[3:-1], 16)])
        return token.replace("▁", " ").encode("utf-8")

    def is_special(self, token_id: int) -> bool:
        """Whether a token marks structure (a role, an end) rather than text."""
        return token_id in self._added and self._added[token_id].special

    def token_id(self, token: str | None) -> int | None:
        """The id of the token with this text, or None."""
        return None if token is None else self._full.token_to_id(token)

    def render_chat(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render [{"role": …, "content": …}, …] with the checkpoint's chat template.

        The jinja template runs in a sandbox. Raises ValueError if there is no template, if a
        message lacks its role or content, and if the template raises an error.
        """
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = self._config.get("chat_template")
        if isinstance(template, list):  # some checkpoints have several, by name
            template = {each["name"]: each["template"] for each in template}.get("default")
        if not template:
            raise ValueError("this checkpoint has no chat template; use generate with plain text")
        for message in messages:
            if not (isinstance(message, dict) and {"role", "content"} <= message.keys()):
                raise ValueError(f"a message needs a role and a content, got {message!r}")

        def refuse(reason: str) -> None:
            raise jinja2.TemplateError(reason)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = lambda value, **kw: json.dumps(
            value, ensure_ascii=False, **kw
        )
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        names = {role: self._name(role) or "" for role in ("bos_token", "eos_token", "unk_token")}
        try:
            return environment.from_string(template).render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,  # as in transformers: tools and documents are defined, and None
                documents=None,
                **names,
            )
        except Exception as error:  # a template can raise anything
            raise ValueError(f"the chat template failed on these messages: {error}") from None

    @cached_property
    def _bytes(self) -> dict[str, int]:
        return byte_alphabet()

    def _name(self, role: str) -> str | None:
        """The text of a special token, which the config stores as a string or in a dictionary."""
        token = self._config.get(role)
        return token.get("content") if isinstance(token, dict) else token


class Detokenizer:
    """Turns a stream of token ids into pieces of text that end on whole characters.

    All pieces and finish(), joined, equal the text of all ids decoded at once, except that the
    space before SentencePiece's first word stays. The bytes of an incomplete character are held
    back until the character is complete, also at the end of the prompt.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in prompt_ids:
            self.add(token_id)

    def add(self, token_id: int) -> str:
        """Return the text that this token completes: often a word, sometimes ""."""
        if token_id >= self._tokenizer.vocab_size or self._tokenizer.is_special(token_id):
            return ""  # a model's vocabulary may be larger than its tokenizer's
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Return the rest: U+FFFD if the stream ended inside a character, else ""."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Holds text back while it may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """Return the text that can be shown now; "" after the first stop string."""
        if self.found:
            return ""
        text = self._held + piece
        found = [(text.find(s) + len(s), text.find(s)) for s in self._stops if s in text]
        if found:  # the stop string that ends first, however the text is cut into pieces
            self.found, self._held = True, ""
            return text[: min(found)[1]]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return the text that is still held back."""
        text, self._held = self._held, ""
        return text

    def _undecided(self, text: str) -> int:
        """The length of the longest suffix of text that is a prefix of a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        return next(
            (
                n
                for n in range(min(longest, len(text)), 0, -1)
                if any(stop.startswith(text[-n:]) for stop in self._stops)
            ),
            0,
        )


def load_tokenizer(source: str | Path = "smollm2") -> Tokenizer:
    """The tokenizer of "smollm2", a folder in the Hugging Face layout, a .gguf file or a hub id.

    Raises ValueError for an unknown source, for a file that is missing, unreadable or broken, and
    for a tokenizer whose tokens are not made of bytes.
    """
    path = resolve(source)
    text, config = gguf_tokenizer(path) if path.suffix == ".gguf" else _read_folder(path)
    try:
        kind = json.dumps(json.loads(text).get("decoder"))
        if not any(known in kind for known in ("ByteLevel", "ByteFallback", "Metaspace")):
            raise ValueError(f"its decoder is not supported: {kind[:80]}")
        return Tokenizer(text, config)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ValueError(f"{path}: the tokenizer cannot be read: {error}") from None


def _read_folder(folder: Path) -> tuple[str, dict]:
    """Return the text of tokenizer.json and the content of tokenizer_config.json. The names in
    special_tokens_map.json and the template in chat_template.jinja are added to the content."""
    file, config_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if not file.exists():
        raise ValueError(f"{file} is missing (a tokenizer.model alone is not supported)")
    config = read_json(config_file) if config_file.exists() else {}
    names = folder / "special_tokens_map.json"
    if names.exists() and "added_tokens_decoder" not in config:  # as transformers decides
        config |= read_json(names)
    template = folder / "chat_template.jinja"
    if template.exists():
        config["chat_template"] = _read_text(template)
    return _read_text(file), config


def _read_text(file: Path) -> str:
    check_readable(file)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}") from None
