"""Day 12: stop strings that are held back until they can no longer match."""

import re

from nanoserve.course.exercise import Case, Exercise, wrong

STOP = ("END",)


class _Right:
    """The right answer in small methods; each wrong answer changes one of them."""

    def __init__(self, stops):
        self.stops, self.held, self.found = stops, "", False

    def add(self, piece):
        if self.found:
            return ""
        text = self.held + piece
        cut = self.cut(text)
        if cut is not None:
            self.found, self.held = True, ""
            return text[:cut]
        keep = self.keep(text)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self):
        text, self.held = self.held, ""
        return text

    def cut(self, text):
        """Where the stop string that is complete first begins, or None."""
        found = [(text.find(s) + len(s), text.find(s)) for s in self.stops if s in text]
        return min(found)[1] if found else None

    def keep(self, text):
        """The length of the longest end of text that begins a stop string."""
        longest = max((len(s) - 1 for s in self.stops), default=0)
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if self.begins(text[-n:])), 0)

    def begins(self, end):
        return any(s.startswith(end) for s in self.stops)


@wrong(
    "The beginning of a stop string is shown before the rest has come. Hold back every end of the "
    "text that begins a stop string.",
    hints="split",
)
class _Leaks(_Right):
    def keep(self, text):
        self.tail = text[-3:]
        return 0

    def add(self, piece):
        if self.found:
            return ""
        whole = getattr(self, "tail", "") + piece
        cut = self.cut(whole)
        self.tail, self.found = whole, cut is not None
        return piece if cut is None else piece[: max(0, cut - len(whole) + len(piece))]


@wrong(
    "Each piece is searched alone, so a stop string that is split over two pieces is never found.",
    hints="split",
)
class _EachAlone(_Right):
    def keep(self, text):
        return 0


@wrong(
    "All text is held back until the end. That is safe, but a reader sees nothing before the model "
    "has finished.",
    hints="much",
)
class _HoldsAll(_Right):
    def keep(self, text):
        return len(text)


@wrong(
    "A fixed number of characters is always held back: the length of a stop string, less one. Hold "
    "only an end that begins a stop string; no end of 'an oak' does.",
    hints="much",
)
class _HoldsFixed(_Right):
    def keep(self, text):
        return min(len(text), max((len(s) - 1 for s in self.stops), default=0))


@wrong(
    "A fixed number of characters is always held back: the length of the longest stop string. Hold "
    "only an end that begins a stop string; no end of 'an oak' does.",
    hints="much",
)
class _HoldsWhole(_Right):
    def keep(self, text):
        return min(len(text), max((len(s) for s in self.stops), default=0))


@wrong(
    "A fixed number of characters is always held back, and with no stop strings `text[:-0]` is "
    "empty. Hold only an end that begins a stop string.",
    hints="much",
)
class _HoldsSlice(_HoldsFixed.fn):
    def keep(self, text):
        return super().keep(text) or len(text)


@wrong(
    "Where two stop strings are in the text, it cuts at the first of the list. Cut at the one that "
    "is complete first.",
    hints="order",
)
class _ListOrder(_Right):
    def cut(self, text):
        return next((text.find(s) for s in self.stops if s in text), None)


@wrong(
    "It cuts at the stop string that begins first. Letter by letter, another one that ends earlier "
    "would be complete before it: cut at the one that is complete first.",
    hints="order",
)
class _EarliestStart(_Right):
    def cut(self, text):
        return min((text.find(s) for s in self.stops if s in text), default=None)


@wrong(
    "Of two stop strings that end at the same place, it takes the shorter and shows the beginning "
    "of the longer. Take the longer: it begins first.",
    hints="order",
)
class _ShorterWins(_Right):
    def cut(self, text):
        found = [(text.find(s) + len(s), -text.find(s)) for s in self.stops if s in text]
        return -min(found)[1] if found else None


@wrong(
    "Text before the stop string, in the same piece, is lost. Return it: it belongs to the answer.",
    hints="cut",
)
class _DropsBefore(_Right):
    def cut(self, text):
        return None if super().cut(text) is None else 0


@wrong(
    "The held text is lost at the end. It never became a stop string, so `finish` must return it.",
    hints="finish",
)
class _FinishLoses(_Right):
    def finish(self):
        return ""


@wrong("The stop string itself is shown. Cut the text where it begins.", hints="cut")
class _StopShown(_Right):
    def cut(self, text):
        found = [text.find(s) + len(s) for s in self.stops if s in text]
        return min(found, default=None)


