"""The course as data: its days and its appendices, for the index, the progress and the commands.

An appendix is a notebook like a day. Its number is a letter. It belongs behind a day: the code that
it lands extends that day's code, and later days build on both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nanoserve.course.exercise import CourseError

PHASES = (
    "Foundations",
    "Correct generation",
    "Paged memory",
    "Fewer bytes",
    "Many requests",
    "A service",
)

Number = int | str  # 7 is Day 7, "a" is Appendix A


@dataclass(frozen=True)
class DayInfo:
    """A day or an appendix. `needs` are the days that it builds on. `summary` is one sentence about
    its work."""

    number: Number
    slug: str
    title: str
    week: int
    phase: int
    needs: tuple[int, ...]
    summary: str

    @property
    def is_appendix(self) -> bool:
        return isinstance(self.number, str)

    @property
    def stem(self) -> str:
        return f"{key(self.number)}_{self.slug}"

    @property
    def notebook(self) -> str:
        return f"{self.stem}.ipynb"

    @property
    def phase_name(self) -> str:
        return PHASES[self.phase]

    @property
    def sign(self) -> str:
        """Its number on the map: "7" or "A"."""
        return str(self.number).upper()

    @property
    def name(self) -> str:
        """Its name in a sentence: "Day 7" or "Appendix A"."""
        return name(self.number)


_ROWS = (
    # slug, title, week, phase, needs, summary
    ("start_here", "Start here", 0, 0, (),
     "The map of the days, how a day works, and a check that everything is in place."),
    ("oracle", "The oracle comes first", 1, 0, (),
     "You run a trusted model, count the work of one token and watch it grow with the length."),
    ("weights", "Weights are just names", 1, 0, (1,),
     "You read a model file, undo its packing and find every tensor equal to the oracle's."),
    ("tokenizer", "Text in, text out", 1, 0, (2,),
     "You turn text into token ids and back, without ever showing half a character."),
    ("rope", "RMSNorm and RoPE", 1, 0, (2,),
     "You write the norm before each layer and the rotation that encodes a token's position."),
    ("swiglu", "SwiGLU", 2, 0, (4,),
     "You write the gated MLP that holds most of a model's parameters."),
    ("attention", "Attention, with fewer KV heads", 2, 0, (4,),
     "You write attention in which nine query heads share three heads of keys and values."),
    ("block", "One block", 2, 0, (5, 6),
     "You join norm, attention and MLP with two residuals into one layer of the model."),
    ("model", "The whole forward pass", 2, 1, (7,),
     "You stack thirty blocks into a model whose logits equal the oracle's."),
    ("greedy", "Greedy, token for token", 2, 1, (3, 8),
     "You write the loop that makes text, and match the oracle for 64 tokens on ten prompts."),
    ("sampling", "Sampling", 3, 1, (9,),
     "You write temperature, top-k, top-p and min-p, ties and edges included."),
    ("kv_cache", "Remember the keys", 3, 1, (9,),
     "You store the keys and values of past tokens: the same tokens, less time per step."),
    ("generate", "One loop for both", 3, 1, (10, 11),
     "You write one generate loop with streaming and with stop strings that are never shown."),
    ("bench", "What the cache bought", 3, 1, (12,),
     "You measure the cache's speed-up and compare it with the curve of Day 1."),
    ("block_allocator", "A pool of blocks", 4, 2, (11, 13),
     "You hand out memory in small blocks, all or nothing."),
    ("block_table", "Logical to physical", 4, 2, (14,),
     "You write the table that maps a token's position to its block and slot."),
    ("paged_cache", "Real keys in scattered blocks", 4, 2, (15,),
     "You write keys and values into slots, gather them, and find them unchanged."),
    ("reuse", "Give it back", 4, 2, (16,),
     "You free blocks and use them again. Poison proves that no stale value is read."),
    ("reference", "Freeze the target", 5, 2, (6, 16, 17),
     "You write attention through the slot mapping: the oracle of every kernel."),
    ("fused_read", "The fused read", 5, 2, (18,),
     "You let the cache compute attention, with one branch in gqa_attention."),
    ("read_benchmark", "A number on the wall", 5, 2, (19,),
     "You time the gathered and the fused code path, from 16 to 4,096 tokens."),
    ("tlsim_grid", "A grid of programs", 6, 2, (16,),
     "You write a first kernel as a grid of programs. tlsim, a model of Triton in torch, runs it."),
    ("streaming_softmax", "The streaming softmax", 6, 2, (18, 21),
     "You fold a softmax tile by tile, and write the paged attention kernel with it."),
    ("dispatch", "The same source, compiled", 6, 2, (22,),
     "You launch one kernel source under three runtimes and choose the backend."),
    ("scaling", "Flat or climbing?", 6, 2, (20,),
     "You fit a line to a sweep of times on log-log axes, and say what it does not show."),
    ("one_line", "One line moves", 6, 2, (19, 23),
     "You move one line, and the kernel becomes the engine's attention."),
    ("runner", "Time the path you run", 6, 2, (24, 25),
     "You time paged attention as the cache runs it, after a check against the oracle."),
    ("roofline", "Find the roof", 7, 2, (26,),
     "You count bytes, measure the GPU's bandwidth and compare the kernel with it."),
    ("paged_batch", "Many sequences, one launch", 7, 2, (15, 18, 27),
     "You pack many sequences into one launch, each token found through a block table."),
    ("share_the_keys", "Share the keys", 7, 2, (28,),
     "You pack the queries of one KV head into a tile, so that each key is read once."),
    ("split_history", "Split the history", 7, 2, (29,),
     "You split one long sequence over the whole GPU and merge the partial results."),
    ("at_the_roof", "At the roof", 7, 2, (30,),
     "You choose tiles, warps and stages by measurement, and record a launch to replay it."),
    ("four_bits", "Keep the four bits", 8, 3, (2, 27),
     "You keep the weights in four bits, as the model's file has them, and count the bytes."),
    ("four_bit_kernel", "A kernel for four bits", 8, 3, (29, 32),
     "You write a matrix-vector product that unpacks four-bit weights in registers."),
    ("batched_step", "One forward for many", 9, 4, (28, 32),
     "You run the tokens of many requests through the model in one step, from one pool."),
    ("scheduler", "Continuous batching", 9, 4, (34,),
     "You admit requests and retire them between steps, and count the slots that stay idle."),
    ("chunked_prefill", "Chunked prefill", 9, 4, (35,),
     "You split a long prompt over steps, so that other requests continue."),
    ("preemption", "When memory runs out", 9, 4, (36,),
     "You choose a request to preempt, and resume it later with the same tokens."),
    ("shared_prefixes", "Shared prefixes", 10, 4, (37,),
     "You share the blocks of a common prompt, so that it is computed once."),
    ("no_waiting", "A step without waiting", 10, 4, (31, 38),
     "You sample a whole batch without waiting for the GPU, and capture the decode step."),
    ("serving_numbers", "The engine's numbers", 10, 4, (39,),
     "You measure throughput and latency percentiles while requests arrive at random."),
    ("api", "An API others already speak", 11, 5, (40,),
     "You answer the official client of a well-known API: models, completions, chat."),
    ("streams", "Streams, and people who leave", 11, 5, (41,),
     "You stream tokens to clients, and free the blocks of a client that disconnects."),
    ("under_load", "Under load", 11, 5, (42,),
     "You refuse requests in time when the queue is full, and draw a live dashboard."),
    ("chat_page", "Somebody talks to it", 11, 5, (43,),
     "You serve a chat page, and shut the service down without losing an answer."),
)  # fmt: skip

DAYS: tuple[DayInfo, ...] = tuple(DayInfo(i, *row) for i, row in enumerate(_ROWS))
APPENDICES: tuple[DayInfo, ...] = (
    DayInfo(
        "a", "inside_tlsim", "Inside tlsim", 6, 2, (22,),
        "You read the rest of tlsim: its rules for types, its checks, atomics and the trace.",
    ),
)  # fmt: skip
ALL: tuple[DayInfo, ...] = DAYS + APPENDICES


def key(number: Number) -> str:
    """The start of the names of its files: "day07" or "appendix_a"."""
    return f"day{number:02d}" if isinstance(number, int) else f"appendix_{number}"


def name(number: Number) -> str:
    """Its name in a sentence: "Day 7" or "Appendix A"."""
    return f"Day {number}" if isinstance(number, int) else f"Appendix {number.upper()}"


def position(number: Number) -> float:
    """Its place in the order of the course. An appendix follows the last day that it needs."""
    return number if isinstance(number, int) else max(find(number).needs) + 0.5


def number_in(file: str) -> Number | None:
    """7 for "day07_block.ipynb", "a" for "appendix_a_inside_tlsim"; None for another name."""
    match = re.match(r"day(\d+)_|appendix_([a-z])_", file)
    if match is None:
        return None
    return match[2] or int(match[1])


def find(day: Number) -> DayInfo:
    """The day for 2, "2", "day02" or "day02_weights.ipynb", and the appendix for "a", "appendix_a"
    or its file name; CourseError if there is none."""
    text = str(day).strip().lower()
    short = text.removeprefix("appendix").removeprefix("day").strip(" _")
    short = short.partition("_")[0].partition(".")[0]
    if short.isdecimal() and int(short) < len(DAYS):
        return DAYS[int(short)]
    for appendix in APPENDICES:
        if short == appendix.number and not text.startswith("day"):
            return appendix
    signs = ", ".join(appendix.sign for appendix in APPENDICES)
    asked = text if text.isdecimal() else repr(day)
    raise CourseError(
        f"there is no day {asked}: the days are 0 to {len(DAYS) - 1}, the appendix is {signs}"
    )


def last_of_week(number: Number) -> bool:
    """Whether a day closes its week, and so has review questions. An appendix closes none."""
    if isinstance(number, str):
        return False
    later = DAYS[number + 1 : number + 2]
    return number > 0 and (not later or later[0].week != DAYS[number].week)
