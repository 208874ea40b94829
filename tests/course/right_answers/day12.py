"""Day 12: right answers to `StopStrings`, in several styles."""

import re


class LetterByLetter:
    """Every character by itself, so the first stop string that is complete is the first seen."""

    def __init__(self, stops):
        self.stops, self.found, self.waiting = stops, False, ""

    def add(self, piece):
        shown = ""
        for letter in "" if self.found else piece:
            self.waiting += letter
            complete = [s for s in self.stops if self.waiting.endswith(s)]
            if complete:
                longest = max(complete, key=len)
                shown += self.waiting[: len(self.waiting) - len(longest)]
                self.waiting, self.found = "", True
                return shown
            while self.waiting and not any(s.startswith(self.waiting) for s in self.stops):
                shown, self.waiting = shown + self.waiting[0], self.waiting[1:]
        return shown

    def finish(self):
        waiting, self.waiting = self.waiting, ""
        return waiting


class WholeText:
    """Keeps all of the text, and the number of characters shown."""

    def __init__(self, stops):
        self.stops = stops
        self.text, self.shown, self.found = "", 0, False

    def _show(self, end):
        piece = self.text[self.shown : end]
        self.shown = max(self.shown, end)
        return piece

    def add(self, piece):
        if self.found:
            return ""
        self.text += piece
        ends = []
        for stop in self.stops:
            at = self.text.find(stop)
            if at >= 0:
                ends.append((at + len(stop), at))
        if ends:
            self.found = True
            begin = min(ends)[1]
            piece = self._show(begin)
            self.text = self.text[:begin]
            return piece
        held = 0
        for stop in self.stops:
            for n in range(1, len(stop)):
                if self.text.endswith(stop[:n]):
                    held = max(held, n)
        return self._show(len(self.text) - held)

    def finish(self):
        return self._show(len(self.text))


class Pattern:
    """One regular expression for the stop strings, one for what may begin one."""

    def __init__(self, stops):
        self.found = False
        self._held = ""
        self._stops = [re.compile(re.escape(stop)) for stop in stops]
        starts = {stop[:n] for stop in stops for n in range(len(stop))}
        self._begins = re.compile("(?:" + "|".join(map(re.escape, starts)) + r")\Z")

    def add(self, piece):
        if self.found:
            return ""
        text = self._held + piece
        hits = [m for m in (stop.search(text) for stop in self._stops) if m]
        if hits:
            self.found, self._held = True, ""
            return text[: min(hits, key=lambda m: (m.end(), m.start())).start()]
        cut = self._begins.search(text).start()
        self._held = text[cut:]
        return text[:cut]

    def finish(self):
        held, self._held = self._held, ""
        return held


RIGHT = {"StopStrings": (LetterByLetter, WholeText, Pattern)}
