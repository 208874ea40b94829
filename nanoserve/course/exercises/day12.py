"""Day 12: stop strings that are held back until they can no longer match."""

from nanoserve.course.exercise import Case, Exercise, wrong

STOP = ("END",)


class _Right:
    """The right answer in small methods, for the wrong ones to change one at a time."""

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
    "The beginning of a stop string is shown, and cannot be taken back when the rest comes. Hold "
    "back every end of the text that begins a stop string."
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


@wrong("Each piece is looked at alone: a stop string that is split over two is never seen.")
class _EachAlone(_Right):
    def keep(self, text):
        return 0


@wrong(
    "All text is held back until the end. That never leaks, but nobody sees a word before the "
    "model has finished."
)
class _HoldsAll(_Right):
    def keep(self, text):
        return len(text)


@wrong(
    "The last characters are always held back, as many as a stop string is long, less one. Hold "
    "only what begins a stop string: after a piece such as 'an oak' nothing does."
)
class _HoldsFixed(_Right):
    def keep(self, text):
        return min(len(text), max((len(s) - 1 for s in self.stops), default=0))


@wrong(
    "The last characters are always held back, as many as the longest stop string has. Hold only "
    "what begins a stop string: after a piece such as 'an oak' nothing does."
)
class _HoldsWhole(_Right):
    def keep(self, text):
        return min(len(text), max((len(s) for s in self.stops), default=0))


@wrong(
    "A fixed number of characters is always held back, and with no stop strings `text[:-0]` is "
    "empty. Hold only what begins a stop string."
)
class _HoldsSlice(_HoldsFixed.fn):
    def keep(self, text):
        return super().keep(text) or len(text)


@wrong(
    "Where two stop strings are in the text, the first of the list wins. The one that is complete "
    "first should."
)
class _ListOrder(_Right):
    def cut(self, text):
        return next((text.find(s) for s in self.stops if s in text), None)


@wrong(
    "The stop string that begins first wins. When text comes letter by letter, another that ends "
    "earlier is seen first: take the one that is complete first, so that pieces do not matter."
)
class _EarliestStart(_Right):
    def cut(self, text):
        return min((text.find(s) for s in self.stops if s in text), default=None)


@wrong(
    "Of two stop strings that end at the same place, the shorter one wins, and the beginning of "
    "the longer is shown. The one that begins first should win."
)
class _ShorterWins(_Right):
    def cut(self, text):
        found = [(text.find(s) + len(s), -text.find(s)) for s in self.stops if s in text]
        return -min(found)[1] if found else None


@wrong("Text that stands before the stop string in the same piece is lost.")
class _DropsBefore(_Right):
    def cut(self, text):
        return None if super().cut(text) is None else 0


@wrong(
    "What was held when the text ended is lost. It never became a stop string, so `finish` must "
    "give it back."
)
class _FinishLoses(_Right):
    def finish(self):
        return ""


@wrong("The stop string itself is shown. Cut the text where it begins.")
class _StopShown(_Right):
    def cut(self, text):
        found = [text.find(s) + len(s) for s in self.stops if s in text]
        return min(found, default=None)


@wrong("It goes on after the stop string. Once `found` is True, nothing more may be shown.")
class _GoesOn(_Right):
    def add(self, piece):
        found, self.found = self.found, False
        text = super().add(piece)
        self.found = self.found or found
        return text


@wrong(
    "When the held text and the new piece do not go on as a stop string, all of it is shown. A "
    "shorter end may still begin one: 'aaa' cannot be 'aab', but its last two letters can."
)
class _StartsOver(_Right):
    def keep(self, text):
        if self.held:
            return len(text) if self.begins(text) else 0
        return super().keep(text)


@wrong("`found` stays False, so nobody learns that the text has been stopped.")
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
    "What was held is not thrown away when the stop string has come, and `finish` gives back its "
    "beginning."
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


@wrong("Only the first stop string is waited for; the beginnings of the others are shown.")
class _FirstOnly(_Right):
    def begins(self, end):
        return self.stops[0].startswith(end)


@wrong(
    "Only a last character that begins a stop string is held. Two or more characters may begin "
    "one as well: try the longest end first."
)
class _OneCharacter(_Right):
    def keep(self, text):
        return int(text != "" and self.begins(text[-1]))


