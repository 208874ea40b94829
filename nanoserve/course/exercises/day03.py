"""Exercises and widget of Day 3: one step of BPE, and a detokeniser for streams."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from nanoserve.course.exercise import Case, Exercise, wrong
from nanoserve.course.widgets import FigureWidget, figure_widget, text, toggle

# One step of BPE ----------------------------------------------------------------------------------

# the dictionary's order is not the order of the ranks
_RANKS = {("he", "ll"): 2, ("h", "e"): 1, ("a", "a"): 4, ("l", "l"): 0, ("o", "w"): 3}
_LATE = 1_500  # the last of many rules, as in a real list


def _merge_cases() -> list[Case]:
    many = _RANKS | {("x", str(i)): i for i in range(5, _LATE)} | {("q", "u"): _LATE}
    cases = [
        Case("h e l l o: two pairs are known", (list("hello"), _RANKS), kind="lowest"),
        Case("he ll o: a pair of longer pieces", (["he", "ll", "o"], _RANKS), kind="lowest"),
        Case("h o w: the pair stands last", (list("how"), _RANKS), kind="lowest"),
        Case("o w l l: a worse pair comes first", (list("owll"), _RANKS), kind="lowest"),
        Case("l l o w: the best pair comes first", (list("llow"), _RANKS), kind="lowest"),
        Case("a a h e: neither alphabet nor place counts", (list("aahe"), _RANKS), kind="lowest"),
        Case(f"a q u a: the known pair has rank {_LATE:,}", (list("aqua"), many), kind="lowest"),
        Case("h e - h e: a pair that stands twice", (list("he-he"), _RANKS), kind="places"),
        Case(
            "h e h o e: half of the pair stands alone too", (list("hehoe"), _RANKS), kind="places"
        ),
        Case("a a a: a pair that overlaps itself", (list("aaa"), _RANKS), kind="places"),
        Case("el l l: a piece that ends in l", (["el", "l", "l"], _RANKS), kind="places"),
        Case("z e n: no pair is known", (list("zen"), _RANKS), kind="none"),
        Case("one piece alone", (["o"], _RANKS), kind="none"),
    ]
    return [replace(case, inputs=f"ranks: {_shown(case.args[1])}") for case in cases]


def _shown(ranks: dict[tuple[str, str], int]) -> str:
    """The ranks as a row shows them: the lowest five, then how many more."""
    known = sorted(ranks.items(), key=lambda item: item[1])
    shown = ", ".join(f"{' '.join(pair)} = {rank}" for pair, rank in known[:5])
    more = len(known) - 5
    return shown + (f" and {more:,} more" if more > 0 else "")


def _pairs(pieces: list[str]) -> list[tuple[str, str]]:
    return list(pairwise(pieces))


def _join(pieces: list[str], pair: tuple[str, str] | None, places: int = 1_000) -> list[str]:
    joined: list[str] = []
    i = 0
    while i < len(pieces):
        if tuple(pieces[i : i + 2]) == pair and places > 0:
            joined.append(pieces[i] + pieces[i + 1])
            i, places = i + 2, places - 1
        else:
            joined.append(pieces[i])
            i += 1
    return joined


def _merge_step(pieces: list[str], ranks: dict[tuple[str, str], int]) -> list[str]:
    known = [pair for pair in _pairs(pieces) if pair in ranks]
    return _join(pieces, min(known, key=ranks.get, default=None))


@wrong("It joins the first known pair from the left. Take the pair of lowest rank, wherever it is.")
def _leftmost(pieces, ranks):
    return _join(pieces, next((pair for pair in _pairs(pieces) if pair in ranks), None))


@wrong(
    "It takes the known pair that comes first in the dictionary. The order of a dictionary is no "
    "rank: look at the numbers, ranks[pair]."
)
def _dictionary_order(pieces, ranks):
    return _join(pieces, next((pair for pair in ranks if pair in _pairs(pieces)), None))


@wrong(
    "It takes the pair that is first in the alphabet: `min(known)` compares the texts. Compare the "
    "ranks: `min(known, key=ranks.get)`."
)
def _alphabetical(pieces, ranks):
    return _join(pieces, min((p for p in _pairs(pieces) if p in ranks), default=None))


@wrong(
    "Every known pair is joined. One step joins only the pair of lowest rank, wherever it stands."
)
def _every_pair(pieces, ranks):
    joined, i = [], 0
    while i < len(pieces):
        width = 2 if tuple(pieces[i : i + 2]) in ranks else 1
        joined.append("".join(pieces[i : i + width]))
        i += width
    return joined


@wrong(
    "The last piece has no right neighbour, and `pieces[i + 1]` does not exist there.",
    hints=(
        "Which index does your loop read when it stands on the last piece?",
        "Look at a pair only where there are two pieces: `i + 1 < len(pieces)`.",
        "Or compare `tuple(pieces[i : i + 2])` with the pair: a slice at the end is shorter, "
        "and raises nothing.",
    ),
)
def _past_the_end(pieces, ranks):
    known = [pair for pair in _pairs(pieces) if pair in ranks]
    best, joined, i = min(known, key=ranks.get, default=None), [], 0
    while i < len(pieces):
        if (pieces[i], pieces[i + 1]) == best:
            joined.append(pieces[i] + pieces[i + 1])
            i += 2
        else:
            joined.append(pieces[i])
            i += 1
    return joined


@wrong("It takes the highest rank. Rank 0 was learned first and goes first: take the lowest.")
def _highest(pieces, ranks):
    known = [pair for pair in _pairs(pieces) if pair in ranks]
    return _join(pieces, max(known, key=ranks.get, default=None))


@wrong("It joins the pair at one place only. A step joins the pair wherever it stands.")
def _once(pieces, ranks):
    known = [pair for pair in _pairs(pieces) if pair in ranks]
    return _join(pieces, min(known, key=ranks.get, default=None), places=1)


@wrong("A piece is used twice: once a pair is joined, go on behind both of its pieces.")
def _overlapping(pieces, ranks):
    known = [pair for pair in _pairs(pieces) if pair in ranks]
    best = min(known, key=ranks.get, default=None)
    joined, skip = [], False
    for i, piece in enumerate(pieces):
        if tuple(pieces[i : i + 2]) == best:
            joined.append(piece + pieces[i + 1])
            skip = True
        elif not skip:
            joined.append(piece)
        else:
            skip = False
    return joined


@wrong("A pair that is not in `ranks` is joined. Join only pairs that are keys of `ranks`.")
def _unknown_too(pieces, ranks):
    return _join(pieces, min(_pairs(pieces), key=lambda pair: ranks.get(pair, -1), default=None))


@wrong(
    "A pair that is not in `ranks` counts as rank 999 here. A real list has larger ranks: leave "
    "unknown pairs out, or give them float('inf')."
)
def _small_default(pieces, ranks):
    best = min(_pairs(pieces), key=lambda pair: ranks.get(pair, 999), default=None)
    return _join(pieces, best if best in ranks else None)


@wrong(
    "It replaces text, and so finds the pair across pieces: in `el l l` the pair `l l` begins at "
    "the second piece. Compare whole pieces."
)
def _by_text(pieces, ranks):
    known = [pair for pair in _pairs(pieces) if pair in ranks]
    best = min(known, key=ranks.get, default=("", ""))
    return " ".join(pieces).replace(" ".join(best), "".join(best)).split(" ")


@wrong("Where no pair is known there is no lowest rank: return the pieces as they are.")
def _no_default(pieces, ranks):
    return _join(pieces, min((p for p in _pairs(pieces) if p in ranks), key=ranks.get))


@wrong("It runs all the merges. One call is one step: the loop around it comes later.")
def _to_the_end(pieces, ranks):
    while (joined := _merge_step(pieces, ranks)) != pieces:
        pieces = joined
    return pieces


@wrong("The last piece gets lost unless it is part of the joined pair: the walk ends too early.")
def _last_lost(pieces, ranks):
    joined = _merge_step(pieces, ranks)
    known = [pair for pair in _pairs(pieces) if pair in ranks]
    best = min(known, key=ranks.get, default=None)
    return joined if best == tuple(pieces[-2:]) else joined[:-1]


@wrong(
    "It changes the list it was given: build a new list and return that.",
    hints=(
        "Which line of your function writes into `pieces`?",
        "`pieces[i] = ...`, `del pieces[i]`, `pieces.pop(i)` and `pieces[:] = ...` all do.",
        "Begin with `joined = []`, append to it, and return it.",
    ),
)
def _in_place(pieces, ranks):
    pieces[:] = _merge_step(pieces, ranks)
    return pieces


MERGE_STEP = Exercise(
    name="merge_step",
    cases=_merge_cases,
    solution=_merge_step,
    hints={
        "lowest": (
            "List the neighbours first: `zip(pieces, pieces[1:])` gives every pair.",
            "Of the pairs that are in `ranks`, choose the one with the lowest rank: "
            "`min(known, key=ranks.get)`. Where it stands in the word does not matter.",
            "Walk with an index: if `pieces[i]` and `pieces[i + 1]` are the chosen pair, append "
            "their sum and go on at `i + 2`; else append `pieces[i]` and go on at `i + 1`.",
        ),
        "places": (
            "Choose the pair once, then walk the whole word and join it wherever it stands.",
            "After a join, the next piece is the piece behind the pair: `i += 2`.",
            "`while i < len(pieces):` with `i += 2` after a join and `i += 1` otherwise. For "
            "a a a the first two are joined, and the third has no partner left.",
        ),
        "none": (
            "What does `min` do with an empty list?",
            "If no pair is in `ranks`, nothing is to be joined: return the pieces as they are.",
            "`min(known, key=ranks.get, default=None)` gives None, which is equal to no pair.",
        ),
    },
    wrong=(
        _leftmost,
        _dictionary_order,
        _highest,
        _small_default,
        _by_text,
        _once,
        _overlapping,
        _unknown_too,
        _no_default,
        _to_the_end,
        _last_lost,
        _in_place,
        _alphabetical,
        _every_pair,
        _past_the_end,
    ),
)

# The streaming detokeniser ------------------------------------------------------------------------


class TinyTokenizer:
    """A tokenizer of a few tokens, given by their bytes: what a detokeniser needs, and no more."""

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int] = ()) -> None:
        self._tokens, self._special = list(tokens), set(special)
        self.vocab_size = len(tokens)

    def token_bytes(self, token_id: int) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        kept = [i for i in ids if not (skip_special and self.is_special(i))]
        return b"".join(self.token_bytes(i) for i in kept).decode("utf-8", errors="replace")


def _stream(answer, tokens, ids=None, prompt=0, special=()):
    """The pieces that a detokeniser class returns after the first `prompt` ids, and at the end."""
    ids = range(len(tokens)) if ids is None else ids
    stream = answer(TinyTokenizer(tokens, special), list(ids[:prompt]))
    return [*(stream.add(i) for i in ids[prompt:]), stream.finish()]


_FAMILY = [b"\xf0\x9f", b"\x91", b"\xa9", b"\xe2\x80", b"\x8d", b"\xf0\x9f\x91", b"\xa7"]


def _stream_cases() -> list[Case]:
    def case(what: str, tokens: list[bytes], kind: str, **kwargs) -> Case:
        return Case(what, (tokens,), kwargs, kind=kind, call=_stream)

    coffee = [b" \xe2", b"\x98", b"\x95", b"!"]
    japanese = [b"\xe6\x97", b"\xa5", b"\xe6\x9c\xac", b"\xe8\xaa\x9e\xe3\x80", b"\x82"]
    pizza = [b"I like ", b"\xf0\x9f", b"\x8d", b"\x95", b"!"]
    return [
        case("plain words", [b"Hello", b",", b" world"], "plain"),
        case("a cup over three tokens", coffee, "split"),
        case("Japanese: a token ends one character and begins another", japanese, "split"),
        case("a family: woman, joiner, girl", _FAMILY, "split"),
        case("the stream ends inside a character", [b"ok ", b"\xf0\x9f", b"\x8d"], "end"),
        case("the byte FF, which begins no character", [b"a", b"\xff", b"b"], "invalid"),
        case("two bytes FF in one token", [b"a\xffb\xffc", b"d"], "invalid"),
        case("the byte C0, which begins no character", [b"a", b"\xc0", b"b"], "invalid"),
        case("a character that is broken off", [b"x\xe2", b"yz", b"."], "invalid"),
        case("broken off, one byte a token", [b"\xf0", b"y", b"."], "invalid"),
        case("the sign U+FFFD, meant as text", [b"\xef\xbf\xbd", b"?"], "invalid"),
        case("the prompt ends inside a character", pizza, "prompt", prompt=2),
        case("the prompt ends with a whole word", pizza, "prompt", prompt=1),
        case("a special token", [b"<|s|>", b"hi", b"<|e|>"], "special", special=(0, 2)),
        case(
            "a special token inside a character",
            [b" \xe2", b"<|s|>", b"\x98", b"\x95"],
            "special",
            special=(1,),
        ),
        case("id 9 of 2 tokens", [b"one", b"two"], "special", ids=[0, 9, 1]),
        case("id 2 of 2 tokens, which are 0 and 1", [b"one", b"two"], "special", ids=[0, 2, 1]),
        case(
            "the prompt: half a character, a special token",
            [b" \xe2", b"<|s|>", b"\x98", b"\x95"],
            "prompt",
            prompt=2,
            special=(1,),
        ),
        case("id 9 of 2 tokens, in the prompt", [b"a", b"b"], "prompt", ids=[0, 9, 1], prompt=2),
        case(
            "a special token in the prompt",
            [b"<|s|>", b"\xe2", b"\x98\x95"],
            "prompt",
            prompt=2,
            special=(0,),
        ),
    ]


class _Right:
    """The right answer in small methods, for the wrong ones to change one at a time."""

    def __init__(self, tokenizer, prompt_ids=()):
        self.tokenizer, self.ids, self.shown = tokenizer, [], ""
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in prompt_ids:
            self.add(token_id)

    def bytes_of(self, token_id):
        outside = token_id >= self.tokenizer.vocab_size
        if outside or self.tokenizer.is_special(token_id):
            return b""
        return self.tokenizer.token_bytes(token_id)

    def add(self, token_id):
        return self.decoder.decode(self.bytes_of(token_id))

    def finish(self):
        return self.decoder.decode(b"", final=True)


@wrong("Each token is decoded alone, so that a character over two tokens becomes two marks �.")
class _EachAlone(_Right):
    def add(self, token_id):
        return self.bytes_of(token_id).decode("utf-8", errors="replace")


@wrong('errors="ignore" drops the bytes of a split character: they must be kept for later.')
class _Ignored(_Right):
    def add(self, token_id):
        return self.bytes_of(token_id).decode("utf-8", errors="ignore")


@wrong(
    "It decodes everything again and shows what is longer. The mark � of an unfinished character "
    "is shown too, and nothing can take it back."
)
class _Difference(_Right):
    def add(self, token_id):
        self.ids.append(token_id)
        text = b"".join(map(self.bytes_of, self.ids)).decode("utf-8", errors="replace")
        piece, self.shown = text[len(self.shown) :], text
        return piece

    def finish(self):
        return ""


@wrong(
    "It holds the text back as long as it ends in �. That mark can also be final: for bytes that "
    "are no text, or where the text itself contains �."
)
class _UntilNoMark(_Right):
    def add(self, token_id):
        self.ids.append(token_id)
        text = b"".join(map(self.bytes_of, self.ids)).decode("utf-8", errors="replace")
        if text.endswith("\ufffd"):
            return ""
        piece, self.shown = text[len(self.shown) :], text
        return piece

    def finish(self):
        text = b"".join(map(self.bytes_of, self.ids)).decode("utf-8", errors="replace")
        return text[len(self.shown) :]


class _Holding(_Right):
    def __init__(self, tokenizer, prompt_ids=()):
        self.held = b""
        super().__init__(tokenizer, prompt_ids)

    def finish(self):
        return self.held.decode("utf-8", errors="replace")


@wrong(
    "It shows nothing until all held bytes decode at once. A token can end one character and begin "
    "the next: show what is complete and hold the rest."
)
class _AllOrNothing(_Holding):
    def add(self, token_id):
        self.held += self.bytes_of(token_id)
        try:
            piece, self.held = self.held.decode("utf-8"), b""
        except UnicodeDecodeError:
            return ""
        return piece


@wrong(
    "Bytes that no later byte can complete are held for ever, and so is all text after them: show "
    "� for them at once."
)
class _HeldForEver(_Holding):
    def add(self, token_id):
        self.held += self.bytes_of(token_id)
        for cut in range(len(self.held), max(len(self.held) - 4, -1), -1):
            try:
                piece = self.held[:cut].decode("utf-8")
            except UnicodeDecodeError:
                continue
            self.held = self.held[cut:]
            return piece
        return ""


@wrong("finish() gives nothing: bytes still held at the end are lost. Return one mark � for them.")
class _NoFinish(_Right):
    def finish(self):
        return ""


@wrong("finish() gives one mark � for each held byte. An unfinished character gets one mark.")
class _MarkPerByte(_Right):
    def finish(self):
        return "\ufffd" * len(self.decoder.getstate()[0])


@wrong(
    "It holds text back until a space comes. Show complete characters at once: some scripts have "
    "no spaces."
)
class _UntilSpace(_Right):
    def add(self, token_id):
        self.shown += super().add(token_id)
        ready, space, self.shown = self.shown.rpartition(" ")
        return ready + space

    def finish(self):
        return self.shown + super().finish()


@wrong(
    "It always holds back the last character, also a complete one, and so is one character late."
)
class _OneLate(_Right):
    def add(self, token_id):
        text = self.shown + super().add(token_id)
        self.shown = text[-1:]
        return text[:-1]

    def finish(self):
        return self.shown + super().finish()


@wrong("The prompt is ignored: when it ends inside a character, the first half is missing.")
class _NoPrompt(_Right):
    def __init__(self, tokenizer, prompt_ids=()):
        super().__init__(tokenizer)


@wrong(
    "The bytes of all ids of the prompt are used. A special token, and an id of vocab_size or "
    "more, have no text in the prompt either."
)
class _PromptUnchecked(_Right):
    def __init__(self, tokenizer, prompt_ids=()):
        super().__init__(tokenizer)
        self.decoder.decode(b"".join(map(tokenizer.token_bytes, prompt_ids)))


@wrong("The prompt's text is shown again. Process the prompt's ids, but drop their text.")
class _PromptShown(_Right):
    def __init__(self, tokenizer, prompt_ids=()):
        super().__init__(tokenizer)
        self.shown = "".join(_Right.add(self, token_id) for token_id in prompt_ids)

    def add(self, token_id):
        piece, self.shown = self.shown + super().add(token_id), ""
        return piece


@wrong("A special token is shown as text. Return an empty piece for it.")
class _SpecialShown(_Right):
    def bytes_of(self, token_id):
        outside = token_id >= self.tokenizer.vocab_size
        return b"" if outside else self.tokenizer.token_bytes(token_id)


@wrong("The special token shows the held bytes here. Leave them held for the next tokens.")
class _SpecialFlushes(_Right):
    def add(self, token_id):
        if token_id < self.tokenizer.vocab_size and self.tokenizer.is_special(token_id):
            return self.decoder.decode(b"", final=True)
        return super().add(token_id)


@wrong("The last id of a vocabulary is vocab_size - 1. An id equal to vocab_size is outside: >=.")
class _OnePast(_Right):
    def bytes_of(self, token_id):
        outside = token_id > self.tokenizer.vocab_size
        if outside or self.tokenizer.is_special(token_id):
            return b""
        return self.tokenizer.token_bytes(token_id)


_NEEDS = ((0xF0, 4), (0xE0, 3), (0xC0, 2))  # the first byte of a character says how many follow


@wrong(
    "It holds as many bytes as the first byte announces, whatever these bytes are. When a byte "
    "cannot continue the character, show � at once."
)
class _Counts(_Holding):
    def add(self, token_id):
        self.held += self.bytes_of(token_id)
        text = ""
        while self.held:
            need = next((n for first, n in _NEEDS if self.held[0] >= first), 1)
            if len(self.held) < need:
                break
            text += self.held[:need].decode("utf-8", errors="replace")
            self.held = self.held[need:]
        return text


@wrong("An id of vocab_size or more raises here. Return an empty piece for it.")
class _PaddedRaises(_Right):
    def bytes_of(self, token_id):
        special = self.tokenizer.is_special(token_id)
        return b"" if special else self.tokenizer.token_bytes(token_id)


DETOKENIZER = Exercise(
    name="Detokenizer",
    target="nanoserve.tokenizer:Detokenizer",
    cases=_stream_cases,
    hints={
        "plain": (
            "Begin with `tokenizer.token_bytes(token_id)`, the bytes of one token.",
            "Bytes that make whole characters are text: `bytes.decode('utf-8')`.",
            "Return the piece from `add`. If nothing is held, `finish` returns the empty string.",
        ),
        "split": (
            "Keep the bytes that make no whole character yet, and put the next token's behind "
            "them.",
            "Find the longest beginning of the held bytes that is complete, return its text, keep "
            "the rest. `bytes.decode` raises UnicodeDecodeError with a `.start`: there it stops.",
            "Python has this: `codecs.getincrementaldecoder('utf-8')(errors='replace')` makes an "
            "object whose `decode(data)` gives complete characters and keeps the rest.",
        ),
        "end": (
            "When no more tokens come, what is held will never be completed.",
            "`finish` decodes the held bytes with errors='replace', which gives one mark.",
            "With the incremental decoder: `decoder.decode(b'', final=True)`.",
        ),
        "invalid": (
            "Some bytes begin no character, or are followed by one that cannot continue it.",
            "Tell two cases apart: more bytes could complete it (hold), or none can (show � now). "
            "The error's `.reason` is 'unexpected end of data' in the first.",
            "The incremental decoder with errors='replace' does just this. Do not look for � in "
            "the text: the text itself may contain it.",
        ),
        "prompt": (
            "A character can begin in the prompt and end in the answer.",
            "Feed the prompt's ids through the same path before the first `add`, and drop the "
            "text that comes out: it stands on the screen already.",
            "In `__init__`: `for token_id in prompt_ids: self.add(token_id)`.",
        ),
        "special": (
            "Which ids have no text?",
            "Two kinds: `tokenizer.is_special(token_id)`, and ids of `vocab_size` or more, which "
            "`token_bytes` refuses.",
            "Check both first in `add`, the vocabulary before the special tokens, and return '' "
            "without touching the bytes that are held.",
        ),
    },
    wrong=(
        _EachAlone,
        _Ignored,
        _Difference,
        _UntilNoMark,
        _AllOrNothing,
        _HeldForEver,
        _NoFinish,
        _MarkPerByte,
        _UntilSpace,
        _OneLate,
        _NoPrompt,
        _PromptShown,
        _PromptUnchecked,
        _SpecialShown,
        _SpecialFlushes,
        _OnePast,
        _Counts,
        _PaddedRaises,
    ),
)

EXERCISES = (MERGE_STEP, DETOKENIZER)

# The widget: a text cut into its tokens -----------------------------------------------------------

LONGEST = 160  # characters that are drawn
INCH = 0.088  # width of a letter of the picture
BOX, ROW = 0.32, 1.02  # heights in inches
FILLS = ("#F6E1EC", "#FBF1F6")  # tints of the engine's colour, one token after the other


def explorer(
    first: str = "Year 2024: café ☕ and 🍕<|im_end|>", parse_special: bool = False
) -> FigureWidget:
    """Type a text and see its tokens, their ids, and which of them are parts of a character."""
    return figure_widget(
        draw_tokens,
        sample=text(first, label="text"),
        parse_special=toggle(parse_special, label="special tokens count"),
    )


WIDGETS = {"tokens": explorer}


def draw_tokens(sample: str, parse_special: bool):
    """A figure of the text as boxes: one per token, the id below, split characters bracketed."""
    from nanoserve.course import plots

    tokenizer = _tokenizer()
    ids = tokenizer.encode(sample[:LONGEST], parse_special=parse_special)
    rows = _rows(_groups(tokenizer, ids))
    height = 0.75 + ROW * max(1, len(rows))
    with plots.style():
        fig, ax = plots.figure(height=height)
        fig.set_layout_engine("none")
        ax.set_position([0, 0, 1, 1])
        ax.set(xlim=(0, plots.WIDTH), ylim=(0, height))
        ax.axis("off")
        ax.text(0.2, height - 0.34, _count(sample, ids), fontweight="bold", fontsize=11)
        for number, row in enumerate(rows):
            for x, group in row:
                _draw_group(ax, x, height - 1.22 - ROW * number, group)
    return fig


@lru_cache(maxsize=1)
def _tokenizer():
    from nanoserve.tokenizer import load_tokenizer

    return load_tokenizer()


def _count(sample: str, ids: list[int]) -> str:
    cut = f" (of the first {LONGEST} characters)" if len(sample) > LONGEST else ""
    sample = sample[:LONGEST]
    counted = [(len(sample), "character"), (len(sample.encode()), "byte"), (len(ids), "token")]
    return ", ".join(f"{n} {word}{'' if n == 1 else 's'}" for n, word in counted) + cut


def _groups(tokenizer, ids: list[int]) -> list[dict]:
    """Tokens that belong together: one, or those that share a split character."""
    groups, held = [], []
    for token_id in ids:
        held.append(token_id)
        data = b"".join(map(tokenizer.token_bytes, held))
        try:
            whole = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if len(held) == 1:
            kind = "special" if tokenizer.is_special(token_id) else "whole"
            labels = [_visible(whole)]
        else:
            kind, labels = "split", [tokenizer.token_bytes(i).hex(" ") for i in held]
        groups.append({"kind": kind, "ids": held, "labels": labels, "text": _visible(whole)})
        held = []
    for number, group in enumerate(groups):
        group["fill"] = FILLS[number % 2]
    return groups


def _visible(words: str) -> str:
    """Text as the picture's font can show it; a character that the font lacks by its number."""
    named = {" ": "␣", "\n": "↵", "\t": "⇥"}
    shown = [named.get(c) or (c if _has_glyph(c) else f"U+{ord(c):04X}") for c in words]
    return "".join(shown) if len(shown) <= 24 else "".join(shown[:22]) + "…"


