"""Generation: from a prompt to text, whole or as a stream, in a loop of its own or in an engine."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch

from nanoserve.cache import BLOCK_SIZE, KVPool, NaiveKVCache, PagedKVCache
from nanoserve.engine.engine import Engine, check_prompt
from nanoserve.engine.sequence import Output
from nanoserve.layers import Cache
from nanoserve.model import Model, load_model
from nanoserve.sampling import Sample, SamplingParams, make_generator, sample
from nanoserve.tokenizer import Detokenizer, StopStrings, Tokenizer, load_tokenizer

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

    def close(self) -> None:
        """End the stream: no more tokens are computed for it."""
        self._pieces.close()

    @property
    def completion(self) -> Completion:
        """The whole result; runs the rest of the stream first."""
        for _ in self:
            pass
        logprobs = None if self._params.logprobs is None else self._logprobs
        return Completion(self.text, self.token_ids, self.finish_reason, logprobs)


class SharedEngine:
    """An engine that several streams use, in one thread or in several: one step at a time.

    Whichever stream needs an output runs a step, and keeps the outputs of the other streams for
    them.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._outputs: dict[str, deque[Output]] = {}  # those that no stream has read yet
        self._dropped: deque[str] = deque()  # requests to abort

    def add(self, prompt_ids: list[int], params: SamplingParams) -> str:
        """Queue a request and return its id; errors as for Engine.add."""
        with self._lock:
            request_id = self.engine.add(prompt_ids, params)
            self._outputs[request_id] = deque()
            return request_id

    def run(self, prompt_ids: list[int], params: SamplingParams) -> Iterator[Output]:
        """Queue a request at the first iteration, then yield its outputs."""
        yield from self.outputs(self.add(prompt_ids, params))

    def outputs(self, request_id: str) -> Iterator[Output]:
        """Yield the outputs of a queued request. Closing the generator aborts the request."""
        try:
            finished = False
            while not finished:
                output = self._next(request_id)
                finished = output.finish_reason is not None
                yield output
        finally:
            self.drop(request_id)

    def drop(self, request_id: str) -> None:
        """Abort a request, unless it is finished, and forget its outputs.

        Python may call this during a step, when it collects a stream. The lock is taken then, and
        the next call that takes the lock aborts the request.
        """
        self._dropped.append(request_id)
        if self._lock.acquire(blocking=False):
            try:
                self._abort_dropped()
            finally:
                self._lock.release()

    def _next(self, request_id: str) -> Output:
        """The next output of a request; runs steps until there is one."""
        while True:
            with self._lock:
                self._abort_dropped()
                if self._outputs[request_id]:
                    return self._outputs[request_id].popleft()
                for output in self.engine.step():
                    if output.request_id in self._outputs:
                        self._outputs[output.request_id].append(output)

    def _abort_dropped(self) -> None:
        while self._dropped:
            request_id = self._dropped.popleft()
            self._outputs.pop(request_id, None)
            self.engine.abort(request_id)


class EngineStream(Stream):
    """A stream whose tokens come from an engine, which may run other requests too."""

    def __init__(self, outputs: Iterator[Output], params: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason = "length"
        self._logprobs: list[Sample] = []
        self._params = params
        self._pieces = outputs

    def __iter__(self) -> Iterator[str]:
        for output in self._pieces:
            if output.finish_reason == "abort":
                raise RuntimeError("the request has ended: a step of the engine failed")
            self.token_ids.append(output.token_id)
            self._logprobs.append(output.sample)
            self.finish_reason = output.finish_reason or "length"
            if output.text:
                self.text += output.text
                yield output.text


@contextmanager
def single_sequence() -> Iterator[None]:
    """Within the `with` block an LLM runs each prompt by itself, with a new cache: the loop of
    generate_tokens. For comparisons, and for the answers to the days before the engine."""
    token = _single_sequence.set(True)
    try:
        yield
    finally:
        _single_sequence.reset(token)


_single_sequence: ContextVar[bool] = ContextVar("single_sequence", default=False)


Prompt = str | Sequence[int]  # text, or token ids, which are used unchanged


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. Raises ValueError for anything else."""
    if not isinstance(prompts, str) and not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts must be text, token ids, or a list of them, got {prompts!r}")
    single = isinstance(prompts, str) or (len(prompts) and not isinstance(prompts[0], Sequence))
    return [prompts] if single else list(prompts)


class LLM:
    """A model, its tokenizer and a kind of cache: the public interface of the engine."""

    def __init__(
        self,
        source: str | Path = "smollm2",
        dtype: str | torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        cache: str | None = "paged",
        quantization: str | None = None,
        num_blocks: int | None = None,
    ) -> None:
        """source, dtype, device, quantization as for load_model; cache "paged", "naive", or None
        for no cache.

        With "paged", all prompts share one pool of num_blocks blocks, by default as many as
        default_num_blocks says. Otherwise each prompt runs by itself.
        """
        if cache is not None and cache not in CACHES:
            known = ", ".join(map(repr, CACHES))
            raise ValueError(f"cache {cache!r} is not known; supported: {known}, None")
        self.model = load_model(source, dtype, device, quantization)
        self.tokenizer = load_tokenizer(source)
        self._cache = cache
        self._shared = None
        if cache == "paged":
            self._shared = SharedEngine(Engine(self.model, self.tokenizer, num_blocks))

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        params: SamplingParams | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several. A prompt is text, or token ids, which are used unchanged.

        Several prompts run together. Raises ValueError, before the model runs, for a prompt that is
        empty or longer than the model's context, for an id outside the vocabulary, and for a prompt
        and max_tokens that need more blocks than the pool has.
        """
        checked = [self._prompt_ids(prompt) for prompt in prompts_of(prompts)]
        shared = self._engine()
        if shared is None:
            return [self.stream(ids, params).completion for ids in checked]
        params = SamplingParams() if params is None else params
        requests: list[str] = []
        try:
            for ids in checked:
                requests.append(shared.add(ids, params))
            streams = [EngineStream(shared.outputs(each), params) for each in requests]
            return [stream.completion for stream in streams]
        finally:
            for each in requests:
                shared.drop(each)

    def chat(
        self, messages: list[dict[str, str]], params: SamplingParams | None = None
    ) -> Completion:
        """Complete a conversation [{"role": "user", "content": …}, …]; errors as for generate."""
        return self.stream(self.chat_ids(messages), params).completion

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Complete one prompt as a stream of pieces of text; errors as generate, at once."""
        ids, params = self._prompt_ids(prompt), SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be a SamplingParams, got {params!r}")
        if (shared := self._engine()) is not None:
            shared.engine.check(ids, params)
            return EngineStream(shared.run(ids, params), params)
        tokens = min(len(ids) + params.max_tokens, self.model.config.context)
        cache = new_cache(self._cache, self.model, tokens)
        return Stream(self.model, self.tokenizer, ids, params, cache)

    def _engine(self) -> SharedEngine | None:
        """The engine that prompts share, a new one for a new `model`; None: each runs alone."""
        if self._shared is None or _single_sequence.get():
            return None
        if self._shared.engine.model is not self.model:
            num_blocks = self._shared.engine.num_blocks
            self._shared = SharedEngine(Engine(self.model, self.tokenizer, num_blocks))
        return self._shared

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The token ids of a conversation in the checkpoint's chat template."""
        return self.tokenizer.encode(self.tokenizer.render_chat(messages), parse_special=True)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            ids = self.tokenizer.prefix_ids + self.tokenizer.encode(prompt)
        else:
            ids = prompt
        return check_prompt(ids, self.model.config)
