"""A request while it runs: its tokens, its cache, and the state of its sampling and its text."""

from collections.abc import Collection
from dataclasses import dataclass

from nanoserve.cache import PagedKVCache
from nanoserve.sampling import Sample, SamplingParams, make_generator
from nanoserve.tokenizer import Detokenizer, StopStrings, Tokenizer


@dataclass(frozen=True)
class Output:
    """What one step gives to one request: a token, and the text that can now be shown.

    `finish_reason` is None until the last output: "stop" (an end token or a stop string), "length",
    or "abort", which comes without a token. `sample` has the token's logprobs.
    """

    request_id: str
    token_id: int | None
    sample: Sample | None
    text: str
    finish_reason: str | None = None


class Sequence:
    """The state of one request. It survives a preemption, which only empties the cache.

    `ids` holds the prompt and the output so far; the cache holds the first cache.seq_len of them.
    """

    def __init__(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        cache: PagedKVCache,
        limit: int | None = None,
        eos_ids: Collection[int] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """limit: the most tokens to generate, by default params.max_tokens.

        Without a tokenizer the text is empty, and stop strings are not found.
        """
        self.request_id = request_id
        self.prompt_ids, self.output_ids = list(prompt_ids), []
        self.ids = list(prompt_ids)
        self.params = params
        self.cache = cache
        self.limit = params.max_tokens if limit is None else limit
        self.generator = make_generator(params.seed)  # on the CPU: the same numbers on any device
        self._eos_ids = eos_ids
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt_ids)
        self._stop = StopStrings(params.stop)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are not in the cache: a prompt's at first, then one in each step."""
        return len(self.ids) - self.cache.seq_len

    @property
    def most_tokens(self) -> int:
        """The most tokens that the cache will hold. The last token of all is never computed."""
        return len(self.prompt_ids) + self.limit - 1

    def accept(self, chosen: Sample) -> Output:
        """Append a chosen token. The result says what text it completes and whether it is the last.

        An end token has no text. Text that may become a stop string is held back.
        """
        self.ids.append(chosen.token_id)
        self.output_ids.append(chosen.token_id)
        ended = chosen.token_id in self._eos_ids
        text = "" if ended else self._show(chosen.token_id)
        if not (ended or self._stop.found or len(self.output_ids) == self.limit):
            return Output(self.request_id, chosen.token_id, chosen, text)
        text += self._show(None)
        reason = "stop" if ended or self._stop.found else "length"
        return Output(self.request_id, chosen.token_id, chosen, text, reason)

    def _show(self, token_id: int | None) -> str:
        """The text that a token completes; for None, the text that is still held back."""
        if self._detokenizer is None:
            return ""
        if token_id is not None:
            return self._stop.add(self._detokenizer.add(token_id))
        return self._stop.add(self._detokenizer.finish()) + self._stop.finish()