def _has_glyph(character: str) -> bool:
    return character.isprintable() and _font().get_char_index(ord(character)) != 0


@lru_cache(maxsize=1)
def _font():
    from matplotlib.font_manager import findfont, get_font

    return get_font(findfont("DejaVu Sans Mono"))


def _widths(group: dict) -> list[float]:
    pairs = zip(group["labels"], group["ids"], strict=True)
    widths = [INCH * max(len(label), len(str(i)), 2) + 0.14 for label, i in pairs]
    missing = INCH * len(group["text"]) - sum(widths) if group["kind"] == "split" else 0
    return [width + max(0.0, missing) / len(widths) for width in widths]


def _rows(groups: list[dict]) -> list[list[tuple[float, dict]]]:
    """The groups in rows that fit the picture's width, each with its left edge."""
    from nanoserve.course.plots import WIDTH

    rows: list[list[tuple[float, dict]]] = [[]]
    x = 0.2
    for group in groups:
        width = sum(_widths(group)) + 0.06 * len(group["ids"])
        if rows[-1] and x + width > WIDTH - 0.2:
            rows.append([])
            x = 0.2
        rows[-1].append((x, group))
        x += width
    return rows


def _draw_group(ax, x: float, y: float, group: dict) -> None:
    from matplotlib.patches import FancyBboxPatch

    from nanoserve.course.plots import COLOURS

    edge, ink = COLOURS["engine"], COLOURS["ink"]
    split, special = group["kind"] == "split", group["kind"] == "special"
    fill = "white" if split else ink if special else group["fill"]
    mono = {"family": "DejaVu Sans Mono", "ha": "center", "va": "center"}
    left = x
    for token_id, label, width in zip(group["ids"], group["labels"], _widths(group), strict=True):
        shape = FancyBboxPatch((x, y), width, BOX, "round,pad=0,rounding_size=0.05")
        shape.set(
            facecolor=fill, edgecolor=ink if special else edge, linestyle="--" if split else "-"
        )
        ax.add_patch(shape)
        middle = x + width / 2
        ax.text(middle, y + BOX / 2, label, color="white" if special else ink, fontsize=10, **mono)
        ax.text(middle, y - 0.14, str(token_id), color="#86446E", fontsize=9, **mono)
        x += width + 0.06
    if split:
        right, top = x - 0.06, y + BOX + 0.06
        corners = [left, left, right, right], [top, top + 0.06, top + 0.06, top]
        ax.plot(*corners, color=COLOURS["muted"], linewidth=1)
        ax.text((left + right) / 2, top + 0.17, group["text"], color=ink, fontsize=10, **mono)
