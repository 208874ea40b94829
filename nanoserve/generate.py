"""Generation: one loop from a prompt to text, with or without a cache, whole or as a stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import torch

from nanoserve.cache import BLOCK_SIZE, KVPool, NaiveKVCache, PagedKVCache
from nanoserve.layers import Cache
from nanoserve.model import Model, load_model
from nanoserve.sampling import Sample, SamplingParams, make_generator, sample
from nanoserve.tokenizer import Detokenizer, Tokenizer, load_tokenizer

CACHES = ("paged", "naive")


def new_cache(kind: str | None, model: Model, tokens: int) -> Cache | None:
    """Return an empty cache for `tokens` tokens, of a kind in CACHES; None if kind is None."""
    if kind is None:
        return None
    if kind == "naive":
        return NaiveKVCache(model.config)
    blocks = -(-tokens // BLOCK_SIZE)  # rounded up
    pool = KVPool(model.config, blocks, BLOCK_SIZE, model.dtype, model.device)
    return PagedKVCache(pool)


@dataclass(frozen=True)
class Completion:
    """The result of one prompt.

    `text` excludes the end token and the stop string; `token_ids` has every generated token.
    `finish_reason` is "stop" (an end token or a stop string) or "length". `logprobs` has one Sample
    per token if SamplingParams.logprobs is set, else it is None.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[Sample] | None = None


def generate_tokens(
    model: Model,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    cache: Cache | None = None,
    eos_ids: Sequence[int] = (),
) -> Iterator[Sample]:
    """The loop: run the model, choose a token, append it.

    Yields one Sample per token. Stops after an end token (which is yielded), after max_tokens, or
    when the context is full. A cache must be empty; each step after the first then computes one
    token.
    """
    generator = make_generator(params.seed, model.device)
    ids = list(prompt_ids)
    step = ids  # the tokens to compute: first the prompt, then one at a time
    for _ in range(min(params.max_tokens, model.config.context - len(ids) + 1)):
        chosen = sample(
            next_logits(model, step, cache), params, generator, prompt_ids, ids[len(prompt_ids) :]
        )
        yield chosen
        if chosen.token_id in eos_ids:
            return
        ids.append(chosen.token_id)
        step = ids if cache is None else [chosen.token_id]


@torch.no_grad()
def next_logits(model: Model, ids: Sequence[int], cache: Cache | None = None) -> torch.Tensor:
    """The logits of the token after ids: float32 [vocab].

    Computes the head for the last position only: the head is a fifth of SmolLM2's weights.
    """
    with torch.inference_mode():  # about a thousand small operations start faster in this mode
        hidden = model.hidden(torch.tensor([ids], device=model.device), cache)
    return model.head(hidden[0, -1]).float()


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


class Stream:
    """Yields pieces of text; iterate once. The pieces joined are completion.text."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        ids: list[int],
        params: SamplingParams,
        cache: Cache | None,
    ) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason = "length"
        self._logprobs: list[Sample] = []
        self._params = params
        self._pieces = self._run(model, tokenizer, ids, cache)

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            if piece:
                self.text += piece
                yield piece

    def _run(
        self, model: Model, tokenizer: Tokenizer, ids: list[int], cache: Cache | None
    ) -> Iterator[str]:
        eos_ids = model.config.eos_ids
        detokenizer = Detokenizer(tokenizer, ids)
        stop = StopStrings(self._params.stop)
        for chosen in generate_tokens(model, ids, self._params, cache, eos_ids):
            self.token_ids.append(chosen.token_id)
            self._logprobs.append(chosen)
            if chosen.token_id in eos_ids:
                self.finish_reason = "stop"
                break
            yield stop.add(detokenizer.add(chosen.token_id))
            if stop.found:
                break
        yield stop.add(detokenizer.finish())
        yield stop.finish()
        if stop.found:
            self.finish_reason = "stop"

    @property
    def completion(self) -> Completion:
        """The whole result; runs the rest of the stream first."""
        for _ in self:
            pass
        logprobs = None if self._params.logprobs is None else self._logprobs
        return Completion(self.text, self.token_ids, self.finish_reason, logprobs)


class LLM:
    """A model, its tokenizer and a kind of cache: the public interface of the engine."""

    def __init__(
        self,
        source: str | Path = "smollm2",
        dtype: str | torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        cache: str | None = "paged",
        quantization: str | None = None,
    ) -> None:
        """source, dtype, device, quantization as for load_model; cache "paged", "naive", or None
        for no cache."""
        if cache is not None and cache not in CACHES:
            known = ", ".join(map(repr, CACHES))
            raise ValueError(f"cache {cache!r} is not known; supported: {known}, None")
        self.model = load_model(source, dtype, device, quantization)
        self.tokenizer = load_tokenizer(source)
        self._cache = cache

    def generate(
        self,
        prompts: str | Sequence[int] | Sequence[str | Sequence[int]],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several. A prompt is text, or token ids, which are used unchanged.

        Raises ValueError, before the model runs, for a prompt that is empty or longer than the
        model's context, and for an id outside the vocabulary.
        """
        if not isinstance(prompts, str) and not hasattr(prompts, "__len__"):
            raise ValueError(f"prompts must be text, token ids, or a list of them, got {prompts!r}")
        single = isinstance(prompts, str) or (len(prompts) and not isinstance(prompts[0], Sequence))
        checked = [self._prompt_ids(prompt) for prompt in ([prompts] if single else prompts)]
        return [self.stream(ids, params).completion for ids in checked]

    def chat(
        self, messages: list[dict[str, str]], params: SamplingParams | None = None
    ) -> Completion:
        """Complete a conversation [{"role": "user", "content": …}, …]; errors as for generate."""
        return self.stream(self.chat_ids(messages), params).completion

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Stream:
        """Complete one prompt as a stream of pieces of text; errors as generate, at once."""
        ids, params = self._prompt_ids(prompt), SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be a SamplingParams, got {params!r}")
        tokens = min(len(ids) + params.max_tokens, self.model.config.context)
        cache = new_cache(self._cache, self.model, tokens)
        return Stream(self.model, self.tokenizer, ids, params, cache)

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The token ids of a conversation in the checkpoint's chat template."""
        return self.tokenizer.encode(self.tokenizer.render_chat(messages), parse_special=True)

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.prefix_ids + self.tokenizer.encode(prompt)
        else:
            for i in prompt:
                if isinstance(i, bool) or not isinstance(i, Integral):
                    raise ValueError(f"a prompt must be text or integer token ids, got {i!r}")
            ids = [int(i) for i in prompt]
        config = self.model.config
        if not ids:
            raise ValueError("the prompt is empty")
        if len(ids) > config.context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, the model's context holds {config.context}"
            )
        for i in ids:
            if not 0 <= i < config.vocab_size:
                raise ValueError(f"token id {i} is outside the vocabulary of {config.vocab_size}")
        return ids
