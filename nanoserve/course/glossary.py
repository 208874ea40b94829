"""The words of the course: each with its meaning and the day that defines it."""

from __future__ import annotations

from dataclasses import dataclass

from nanoserve.course.exercise import CourseError


@dataclass(frozen=True)
class Term:
    """A term, in plain words; `day` is the first day that may use it."""

    term: str
    meaning: str
    day: int


# One entry per term; a line that is indented goes on with the entry above it.
_BY_DAY = {
    0: """
token: A piece of text, a word or a part of one, that the model reads and writes whole.
token id: The number that stands for a token: its row in the model's table of tokens.
vocabulary: All the tokens a model knows. SmolLM2's has 49,152.
parameter: One number that was learned in training and is fixed now. SmolLM2-135M has 135
    million.
tensor: An array of numbers with a shape and one type: here a PyTorch tensor.
dtype: The type of the numbers in a tensor, such as float32.
float32: A floating-point number in 4 bytes, with about 7 decimal digits.
inference: Running a trained model to get an answer. The model learns nothing from it.
oracle: A trusted answer to compare with. Ours is the transformers library on the same files.
nanoserve: The inference engine that you build here, and that you can import.
lands cell: A notebook cell whose code stands word for word in the package.
""",
    1: """
logits: The model's scores for the next token, one for each token of the vocabulary.
greedy: Taking the token with the highest score, every time.
prompt: The text a model is given to go on from.
context: The tokens that the model sees in a step, and the maximum number of them.
prefill: The first forward pass, which reads the whole prompt at once.
decode: Every later step: the model makes one more token from all tokens before it.
forward pass: One run of token ids through the whole model, up to the logits.
layer: One of the model's equal stages. SmolLM2-135M has 30 of them.
activation: A tensor that a model computes from its input, unlike the fixed parameters.
hook: A function that PyTorch calls when a part of a model has run; we use it to copy
    activations.
key: The vector by which attention finds a past token, in each layer.
value: The vector that a past token contributes when attention finds it.
attention: The step that mixes into each token a weighted sum of the values of earlier tokens.
KV cache: The kept keys and values of past tokens, so that they are computed only once. Built on
    Day 11.
FLOP: One floating-point operation: an addition or a multiplication.
latency: The time somebody waits for one result, here for one token.
throughput: How much gets done in a second, here in tokens per second.
checkpoint: A folder or file that holds a trained model: its parameters and how to read them.
""",
    2: """
config: The figures that fix a model's shape: how many layers, heads, dimensions and tokens.
hidden size: The length of the vector that stands for one token inside the model: 576 in
    SmolLM2.
head: One of the parts that attention is split into, each with its own queries, keys and values.
KV head: A head's keys and values. Several query heads can share one.
GQA: Grouped-query attention: fewer KV heads than query heads. SmolLM2 has 9 query heads and 3
    KV heads.
query head: A head's queries, which are compared with the keys.
embedding: The table with one row of numbers per token of the vocabulary.
tied head: A model whose last matrix is its embedding used again, so that it is stored once.
state dict: A dictionary from a parameter's name to its tensor.
safetensors: A file of named tensors that can be mapped into memory and contains no code.
GGUF: The file format of llama.cpp: configuration, tokens and quantised tensors in one file.
bfloat16: A floating-point number in 2 bytes: float32's range with about 3 decimal digits.
quantisation: Storing numbers in few bits, with some loss, to save memory and the time to read
    it.
block scale: The factor that a small run of quantised numbers shares, 32 of them in Q4_1.
Q4_1: A quantisation with 4 bits per number, and a scale and a minimum for every 32.
dequantise: To turn quantised numbers back into floating point.
memory map: Reading a file as if it were memory: a page is loaded when it is first touched.
RoPE: Rotary position embedding: it turns pairs of a query's or key's numbers by an angle that
    grows with the position. Built on Day 4.
permutation: A change of order. GGUF stores the rows of q and k in another order than Hugging
    Face.
shard: One of several files that a large checkpoint is cut into.
""",
    3: """
tokenizer: The code and tables that turn text into token ids and back.
UTF-8: The usual way to write text as bytes: one to four bytes per character.
code point: The number that Unicode gives to one character.
byte-level: Working on the bytes of the UTF-8 text, so that any script can be read.
BPE: Byte-pair encoding: start from bytes, and join the pair that training ranked first, again
    and again.
merge: One rule of BPE: these two pieces, side by side, become one.
pre-tokenizer: The splitter that cuts text into words before any merge; ours isolates every
    digit.
special token: A token that stands for no text and has a job, such as starting a message.
BOS: The special token that begins a sequence, for the models that need one.
EOS: The special token that ends an answer: generation stops there.
chat template: The recipe, in Jinja, that writes a list of messages as the text the model was
    trained on.
detokeniser: The part that turns token ids back into text. A streaming one holds back half a
    character until the rest comes.
streaming: Showing text while it is being made, piece by piece.
replacement character: The sign � that stands where bytes are no valid text.
round trip: Encoding a text and decoding the ids: the result must be the same text.
""",
    6: """
softmax: A function that turns scores into positive numbers that add up to 1. The largest score
    gets the largest share.
attention weight: The share of its attention that a query gives to one key.
causal mask: The rule that a token sees itself and what came before, never what comes after.
MHA: Multi-head attention: a KV head of its own for each query head.
MQA: Multi-query attention: one KV head for all query heads.
attention sink: A token, usually the first, that gets the attention that no other token needs.
""",
    7: """
residual stream: The vector of a token that runs through the whole model; each part adds to it.
decoder block: One layer: attention, then the MLP. Each reads the stream and adds its result.
pre-norm: Attention and the MLP each read a normed copy of the stream; the stream itself is not
    normed.
""",
    8: """
final norm: The norm between the last layer and the head: the only one that is applied to the
    stream itself.
logit lens: Applying final norm and head to the stream after an earlier layer, to see which token
    would be first there.
""",
    9: """
argmax: The position of the largest value: among logits, the id of the best token.
end token: A token that ends the text when it is chosen, such as EOS; a model can have several.
near tie: Two tokens whose logits are so close that rounding can change which one is best.
""",
    10: """
distribution: The probabilities of all tokens; together they are 1.
sampling: Choosing the next token at random, each with its probability.
temperature: The number that logits are divided by before softmax: below 1 sharpens the choice,
    above 1 flattens it.
top-k: Keeping the k most probable tokens and removing all others.
top-p: Keeping the fewest tokens that together hold the probability p; also called nucleus.
min-p: Keeping the tokens that are at least min_p times as probable as the best one.
logprob: The natural logarithm of a probability: 0 for certain, more negative for less likely.
seed: The number that a random generator starts from; the same seed gives the same draws.
repetition penalty: A factor that makes tokens less likely once they stand in the text.
chi-square: A sum that grows with the distance between counts and their expected values.
""",
    4: """
RMSNorm: Dividing a vector by its root mean square, then scaling each number by a learned weight.
epsilon: A small number added under a root, so that a vector of zeros is not divided by zero.
radian: The unit of angles here: a full turn is 2 pi of them, about 6.28.
wavelength: The number of tokens in which a RoPE pair turns once around.
RoPE scaling: Slowing some of a model's rotations, so that it can read longer texts than those of
    its first training.
relative position: The distance between two tokens, independent of where in the text they are.
""",
    5: """
MLP: The part of a layer that works on each token alone: wider, bent, and back to the hidden size.
activation function: A function that bends each number by itself, between two matrices.
SiLU: The activation function z times sigmoid(z): near 0 for negative z, near z for positive.
gate: A number that another number is multiplied by: near 0 it suppresses that number.
SwiGLU: An MLP with two matrices side by side, where the SiLU of one gates the other.
hidden unit: One of the numbers between the MLP's first two matrices and its last: 1,536 in
    SmolLM2.
""",
    11: """
seq_len: Of a cache: the number of tokens that it holds before this step.
query_len: The number of new tokens of a step; each has a query.
kv_len: The number of tokens whose keys and values a step uses: the cached ones and its own.
capacity: The number of tokens that a cache can hold before it must grow.
contiguous: Lying in one unbroken run of memory.
view: A tensor that shows another one's numbers without a copy of them.
continuation: A step of several tokens that follow cached ones, such as the next message of a chat.
""",
    12: """
stop string: A text that ends the answer when the model writes it, and is not shown.
finish reason: Why an answer ended: "stop" (an end token or a stop string) or "length".
time to first token: TTFT: the time from the request to the first token; prefill is most of it.
time per output token: TPOT: the time that each later token takes, on average.
""",
    13: """
bandwidth: The number of bytes that can be read from memory in a second.
peak bandwidth: The most that a machine reaches when it only reads memory: a limit for every step.
memory-bound: Limited by the time to read memory: faster arithmetic would save no time.
compute-bound: Limited by arithmetic: faster memory would save no time.
warm-up: A run before the clock starts, so that costs of the first run are not measured.
interleaved: Taking turns, so that a machine that slows down affects all variants alike.
tile: A part of a large computation that is done at once, such as 128 rows of a matrix.
""",
    14: """
slot: The place of one token's key and value, in every layer.
block: A fixed number of slots side by side, here 16, taken and given back as one.
pool: The memory of all blocks, shared by all sequences.
allocator: The part of a pool that records which blocks are free, and hands them out.
fragmentation: Memory that is reserved and stays empty, so that no other sequence can use it.
double free: Giving back a block that is already free. Two sequences would own it later.
invariant: A condition that must hold after every step.
""",
    15: """
block table: A sequence's blocks in the order of its text.
logical: Counted within the sequence: position 0, 1, 2, without a gap.
physical: Counted within the memory: the slot where a token lies.
atomic: All or nothing: a step that fails changes nothing.
""",
    16: """
slot mapping: The slot of each position of a sequence, oldest first, as a tensor.
scatter: To write rows to the places that a list of indices names.
gather: To copy rows from the places that a list of indices names, into one contiguous run.
""",
    17: """
leak: Memory that is no longer used and is never given back.
stale: Left over from an earlier owner of the memory.
poison: To fill free memory with NaN, so that every result computed from it is NaN too.
NaN: "Not a number": a float that makes every sum it enters NaN as well.
""",
    18: """
reference implementation: The plainest right code for one function. It may be slow; faster code is
    compared with it.
tolerance: How far an answer may be from the reference: a fixed part, and a part of the value.
byte-equal: The same in every bit, not only close.
float16: A floating-point number in 2 bytes: about 3 to 4 decimal digits, nothing above 65,504.
""",
    19: """
fused: Done in one operation instead of two with a copy between them.
plumbing: Code that passes the right arguments to the right function and computes nothing itself.
spy: A replacement for a function that records its calls, so that a test can check the plumbing.
""",
    20: """
memory traffic: All bytes that move: each read and each write, copies included.
sweep: The same measurement over a range of sizes.
baseline: The measured time that a later change has to beat.
""",
    21: """
kernel: A small program for many processors at once, started by a launch.
launch: To start a kernel on a grid of programs, its arguments handed over.
grid: All programs of a launch, numbered along one to three axes.
program: One run of a kernel's source. All run the same, and each knows its number.
lane: One place of a block of numbers that a program computes with at once.
pointer: A buffer and an offset into it: where something lies, not what it is.
stride: How many elements apart two neighbours along an axis of a tensor lie in memory.
mask: True or false for each lane: whether it takes part in a load or a store.
coalesced: Said of an access whose neighbouring lanes lie side by side in memory.
lockstep: All programs at once, each line for all of them before the next line.
sanitizer: A watchman over memory: it refuses what is outside, or was stored to by another program.
Triton: A language for kernels that looks like Python and is compiled for a graphics card.
""",
    23: """
backend: One of several ways to do the same thing, chosen while the program runs.
dispatch: To look at what was handed in, and pass it on to the code that can deal with it.
fallback: What runs where the first choice cannot.
override: An order from outside that takes the place of a choice the program would make.
compute capability: The generation of an NVIDIA card as a pair of numbers: a T4 has 7.5, an H200
    9.0. A compiler's target is named after it: sm_75, sm_90.
ahead of time: Compiled before anything runs, for a machine that need not be there.
PTX: NVIDIA's assembly language: what Triton writes before it becomes one card's machine code.
shared memory: Memory on the chip that all threads of one program can reach: 64 KiB on a T4.
""",
    22: """
online softmax: A softmax that meets its scores a few at a time, keeping the largest so far and the
    sum of exponentials under it, and corrects both when a larger score comes.
fold: To take in a new part by changing a small state, so that the part itself may be forgotten.
register: A place for one number inside a processor: the fastest memory there is, and the smallest.
reduction: Making one number of many: a sum, a maximum.
flash attention: Attention whose scores never reach memory (Dao et al. 2022): tile by tile, by an
    online softmax.
""",
    25: """
wiring test: A test of what is handed over and handed back, with a spy in the callee's place.
deviation: How far two ways to compute the same thing come apart.
""",
    24: """
power law: A growth of the form constant * length ** exponent: a straight line on log-log axes.
exponent: The power in a power law: with twice the length, the time grows by 2 ** exponent.
log-log: With both axes logarithmic, so that equal factors are equal distances.
least squares: The line for which the squared distances of all points to it add up to the least.
regime: A range in which one thing rules the time, such as a fixed cost, or the bytes.
extrapolate: To say from a fit what lies outside the range that was measured.
""",
    26: """
end to end: From the call that a user makes to its result, with everything that happens on the way.
asynchronous: Started now and done later: a card is handed work while the program goes on.
synchronise: To wait until a card has finished all that it was handed.
multiprocessor: One of the parts of a card that run programs side by side: an H200 has 132.
""",
}


def _parsed(day: int, text: str) -> list[Term]:
    entries = text.strip().replace("\n    ", " ").splitlines()
    return [Term(*entry.split(": ", 1), day) for entry in entries]


TERMS: tuple[Term, ...] = tuple(
    term for day, text in _BY_DAY.items() for term in _parsed(day, text)
)


def lookup(names: tuple[str, ...], day: int) -> list[Term]:
    """The named terms, in that order, or all that `day` defines.

    CourseError for a term that is unknown or that a later day defines.
    """
    if not names:
        return [term for term in TERMS if term.day == day]
    known = {term.term.lower(): term for term in TERMS}
    found = []
    for name in names:
        term = known.get(name.lower())
        if term is None:
            raise CourseError(f"the glossary has no term {name!r}")
        if term.day > day:
            raise CourseError(f"{name!r} is defined on day {term.day}, after day {day}")
        found.append(term)
    return found
