"""Day 3: right answers in other styles than the package's."""

import codecs
import itertools


def with_infinite_default(pieces, ranks):
    pairs = list(itertools.pairwise(pieces))
    if not pairs:
        return list(pieces)
    best = min(pairs, key=lambda pair: ranks.get(pair, float("inf")))
    if best not in ranks:
        return list(pieces)
    out = []
    for piece in pieces:
        if out and (out[-1], piece) == best:
            out[-1] += piece
        else:
            out.append(piece)
    return out


def by_deleting(pieces, ranks):
    found = sorted((ranks[p], p) for p in set(itertools.pairwise(pieces)) if p in ranks)
    out = pieces.copy()
    if found:
        left, right = found[0][1]
        i = 0
        while i + 1 < len(out):
            if out[i] == left and out[i + 1] == right:
                out[i : i + 2] = [left + right]
            i += 1
    return out


def with_the_length_as_default(pieces, ranks):
    """Ranks are places in a list, so none is as large as the list is long."""
    best, lowest = None, len(ranks)
    for i in range(len(pieces) - 1):
        rank = ranks.get((pieces[i], pieces[i + 1]), len(ranks))
        if rank < lowest:
            best, lowest = (pieces[i], pieces[i + 1]), rank
    if best is None:
        return pieces
    out, rest = [], iter(range(len(pieces)))
    for i in rest:
        if pieces[i : i + 2] == list(best):
            out.append("".join(best))
            next(rest, None)
        else:
            out.append(pieces[i])
    return out


def by_recursion(pieces, ranks):
    known = [p for p in itertools.pairwise(pieces) if p in ranks]
    if not known:
        return pieces[:]
    best = min(known, key=lambda pair: ranks[pair])

    def join(rest):
        if len(rest) < 2:
            return rest
        if (rest[0], rest[1]) == best:
            return [rest[0] + rest[1], *join(rest[2:])]
        return [rest[0], *join(rest[1:])]

    return join(pieces)


class ByError:
    """Holds bytes back itself: UnicodeDecodeError says where text ends, and why."""

    def __init__(self, tokenizer, prompt_ids=()):
        self.tokenizer, self.held = tokenizer, b""
        for token_id in prompt_ids:
            self.add(token_id)

    def add(self, token_id):
        known = token_id < self.tokenizer.vocab_size
        if not known or self.tokenizer.is_special(token_id):
            return ""
        self.held += self.tokenizer.token_bytes(token_id)
        text = ""
        while True:
            try:
                text += self.held.decode("utf-8")
                self.held = b""
                return text
            except UnicodeDecodeError as error:
                text += self.held[: error.start].decode("utf-8")
                if error.reason == "unexpected end of data":
                    self.held = self.held[error.start :]
                    return text
                text += "\ufffd"
                self.held = self.held[error.end :]

    def finish(self):
        text, self.held = self.held.decode("utf-8", errors="replace"), b""
        return text


class DecodesAgain:
    """Keeps all bytes and decodes them anew each time, with the incremental decoder."""

    def __init__(self, tokenizer, prompt_ids=()):
        self.tok = tokenizer
        self.data = b"".join(self._bytes(i) for i in prompt_ids)
        self.shown = len(self._text())

    def _bytes(self, token_id):
        try:
            data = self.tok.token_bytes(token_id)
        except ValueError:
            return b""
        return b"" if self.tok.is_special(token_id) else data

    def _text(self, final=False):
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return decoder.decode(self.data, final)

    def _new(self, text):
        piece, self.shown = text[self.shown :], len(text)
        return piece

    def add(self, token_id):
        self.data += self._bytes(token_id)
        return self._new(self._text())

    def finish(self):
        return self._new(self._text(final=True))


class ByGenerator:
    """A coroutine takes bytes and gives text; the class only feeds it."""

    def __init__(self, tokenizer, prompt_ids=()):
        self.tokenizer = tokenizer
        self.stream = self._run()
        next(self.stream)
        for token_id in prompt_ids:
            self.add(token_id)

    @staticmethod
    def _run():
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        text, final = "", False
        while True:
            data, final = yield text
            text = decode(data, final)

    def add(self, token_id):
        if token_id not in range(self.tokenizer.vocab_size):
            return ""
        if self.tokenizer.is_special(token_id):
            return ""
        return self.stream.send((self.tokenizer.token_bytes(token_id), False))

    def finish(self):
        return self.stream.send((b"", True))


RIGHT = {
    "merge_step": (
        with_infinite_default,
        by_deleting,
        with_the_length_as_default,
        by_recursion,
    ),
    "Detokenizer": (ByError, DecodesAgain, ByGenerator),
}
