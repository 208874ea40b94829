"""The engine: requests come and go, and each step is one forward pass for all that run."""

from collections.abc import Iterable, Mapping
from itertools import accumulate, count
from numbers import Integral

import torch

from nanoserve.cache import (
    BLOCK_SIZE,
    KVPool,
    PagedBatch,
    PagedKVCache,
    PrefixCache,
    SharedKVCache,
)
from nanoserve.config import ModelConfig
from nanoserve.engine.scheduler import PrefixScheduler, Scheduler
from nanoserve.engine.sequence import Output, Sequence
from nanoserve.model import Model
from nanoserve.sampling import SamplingParams, sample
from nanoserve.tokenizer import Tokenizer


def pack(step: Mapping[Sequence, int]) -> list[int]:
    """The token ids of a step: of each sequence, the next step[sequence] that its cache lacks.

    They lie one sequence after another, without padding.
    """
    ids = []
    for sequence, num_tokens in step.items():
        start = sequence.cache.seq_len
        ids += sequence.ids[start : start + num_tokens]
    return ids


def last_rows(query_lens: Iterable[int]) -> list[int]:
    """The row of each sequence's last token, where query_lens[i] rows belong to sequence i."""
    return [end - 1 for end in accumulate(query_lens)]


def step_logits(model: Model, step: Mapping[Sequence, int]) -> dict[Sequence, torch.Tensor]:
    """One forward pass over the tokens of a step, which moves them into the caches.

    Returns the logits of the next token, float32 [vocab], for each sequence whose tokens are now
    all computed. The head runs for these rows only. Raises KVCacheExhausted if the pool has too few
    free blocks; then nothing has changed.
    """
    batch = PagedBatch([sequence.cache for sequence in step], list(step.values()))
    with torch.inference_mode():  # as in next_logits: small operations start faster
        hidden = model.hidden(torch.tensor([pack(step)], device=model.device), batch)
    batch.commit()
    rows = dict(zip(step, last_rows(step.values()), strict=True))
    rows = {sequence: row for sequence, row in rows.items() if sequence.num_uncomputed == 0}
    if not rows:
        return {}
    logits = model.head(hidden[0, list(rows.values())]).float()  # [len(rows), vocab]
    return dict(zip(rows, logits, strict=True))