@wrong(
    "It shows text after the stop string. Once `found` is True, `add` must return an empty string.",
    hints="cut",
)
class _GoesOn(_Right):
    def add(self, piece):
        found, self.found = self.found, False
        text = super().add(piece)
        self.found = self.found or found
        return text


@wrong(
    "When the held text and the new piece do not continue a stop string, all of it is shown. A "
    "shorter end may still begin one: 'aaa' does not begin 'aab', but its last two letters do.",
    hints="release",
)
class _StartsOver(_Right):
    def keep(self, text):
        if self.held:
            return len(text) if self.begins(text) else 0
        return super().keep(text)


@wrong("`found` stays False. Set it to True when a stop string is complete.", hints="found")
class _NeverTells(_Right):
    def __init__(self, stops):
        super().__init__(stops)
        self.ended = False

    def add(self, piece):
        if self.ended:
            return ""
        text = super().add(piece)
        self.ended, self.found = self.found, False
        return text


@wrong(
    "The held text is kept when the stop string is complete, and `finish` returns its beginning. "
    "Empty it there.",
    hints="finish",
)
class _HeldStays(_Right):
    def add(self, piece):
        held, before = self.held, self.found
        text = super().add(piece)
        if self.found:
            self.held = self.held if before else held
        return text

    def finish(self):
        return self.held


@wrong(
    "The text with the stop string is still held when the stop string is complete, and `finish` "
    "returns it. Empty what you hold there.",
    hints="finish",
)
class _HoldsTheStop(_Right):
    def add(self, piece):
        whole, before = self.held + piece, self.found
        text = super().add(piece)
        if self.found and not before:
            self.held = whole
        return text

    def finish(self):
        return self.held


@wrong(
    "Only beginnings of the first stop string are held. Compare with every stop string.",
    hints="split",
)
class _FirstOnly(_Right):
    def begins(self, end):
        return self.stops[0].startswith(end)


@wrong(
    "At most one character is held. Two or more characters may begin a stop string as well: try "
    "the longest end first.",
    hints="longest",
)
class _OneCharacter(_Right):
    def keep(self, text):
        return int(text != "" and self.begins(text[-1]))


@wrong(
    "The shortest end that fits is held, and the beginning of a longer one is shown. Try the "
    "longest end first.",
    hints="longest",
)
class _ShortestEnd(_Right):
    def keep(self, text):
        longest = max((len(s) - 1 for s in self.stops), default=0)
        lengths = range(1, min(longest, len(text)) + 1)
        return next((n for n in lengths if self.begins(text[-n:])), 0)


@wrong(
    "The stop strings are used as regular expressions, where `.` stands for any character. Search "
    "for the plain text, with `in` and `find`.",
    hints="plain",
)
class _Pattern(_Right):
    def cut(self, text):
        found = [m for m in (re.search(s, text) for s in self.stops) if m]
        return min(found, key=lambda m: m.end()).start() if found else None


@wrong("Upper and lower case are taken for the same. Compare the text as it is.", hints="plain")
class _AnyCase(_Right):
    def cut(self, text):
        stops = [s.lower() for s in self.stops]
        found = [(text.lower().find(s) + len(s), text.lower().find(s)) for s in stops]
        found = [pair for s, pair in zip(stops, found, strict=True) if s in text.lower()]
        return min(found)[1] if found else None


@wrong(
    "`found` becomes True one call too late. Set it in the call in which the stop string becomes "
    "complete: the engine reads it right after `add`.",
    hints="found",
)
class _TellsLate(_Right):
    def __init__(self, stops):
        super().__init__(stops)
        self.ended = False

    def add(self, piece):
        if self.ended:
            self.found = True
            return ""
        text = super().add(piece)
        self.ended, self.found = self.found, False
        return text

    def finish(self):
        self.found = self.found or self.ended
        return super().finish()


def _shown(answer: type, stops: tuple[str, ...], pieces: list[str]) -> dict[str, str]:
    """The text that each call returned, and the call in which `found` became True."""
    stop = answer(stops)
    calls = [
        (f"add {number}", lambda p=piece: stop.add(p)) for number, piece in enumerate(pieces, 1)
    ]
    told, found = {}, "never"
    for name, call in [*calls, ("finish", stop.finish)]:
        told[name] = call()
        if stop.found and found == "never":
            found = f"in {name}"
    return told | {"found": found}