@wrong(
    "The shortest end that fits is held, and the beginning of a longer one is shown. Try the "
    "longest end first."
)
class _ShortestEnd(_Right):
    def keep(self, text):
        longest = max((len(s) - 1 for s in self.stops), default=0)
        lengths = range(1, min(longest, len(text)) + 1)
        return next((n for n in lengths if self.begins(text[-n:])), 0)


def _shown(answer: type, stops: tuple[str, ...], pieces: list[str]) -> tuple[list[str], bool]:
    """What each piece let through and what the end did, and whether a stop string was found."""
    stop = answer(stops)
    shown = [stop.add(piece) for piece in pieces]
    return [*shown, stop.finish()], stop.found


def _cases() -> list[Case]:
    def case(what: str, kind: str, stops: tuple[str, ...], *pieces: str) -> Case:
        return Case(what, (stops, list(pieces)), kind=kind, call=_shown)

    return [
        case("no stop strings", "cut", (), "Hello", "", " world"),
        case("END inside one piece", "cut", STOP, "All done. END of it"),
        case("END, and then more text", "cut", STOP, "Well. ", "END", " more"),
        case("END over three pieces", "split", STOP, "All done", ". E", "N", "D of", " it"),
        case("a beginning that comes to nothing", "release", STOP, "an oak. E", "N", "T", "ER"),
        case("aab after three a's", "release", ("aab",), "aa", "a", "b"),
        case("the text ends while EN is held", "finish", STOP, "The E", "N"),
        case("the second of two comes first", "order", ("zz", "\n"), "one\ntwo zz"),
        case("the second of two, split", "order", ("zz", "\n\n"), "one\n", "\ntwo"),
        case("bc inside abcd, at once", "order", ("abcd", "bc"), "xabcd"),
        case("bc inside abcd, by letters", "order", ("abcd", "bc"), *"xabcd"),
        case("b and ab end together", "order", ("b", "ab"), "xab"),
    ]


EXERCISES = (
    Exercise(
        "StopStrings",
        _cases,
        hints={
            "cut": (
                "Put what is held and the new piece together. Is one of the stop strings in it?",
                "If so: found becomes True, what stands before the stop string may be shown, and "
                "everything after it is dropped, now and in later calls.",
                'if self.found: return "". Then text = self._held + piece; where a stop is in '
                "text: self.found, self._held = True, '' and return text[: text.find(stop)]",
            ),
            "split": (
                "After '. E' the piece could be going on to END. Which part of it can be shown?",
                "Find the longest end of the text that is the beginning of a stop string. Hold "
                "that, show the rest, and put the held part before the next piece.",
                "for n from min(longest stop - 1, len(text)) down to 1: if any stop.startswith("
                "text[-n:]), hold the last n characters and show text[: len(text) - n]",
            ),
            "release": (
                "'EN' was held and 'T' comes. Can 'ENT' still become END? What about its ends?",
                "Decide anew each time, on held + piece together: the longest end that begins a "
                "stop string is held, and all before it is shown.",
                "Nothing special is needed: text = self._held + piece, then the same search for "
                "the longest end. From 'aaa' with stop 'aab' it holds 'aa' and shows 'a'.",
            ),
            "finish": (
                "No more text will come. What about the part that is still held?",
                "It never became a stop string, so it is text like any other.",
                "def finish(self): text, self._held = self._held, ''; return text",
            ),
            "order": (
                "Several stop strings are in the text. Which would be seen first, if the text came "
                "letter by letter?",
                "The one that is complete first, that is, whose last letter comes first. If two "
                "end together, the longer one, which begins first.",
                "found = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]; cut "
                "at min(found)[1]",
            ),
        },
        target="nanoserve.generate:StopStrings",
        wrong=(
            _Leaks, _EachAlone, _HoldsAll, _HoldsFixed, _HoldsWhole, _HoldsSlice, _ListOrder,
            _EarliestStart, _ShorterWins, _DropsBefore, _FinishLoses, _StopShown, _GoesOn,
            _StartsOver, _NeverTells, _HeldStays, _FirstOnly, _OneCharacter, _ShortestEnd,
        ),
    ),
)  # fmt: skip
