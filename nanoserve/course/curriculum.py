"""The days of the course as data: for the index, the map, the progress and the command line."""

from __future__ import annotations

from dataclasses import dataclass

from nanoserve.course.exercise import CourseError

PHASES = ("Foundations", "Correct generation", "Paged memory")


@dataclass(frozen=True)
class DayInfo:
    """A day. `needs` are the days that it builds on. `summary` is one sentence about its work."""

    number: int
    slug: str
    title: str
    week: int
    phase: int
    needs: tuple[int, ...]
    summary: str

    @property
    def stem(self) -> str:
        return f"day{self.number:02d}_{self.slug}"

    @property
    def notebook(self) -> str:
        return f"{self.stem}.ipynb"

    @property
    def phase_name(self) -> str:
        return PHASES[self.phase]


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
    ("paged_batch", "Many sequences, one launch", 7, 2, (27,),
     "You pack many sequences into one launch, each token found through a block table."),
    ("share_the_keys", "Share the keys", 7, 2, (28,),
     "You pack the queries of one KV head into a tile, so that each key is read once."),
    ("split_history", "Split the history", 7, 2, (29,),
     "You split one long sequence over the whole GPU and merge the partial results."),
    ("at_the_roof", "At the roof", 7, 2, (30,),
     "You tune tiles, warps and stages until eight shapes reach the peak bandwidth."),
)  # fmt: skip

DAYS: tuple[DayInfo, ...] = tuple(DayInfo(i, *row) for i, row in enumerate(_ROWS))


def find(day: int | str) -> DayInfo:
    """The day for 2, "2", "day02" or "day02_weights.ipynb"; CourseError if there is none."""
    text = str(day).strip().lower().removeprefix("day").partition("_")[0].partition(".")[0]
    if text.isdecimal() and int(text) < len(DAYS):
        return DAYS[int(text)]
    raise CourseError(f"there is no day {day!r}: the days are 0 to {len(DAYS) - 1}")


def last_of_week(number: int) -> bool:
    """Whether a day closes its week, and so has review questions."""
    later = DAYS[number + 1 : number + 2]
    return number > 0 and (not later or later[0].week != DAYS[number].week)
