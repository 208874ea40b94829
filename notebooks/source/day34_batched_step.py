# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Day 34 · One forward for many
#
# Week 9 · Phase 4, many requests · you need: Day 28 (Many sequences, one launch), Day 32 (Keep the four bits)

# %% jupyter={"source_hidden": true}
# Set-up: on Colab, installs nanoserve in a minute or two. In your own clone it does nothing.
import importlib.util, subprocess, sys
from pathlib import Path

REPOSITORY = ""  # on GitHub, OWNER/NAME
if importlib.util.find_spec("nanoserve") is None:
    wheels = sorted(Path.cwd().glob("nanoserve-*.whl"), key=lambda wheel: wheel.stat().st_mtime)
    source = f"https://github.com/{REPOSITORY}/archive/refs/heads/main.zip" if REPOSITORY else None
    source = wheels[-1].as_uri() if wheels else source
    if source is None:
        raise ModuleNotFoundError("put a nanoserve-*.whl beside this notebook, then run again")
    pip = [sys.executable, "-m", "pip", "install", "-q", f"nanoserve[notebook] @ {source}"]
    done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"pip could not install nanoserve from {source}:\n{done.stdout}")
    importlib.invalidate_caches()

# %%
from nanoserve.course import day

today = day(34)

# %%
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F

from nanoserve.cache import PagedBatch, PagedKVCache
from nanoserve.layers import Cache, block, rms_norm
from nanoserve.model import Model
from nanoserve.sampling import Sample, SamplingParams, make_generator
from nanoserve.tokenizer import Detokenizer, StopStrings, Tokenizer


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/sequence.py: Output, Sequence
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


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/engine.py: pack
def pack(step: Mapping[Sequence, int]) -> list[int]:
    """The token ids of a step: of each sequence, the next step[sequence] that its cache lacks.

    They lie one sequence after another, without padding.
    """
    ids = []
    for sequence, num_tokens in step.items():
        start = sequence.cache.seq_len
        ids += sequence.ids[start : start + num_tokens]
    return ids


# %% jupyter={"source_hidden": true}
# lands in nanoserve/model.py: Model._angles, Model.hidden
class Model(Model):
    def _angles(self, seq: int, cache: Cache | None) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin at the positions of this step's tokens: [seq, head_dim] each.

        A cache with `positions`, as PagedBatch has, names the position of each token. Otherwise the
        tokens follow those in the cache.
        """
        if hasattr(cache, "positions"):
            cos, sin = self._rope(0, cache.tables.max_kv_len)
            return cos[cache.positions], sin[cache.positions]
        start = 0 if cache is None else cache.seq_len
        return self._rope(start, start + seq)

    def hidden(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """The final norm's output: ids [batch, seq] -> [batch, seq, hidden]; errors as __call__."""
        self._check(ids)
        cos, sin = self._angles(ids.shape[1], cache)
        x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
        for index, layer in enumerate(self.layers):
            x = block(x, layer, cos, sin, self.config, cache, index)
        return rms_norm(x, self.weights["model.norm.weight"], self.config.norm_eps)


# %% jupyter={"source_hidden": true}
# lands in nanoserve/engine/engine.py: last_rows, step_logits
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
    hidden = model.hidden(torch.tensor([pack(step)], device=model.device), batch)
    batch.commit()
    rows = dict(zip(step, last_rows(step.values()), strict=True))
    rows = {sequence: row for sequence, row in rows.items() if sequence.num_uncomputed == 0}
    if not rows:
        return {}
    logits = model.head(hidden[0, list(rows.values())]).float()  # [len(rows), vocab]
    return dict(zip(rows, logits, strict=True))
