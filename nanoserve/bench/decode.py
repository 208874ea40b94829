"""The decode benchmark: our loop in each format of the weights, transformers and llama.cpp."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from nanoserve.bench.correctness import WrongAnswer
from nanoserve.bench.timing import Clock, token_times
from nanoserve.cache import NaiveKVCache
from nanoserve.config import ModelConfig
from nanoserve.generate import generate_tokens, new_cache
from nanoserve.gguf_file import open_gguf
from nanoserve.layers import Cache
from nanoserve.model import Model
from nanoserve.oracle import Oracle
from nanoserve.sampling import SamplingParams
from nanoserve.weights import expected_shapes

# called with (prompt_ids, max_tokens, on_token); returns the generated token ids
DecodePath = Callable[[Sequence[int], int, Callable[[int], None]], list[int]]
# called with (prompt_ids, generated ids); returns whether the generated ids are right
TokenCheck = Callable[[Sequence[int], Sequence[int]], bool]


@dataclass(frozen=True)
class DecodeRow:
    """One code path on one prompt: time to first token and time per output token, in seconds."""

    path: str
    context: int  # tokens in the prompt
    ttft: float
    tpot: float


def decode_benchmark(
    paths: dict[str, DecodePath],
    reference: str,
    prompts: Sequence[Sequence[int]],
    tokens: int = 8,
    rounds: int = 3,
    clock: Clock = time.perf_counter,
    checks: Mapping[str, TokenCheck] | None = None,
) -> list[DecodeRow]:
    """Time each code path on each prompt, interleaved; rows hold medians over rounds and tokens.

    `paths` maps a name to a DecodePath, and `reference` is one of the names. Raises WrongAnswer if
    a code path's tokens differ from the reference's. A path with an entry in `checks` is checked by
    that function instead. The check is also the warm-up.
    """
    rows, checks = [], checks or {}
    for prompt in prompts:
        expected = paths[reference](prompt, tokens, lambda _: None)
        for name, path in paths.items():
            found = path(prompt, tokens, lambda _: None)
            right = checks[name](prompt, found) if name in checks else found == expected
            if not right:
                raise WrongAnswer(f"{name} and {reference} differ at prompt length {len(prompt)}")
        times: dict[str, list[list[float]]] = {name: [] for name in paths}
        for _ in range(rounds):
            for name, path in paths.items():
                run = lambda on_token, path=path: path(prompt, tokens, on_token)
                times[name].append(token_times(run, clock))
        for name, runs in times.items():
            first = median(run[0] for run in runs)
            steps = median(step for run in runs for step in run[1:])
            rows.append(DecodeRow(name, len(prompt), first, steps))
    return rows


def engine_path(model: Model, cached: bool) -> DecodePath:
    """Our own greedy loop with the contiguous cache, or without a cache."""
    return _loop(model, lambda _: NaiveKVCache(model.config) if cached else None)


def paged_path(model: Model) -> DecodePath:
    """Our own greedy loop with the paged cache, and the backend that select_backend chooses."""
    return _loop(model, lambda tokens: new_cache("paged", model, tokens))


def _loop(model: Model, empty_cache: Callable[[int], Cache | None]) -> DecodePath:
    def run(prompt: Sequence[int], tokens: int, on_token: Callable[[int], None]) -> list[int]:
        cache, ids = empty_cache(len(prompt) + tokens), []
        for chosen in generate_tokens(model, prompt, SamplingParams(max_tokens=tokens), cache):
            on_token(chosen.token_id)
            ids.append(chosen.token_id)
        return ids

    return run


def oracle_path(oracle: Oracle, cached: bool) -> DecodePath:
    """transformers' greedy generate, with its cache or without."""

    def run(prompt: Sequence[int], tokens: int, on_token: Callable[[int], None]) -> list[int]:
        return oracle.generate(prompt, tokens, cached, on_token, stop=False)

    return run


def near_greedy(model: Model, nats: float = 1.0) -> TokenCheck:
    """A check for code paths that round: each token is at most `nats` less probable than the best.

    The log-probabilities are those of `model`, along the tokens that the code path generated.
    """

    @torch.no_grad()
    def check(prompt: Sequence[int], found: Sequence[int]) -> bool:
        ids = torch.tensor([[*prompt, *found]], device=model.device)
        hidden = model.hidden(ids[:, :-1])[0, len(prompt) - 1 :]
        logits = model.head(hidden).float()  # [tokens, vocab], of each generated token
        chosen = logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return bool((chosen >= logits.amax(-1) - nats).all())

    return check


def llama_path(gguf: Path, context: int) -> DecodePath:
    """llama.cpp's greedy loop over the same file, with as many threads as PyTorch has here.

    `context` is the most tokens of a prompt and its answer. Raises ModuleNotFoundError without the
    package llama-cpp-python.
    """
    from llama_cpp import Llama

    threads = torch.get_num_threads()
    llama = Llama(
        str(gguf), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def run(prompt: Sequence[int], tokens: int, on_token: Callable[[int], None]) -> list[int]:
        ids: list[int] = []
        llama.reset()  # else it keeps what it computed for the same prompt
        for token_id in llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
            on_token(token_id)
            ids.append(token_id)
            if len(ids) == tokens:
                return ids
        return ids

    return run


def step_bytes(model: Model, context: int) -> int:
    """The bytes that one cached decode step of a model reads, in the formats that it keeps.

    As bytes_per_token, but for weights of any format: all but the embedding, unless it is the head.
    """
    embedding, head = (model.weights[f"{n}.weight"] for n in ("model.embed_tokens", "lm_head"))
    weights = sum(weight.nbytes for weight in model.weights.values() if weight is not embedding)
    weights += head.nbytes if head is embedding else 0
    return weights + _kv_bytes(model.config, context, model.dtype)


def gguf_bytes(gguf: Path, config: ModelConfig, context: int) -> int:
    """The bytes that a decode step of llama.cpp reads: the file's tensors, and K and V in float16.

    An embedding beside a head of its own is not counted.
    """
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in open_gguf(gguf).tensors}
    unread = sizes.get("token_embd.weight", 0) if "output.weight" in sizes else 0
    return sum(sizes.values()) - unread + _kv_bytes(config, context, torch.float16)


def _kv_bytes(config: ModelConfig, context: int, dtype: torch.dtype) -> int:
    return config.num_layers * 2 * context * config.n_kv * config.head_dim * dtype.itemsize


def bytes_per_token(config: ModelConfig, context: int, dtype: torch.dtype) -> int:
    """The bytes that one cached decode step must read: each weight once, and the cached K and V.

    `context` is the number of cached tokens. The step reads all of the head, tied to the embedding
    or not, and one row of the embedding, which is not counted.
    """
    # expected_shapes has the embedding and no head; both have the same size
    weights = sum(map(math.prod, expected_shapes(config).values()))
    cached = config.num_layers * 2 * context * config.n_kv * config.head_dim
    return (weights + cached) * dtype.itemsize