class Engine:
    """Runs many requests over one pool of blocks: add requests, then call step while has_work.

    An engine belongs to one thread.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        num_blocks: int | None = None,
        block_size: int = BLOCK_SIZE,
        max_num_seqs: int = 64,
        max_batch_tokens: int = 2048,
        prefix_sharing: bool = True,
    ) -> None:
        """num_blocks: the size of the pool, by default that of default_num_blocks.

        At most max_num_seqs requests run at a time, and max_batch_tokens tokens in a step. With
        prefix_sharing, the full blocks of equal prefixes are computed once. Without a tokenizer,
        outputs have no text. Raises ValueError if a number is below 1.
        """
        if num_blocks is None:
            num_blocks = default_num_blocks(model, block_size)
        self.model, self.tokenizer = model, tokenizer
        self.pool = KVPool(model.config, num_blocks, block_size, model.dtype, model.device)
        self.prefixes = PrefixCache(self.pool) if prefix_sharing else None
        if self.prefixes is None:
            self.scheduler = Scheduler(self.pool.allocator, max_num_seqs, max_batch_tokens)
        else:
            self.scheduler = PrefixScheduler(self.prefixes, max_num_seqs, max_batch_tokens)
        self._sequences: dict[str, Sequence] = {}
        self._aborted: list[Output] = []  # for the next step to return
        self._numbers = count()

    @property
    def num_blocks(self) -> int:
        """The number of blocks in the pool."""
        return self.pool.allocator.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that no request holds: free, or kept for their content."""
        cached = 0 if self.prefixes is None else self.prefixes.num_cached
        return self.pool.allocator.num_free + cached

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do or to return."""
        return bool(self._sequences or self._aborted)

    def check(self, prompt_ids: Iterable[int], params: SamplingParams) -> list[int]:
        """Return the prompt as a list of ids, or raise a ValueError for a request that cannot run.

        Raises for params of another type, stop strings without a tokenizer, the errors of
        check_prompt, and for a prompt that needs more blocks with its max_tokens than the pool has.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be a SamplingParams, got {params!r}")
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop strings {params.stop!r} need a tokenizer, and there is none")
        ids = check_prompt(prompt_ids, self.model.config)
        tokens = min(len(ids) + params.max_tokens, self.model.config.context)
        slots = self.num_blocks * self.pool.allocator.block_size
        if tokens > slots:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and max_tokens is {params.max_tokens}: the "
                f"request may need {tokens} slots, and the pool has {slots} (num_blocks is "
                f"{self.num_blocks})"
            )
        return ids

    def add(
        self, prompt_ids: Iterable[int], params: SamplingParams, request_id: str | None = None
    ) -> str:
        """Queue a request and return its id, by default a new one.

        Raises ValueError, and changes nothing, for the id of a request that is not finished and for
        a request that `check` refuses.
        """
        ids = self.check(prompt_ids, params)
        if request_id is None:
            names = (f"request-{number}" for number in self._numbers)
            request_id = next(name for name in names if name not in self._sequences)
        if request_id in self._sequences:
            raise ValueError(f"there is a request {request_id!r} already")
        limit = min(params.max_tokens, self.model.config.context - len(ids) + 1)
        shares = self.prefixes is not None
        cache = SharedKVCache(self.prefixes) if shares else PagedKVCache(self.pool)
        eos_ids = self.model.config.eos_ids
        sequence = Sequence(request_id, ids, params, cache, limit, eos_ids, self.tokenizer)
        self._sequences[request_id] = sequence
        self.scheduler.add(sequence)
        return request_id

    @torch.no_grad()
    def step(self) -> list[Output]:
        """Run one step. Returns an output for each request that got a token or was aborted.

        If a step raises an error, its requests are aborted.
        """
        step, outputs = self.scheduler.schedule(), []
        try:
            for sequence, logits in (step_logits(self.model, step) if step else {}).items():
                chosen = sample(
                    logits,
                    sequence.params,
                    sequence.generator,
                    sequence.prompt_ids,
                    sequence.output_ids,
                )
                outputs.append(sequence.accept(chosen))
        except BaseException:
            for sequence in step:
                self.abort(sequence.request_id)
            raise
        for output in outputs:
            if output.finish_reason is not None:
                self._end(self._sequences[output.request_id])
        aborted, self._aborted = self._aborted, []
        return aborted + outputs

    def abort(self, request_id: str) -> bool:
        """End a request: its blocks are free at once, and the next step returns its last output.

        Returns False, and does nothing, if no such request runs or waits.
        """
        if request_id not in self._sequences:
            return False
        self._end(self._sequences[request_id])
        self._aborted.append(Output(request_id, None, None, "", "abort"))
        return True

    def _end(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request_id]
        self.scheduler.remove(sequence)


def check_prompt(prompt_ids: Iterable[int], config: ModelConfig) -> list[int]:
    """Return the prompt as a list of integers.

    Raises ValueError for an id that is no integer or is outside the vocabulary, and for a prompt
    that is empty or longer than the model's context.
    """
    ids = []
    for i in prompt_ids:
        if isinstance(i, bool) or not isinstance(i, Integral):
            raise ValueError(f"a prompt must be text or integer token ids, got {i!r}")
        ids.append(int(i))
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


CONTEXTS, CPU_BYTES = 4, 1 << 30  # the default pool on a CPU: the smaller of the two
GPU_SHARE = 0.85  # of the memory that is free after loading


def default_num_blocks(model: Model, block_size: int = BLOCK_SIZE) -> int:
    """The number of blocks of an engine's pool: on a GPU, as many as GPU_SHARE of the free memory
    holds; elsewhere enough for CONTEXTS whole contexts, in at most CPU_BYTES."""
    config = model.config
    numbers = 2 * config.num_layers * config.n_kv * config.head_dim * block_size  # keys and values
    block_bytes = numbers * model.dtype.itemsize
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        return max(1, int(GPU_SHARE * free) // block_bytes)
    needed = CONTEXTS * -(-config.context // block_size)  # rounded up
    return max(1, min(needed, CPU_BYTES // block_bytes))