def _cases() -> list[Case]:
    def case(what: str, kind: str, stops: tuple[str, ...], *pieces: str) -> Case:
        return Case(what, (stops, list(pieces)), kind=kind, call=_shown)

    return [
        case("no stop strings", "none", (), "Hello", "", " world"),
        case("END inside one piece", "cut", STOP, "All done. END of it"),
        case("END, and then more text", "cut", STOP, "Well. ", "END", " more"),
        case("END at the very start", "cut", STOP, "END", " more"),
        case("END over three pieces", "split", STOP, "All done", ". E", "N", "D of", " it"),
        case("a beginning that comes to nothing", "release", STOP, "an oak. E", "N", "T", "ER"),
        case("aab after three a's", "release", ("aab",), "aa", "a", "b"),
        case("the text ends while EN is held", "finish", STOP, "The E", "N"),
        case("the second of two comes first", "order", ("zz", "\n"), "one\ntwo zz"),
        case("the second of two, split", "order", ("zz", "\n\n"), "one\n", "\ntwo"),
        case("bc inside abcd, at once", "order", ("abcd", "bc"), "xabcd"),
        case("bc inside abcd, by letters", "order", ("abcd", "bc"), *"xabcd"),
        case("b and ab end together", "order", ("b", "ab"), "xab"),
        case("a dot is a dot: x.z", "plain", ("x.z",), "xyz ", "X.Z ", "x.z."),
    ]


EXERCISES = (
    Exercise(
        "StopStrings",
        _cases,
        hints={
            "cut": (
                "Put what is held and the new piece together. Is one of the stop strings in it?",
                "If so: set found to True, return the text before the stop string, and drop "
                "everything after it, now and in later calls.",
                'if self.found: return "". Then text = self._held + piece; where a stop is in '
                "text: self.found, self._held = True, '' and return text[: text.find(stop)]",
            ),
            "split": (
                "The text '. E' could continue to END. Which part of it can be shown?",
                "Find the longest end of the text that is the beginning of a stop string. Hold "
                "that, show the rest, and put the held part before the next piece.",
                "for n from min(longest stop - 1, len(text)) down to 1: if any stop.startswith("
                "text[-n:]), hold the last n characters and show text[: len(text) - n]",
            ),
            "release": (
                "'EN' was held and 'T' comes. Can 'ENT' still become END? Can one of its ends?",
                "Decide again in each call, on held + piece together: hold the longest end that "
                "begins a stop string, and show the rest.",
                "No extra rule is needed: text = self._held + piece, then the same search for the "
                "longest end. From 'aaa' with stop 'aab' it holds 'aa' and shows 'a'.",
            ),
            "longest": (
                "Which ends of the text begin a stop string? Write all of them down.",
                "If you hold a short end, the beginning of a longer one is already shown. Try the "
                "lengths from the longest to 1.",
                "for n in range(min(longest, len(text)), 0, -1): if any(stop.startswith(text[-n:]) "
                "for stop in stops), hold n characters",
            ),
            "much": (
                "Which characters at the end of 'an oak' could begin END? How many do you hold?",
                "Hold an end only if some stop string starts with it. Usually that is nothing.",
                "keep = 0 unless any(stop.startswith(text[-n:]) for stop in stops) for some n",
            ),
            "none": (
                "With no stop strings, what should be held back?",
                "Nothing. Two traps: max() of an empty list raises, and text[:-0] is empty.",
                "max(..., default=0), and text[: len(text) - keep] instead of text[:-keep]",
            ),
            "found": (
                "The engine reads `found` after every call of add. When must it be True?",
                "From the call on in which the stop string becomes complete.",
                "self.found = True, right before you return the text in front of the stop string",
            ),
            "plain": (
                "Is 'xyz' the text 'x.z'? Is 'X.Z'?",
                "A stop string is plain text: every character stands for itself.",
                "stop in text, text.find(stop) and stop.startswith(...)",
            ),
            "finish": (
                "No more text will come. What should happen to the part that is still held?",
                "If no stop string was found, the held part is text like any other. If one was "
                "found, nothing is held.",
                "def finish(self): text, self._held = self._held, ''; return text",
            ),
            "order": (
                "Several stop strings are in the text. If the text came letter by letter, which "
                "one would be complete first?",
                "The one whose last letter comes first. If two end together, the longer one, which "
                "begins first.",
                "found = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]; cut "
                "at min(found)[1]",
            ),
        },
        target="nanoserve.tokenizer:StopStrings",
        wrong=(
            _Leaks, _EachAlone, _HoldsAll, _HoldsFixed, _HoldsWhole, _HoldsSlice, _ListOrder,
            _EarliestStart, _ShorterWins, _DropsBefore, _FinishLoses, _StopShown, _GoesOn,
            _StartsOver, _NeverTells, _HeldStays, _FirstOnly, _OneCharacter, _ShortestEnd,
            _Pattern, _AnyCase, _TellsLate, _HoldsTheStop,
        ),
    ),
)  # fmt: skip
