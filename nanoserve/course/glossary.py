"""The glossary: each term with its meaning and the day that defines it."""

from __future__ import annotations

from dataclasses import dataclass

from nanoserve.course.curriculum import Number, find, position
from nanoserve.course.exercise import CourseError


@dataclass(frozen=True)
class Term:
    """A term and its meaning. `day` is the first day, or the appendix, that may use the term."""

    term: str
    meaning: str
    day: Number


# One entry per term. An indented line continues the entry above it.
_BY_DAY = {
    0: """
token: A piece of text, a word or a part of a word. A model reads and writes whole tokens.
token id: The number of a token in the vocabulary.
vocabulary: All tokens of a model. SmolLM2 has 49,152.
parameter: A number that training set and that inference does not change. SmolLM2-135M has 135
    million.
tensor: An array of numbers with a shape and one dtype. Here: a PyTorch tensor.
dtype: The type of the numbers in a tensor, such as float32.
float32: A floating-point number in 4 bytes, with about 7 decimal digits.
inference: Running a trained model to get an output. Nothing is learned in the process.
oracle: A trusted implementation to compare with. Here: the transformers library on the same files.
nanoserve: The inference engine that you build in this course. It is a Python package.
lands cell: A notebook cell whose code stands word for word in the package.
""",
    1: """
logits: The model's scores for the next token: one score for each token of the vocabulary.
greedy: Always choosing the token with the highest score.
prompt: The text that you give to a model. The model continues it.
context: The tokens that a model can use in a step: the prompt and all tokens written so far. Each
    model has a maximum; SmolLM2's is 8,192 tokens.
prefill: The first forward pass. It processes the whole prompt at once.
decode: Each later step. It adds one token to the sequence.
forward pass: One run of token ids through the whole model, up to the logits.
layer: One of the equal stages of a model. SmolLM2-135M has 30.
activation: A tensor that a model computes from its input. A parameter, in contrast, is stored.
hook: A function that PyTorch calls after a part of a model has run. We use hooks to copy
    activations.
key: A vector of a token, one set in each layer. Attention compares the keys of past tokens with
    the new token.
value: A vector of a token, one set in each layer. Attention adds up the values of past tokens, each
    with a weight that comes from its key.
attention: The part of a layer in which a token takes information from the tokens before it.
KV cache: The stored keys and values of past tokens. With it, each is computed only once. Built on
    Day 11.
FLOP: One floating-point operation: an addition or a multiplication.
latency: The time that a user waits for one result. Here: for one token.
throughput: The amount of work done per second. Here: tokens per second.
checkpoint: A file or folder with a trained model: its parameters and its configuration.
""",
    2: """
config: The numbers that define a model's shape: layers, heads, dimensions, size of the vocabulary.
hidden size: The length of the vector that represents one token inside the model: 576 in
    SmolLM2.
head: One of several attention computations that run side by side in a layer.
KV head: A head of keys and values. Several query heads can share one KV head.
GQA: Grouped-query attention: several query heads share one KV head. SmolLM2 has 9 query heads and 3
    KV heads.
query head: A head of queries. A query is the vector of a token that is compared with the keys.
embedding: A table with one row of numbers for each token of the vocabulary.
tied head: An output matrix that is the embedding used again, so that the matrix is stored once.
state dict: A dictionary from the name of a parameter to its tensor.
safetensors: A file format for named tensors. Loading a file runs no code and can use a memory map.
GGUF: The one-file format of llama.cpp: configuration, vocabulary and quantised tensors together.
bfloat16: A floating-point number in 2 bytes: the range of float32, about 3 decimal digits.
quantisation: Storing numbers in fewer bits. It saves memory and reading time and loses some
    precision.
block scale: The factor that a group of quantised numbers shares. In Q4_1 a group has 32 numbers.
Q4_1: A quantisation with 4 bits per number, and a scale and a minimum for each group of 32.
dequantise: To turn quantised numbers back into floating-point numbers.
memory map: A way to read a file as if it were memory. The operating system loads each part of the
    file at its first use.
RoPE: Rotary position embedding: it rotates pairs of numbers in each query and key by an angle that
    grows with the position. Built on Day 4.
permutation: A change of order. GGUF stores the rows of q and k in another order than Hugging
    Face.
shard: One of several files that together hold a large checkpoint.
""",
    3: """
tokenizer: The code and tables that turn text into token ids, and token ids into text.
UTF-8: The usual encoding of text as bytes: one to four bytes per character.
code point: The number that Unicode gives to a character.
byte-level: Working on the bytes of the UTF-8 text. So every script can be encoded.
BPE: Byte-pair encoding: start from bytes, then join pairs of neighbours, the pair with the best
    rank first.
merge: One rule of BPE: a pair of neighbouring pieces becomes one piece.
pre-tokenizer: The code that splits text into words before any merge. Ours also makes each digit a
    word of its own.
special token: A token that marks something and stands for no text, such as the start of a message.
BOS: The special token at the beginning of a sequence. Some models need it, others do not.
EOS: The special token at the end of an answer. Generation stops there.
chat template: A Jinja template that turns a list of messages into the text format of the model's
    training.
detokeniser: The code that turns token ids into text. A streaming detokeniser keeps an incomplete
    character until its last byte arrives.
streaming: Showing text piece by piece while the model generates it.
replacement character: The character � that stands for bytes that are not valid text.
round trip: Encoding a text and decoding the result, which gives the same text.
""",
    4: """
RMSNorm: Divide a vector by its root mean square, then multiply each number by a learned weight.
epsilon: A small number that is added under a square root, so that no vector is divided by zero.
radian: A unit of angles. A full turn is 2 pi radians, about 6.28.
wavelength: The number of tokens in which a RoPE pair makes one full turn.
RoPE scaling: Slower rotations of some pairs, so that a model can read longer texts than those of
    its first training.
relative position: The distance between two tokens. It is the same wherever they are in the text.
""",
    5: """
MLP: The part of a layer that processes each token alone: a wider vector, a nonlinear function, then
    the hidden size again.
activation function: A nonlinear function of one number, applied to each number between two
    matrices.
SiLU: The activation function z * sigmoid(z): near 0 for very negative z, near z for large z.
gate: A number that multiplies another number. A gate near 0 removes that number.
SwiGLU: An MLP with two matrices side by side. The SiLU of the first product multiplies the second
    product.
hidden unit: One number of the wider vector inside the MLP. SmolLM2 has 1,536 in each layer.
""",
    6: """
softmax: A function from scores to weights: positive numbers that add up to 1. The largest score
    gets the largest weight.
attention weight: The softmax weight of one key for one query.
causal mask: The rule that a token uses itself and earlier tokens, and no later token.
MHA: Multi-head attention: each query head has its own KV head.
MQA: Multi-query attention: all query heads share one KV head.
attention sink: A token, usually the first, that gets large attention weights and adds little
    information.
""",
    7: """
residual stream: The vector of a token that passes through all layers. Each part of a layer adds its
    result to it.
decoder block: One layer: attention, then the MLP. Each reads the residual stream and adds its
    result.
pre-norm: Attention and the MLP read a normalised copy of the residual stream. The stream itself
    is not normalised.
""",
    8: """
final norm: The norm between the last layer and the output matrix. It is the last step before the
    logits.
logit lens: Final norm and output matrix, applied to the residual stream after an earlier layer. The
    result shows the best token at that layer.
""",
    9: """
argmax: The position of the largest value. For logits: the id of the best token.
end token: A token that ends the text when it is chosen, such as EOS. A model can have several.
near tie: Two tokens with almost equal logits. A rounding difference can change the best token.
""",
    10: """
distribution: The probabilities of all tokens. They add up to 1.
sampling: Choosing the next token at random, each token with its probability.
temperature: The number that divides the logits before softmax. Below 1 it makes likely tokens
    more likely, above 1 less likely.
top-k: Keeping the k most probable tokens.
top-p: Keeping the fewest tokens whose probabilities add up to at least p. Also called nucleus
    sampling.
min-p: Keeping the tokens that are at least min_p times as probable as the best token.
logprob: The natural logarithm of a probability: 0 for certain, more negative for less likely.
seed: The number that initialises a random generator. The same seed gives the same choices.
repetition penalty: A factor that lowers the scores of tokens that are already in the text.
chi-square: A sum that grows with the differences between counts and their expected values.
""",
    11: """
seq_len: The number of tokens that a cache holds before this step.
query_len: The number of new tokens in a step. Each new token has a query.
kv_len: The number of tokens whose keys and values a step uses: the tokens in the cache, this step's
    included.
capacity: The number of tokens that a cache can hold before it must grow.
contiguous: Stored in one range of memory, without gaps.
view: A tensor that shares the memory of another tensor. Nothing is copied.
continuation: A step with several new tokens after cached tokens, such as the next message of a
    chat.
""",
    12: """
stop string: A text that ends the generation when the model writes it. The user does not see it.
finish reason: The reason why generation ended: "stop" (an end token or a stop string) or "length".
time to first token: TTFT: the time from a prompt to its first new token. Most of it is prefill.
time per output token: TPOT: the average time of each token after the first.
""",
    13: """
bandwidth: The number of bytes per second that are read from memory or written to it.
peak bandwidth: The highest bandwidth of a machine. No step can read its bytes faster.
memory-bound: Limited by the bandwidth of the memory. Faster arithmetic would save no time.
compute-bound: Limited by arithmetic. Faster memory would save no time.
warm-up: A run before the measurement, so that one-time costs are not measured.
interleaved: Measured in turns (A, B, A, B), so that a slower moment of the machine affects all
    variants alike.
tile: A part of a large computation that is done at once, such as 128 rows of a matrix.
""",
    14: """
slot: The storage of one token's keys and values, in every layer.
block: A fixed number of neighbouring slots, here 16. The allocator gives out whole blocks.
pool: The memory of all blocks. All sequences share it.
allocator: The code that records which blocks are free, gives blocks out and takes them back.
fragmentation: Memory that is reserved but empty, and that no other sequence can use.
double free: Freeing a block that is already free. Later, two sequences would get the same block.
invariant: A condition that is true after every step.
""",
    15: """
block table: The list of a sequence's blocks, in the order of its tokens.
logical: Counted within the sequence: position 0, 1, 2 and so on, without gaps.
physical: Counted within the pool: the slot that stores a token.
atomic: All or nothing: a step that fails changes nothing.
""",
    16: """
slot mapping: A tensor with the slot of each position of a sequence, oldest position first.
scatter: To write rows to the places that a list of indices gives.
gather: To copy rows from the places that a list of indices gives into contiguous memory.
""",
    17: """
leak: Memory that is no longer used and was not freed.
stale: Written by an earlier owner of the memory, and no longer valid.
poison: To fill free memory with NaN, so that every result computed from it is NaN.
NaN: "Not a number": a float value. Every sum that contains it is NaN.
""",
    18: """
reference implementation: The simplest correct code for a function. It may be slow. Faster code is
    compared with it.
tolerance: The largest allowed difference from the reference: a fixed part, and a part relative to
    the value.
byte-equal: Equal in every bit.
float16: A floating-point number in 2 bytes: about 3 decimal digits, at most 65,504.
""",
    19: """
fused: Done in one operation instead of two operations with a copy between them.
plumbing: Code that passes the right arguments to the right function and computes nothing itself.
spy: A replacement for a function that records its calls. A test uses a spy to check the plumbing.
""",
    20: """
memory traffic: All bytes that are read and written, copies included.
sweep: The same measurement at several sizes.
baseline: A measured time. Later changes are compared with it.
""",
    21: """
kernel: A small program that a GPU runs many times in parallel. A launch starts it.
launch: To start a kernel: its arguments and a grid are passed to the device.
grid: All programs of a launch, numbered along one to three axes.
program: One run of a kernel's source. Each program of a launch has its own number.
lane: One element of a block of numbers that a program processes at once.
pointer: An address in memory: a buffer and an offset into it.
stride: The distance in memory, in elements, between two neighbours along one axis of a tensor.
mask: One boolean for each lane. A load or a store skips the lanes whose boolean is False.
coalesced: An access to memory whose neighbouring lanes use neighbouring addresses.
lockstep: An order of execution: all programs run one line, then all programs run the next line.
sanitizer: A check of each memory access. It refuses addresses outside a buffer, and a place that
    another program has already stored to.
Triton: A language for GPU kernels. It looks like Python, and a compiler turns it into machine code.
""",
    22: """
online softmax: A softmax that reads its scores part by part. It keeps the largest score so far and
    the sum of the exponentials, and rescales the sum when a larger score comes.
fold: To combine a new part with a small state. Afterwards the part is no longer needed.
register: Storage for one number inside a processor: the fastest memory, and the smallest.
reduction: Computing one number from many, such as a sum or a maximum.
flash attention: Attention that processes the scores tile by tile with an online softmax and never
    stores all of them in memory (Dao et al. 2022).
""",
    23: """
backend: One of several implementations of the same function: Triton, tlsim or the reference.
dispatch: To check the arguments of a call, and to pass the call on to the right implementation.
fallback: The implementation that runs where the first choice cannot run.
override: A setting from outside, such as an environment variable, that replaces an automatic
    choice.
compute capability: The generation of an NVIDIA GPU as a pair of numbers: a T4 has 7.5, an H200 has
    9.0. It names the compiler's target: sm_75, sm_90.
ahead of time: Compiled before anything runs. The target machine is not needed.
PTX: NVIDIA's assembly language. Triton compiles a kernel to PTX, then to the machine code of one
    GPU.
shared memory: Memory on the chip that all threads of one program can use: 64 KiB on a T4.
""",
    24: """
power law: Growth of the form constant * length ** exponent. It is a straight line on log-log axes.
exponent: The power in a power law. With twice the length, the time grows by 2 ** exponent.
log-log: With two logarithmic axes. Equal factors are equal distances.
least squares: The line with the smallest sum of squared distances to the points.
regime: A range in which one cost dominates the time, such as a fixed cost, or the bytes.
extrapolate: To use a fit outside the range that was measured.
""",
    25: """
wiring test: A test of the arguments and the results of a call, with a spy in place of the called
    function.
deviation: The difference between two computations of the same result.
""",
    26: """
end to end: From the user's call to its result, with all work in between.
asynchronous: Started now and finished later: the program continues while the GPU works.
synchronise: To wait until a GPU has finished all its work.
multiprocessor: One of the units of a GPU that run programs in parallel. An H200 has 132.
""",
    27: """
roofline: The highest speed of a computation on a device: the lower of two limits, the peak rate of
    arithmetic, and the peak bandwidth times the arithmetic intensity (Williams et al. 2009).
arithmetic intensity: Operations per byte that a computation must read, in FLOP per byte.
ridge point: The arithmetic intensity at which both limits of a roofline are equal. Below it a
    computation is memory-bound, above it compute-bound.
yardstick: A measured variant that is not in question, such as a library's, and that the others are
    compared with.
CUDA graph: A recorded list of kernel launches that a GPU runs again without the host's work. To
    record it is to capture, to run it is to replay.
L2 cache: The memory on a GPU's chip that all multiprocessors share, 50 MiB on an H200. What it
    holds is not read from the GPU's main memory.
""",
    28: """
ragged: With rows of different lengths. A ragged batch has sequences of different lengths.
padding: Entries that fill a row up to the length of the longest row. Nothing uses their results.
packed: Stored one after another without padding.
chunk: A part of a prompt that one step computes. The rest comes in other steps.
query_starts: For a packed batch, the row of q where the queries of each sequence start. One more
    entry at the end gives the number of rows.
block tables: For a batch, the block tables of all sequences as the rows of one tensor.
""",
    29: """
packed heads: The query heads that share a KV head, as the rows of one tile. One program computes
    them all and loads each key once.
tensor core: A unit of a GPU that multiplies two small matrices in one instruction. tl.dot uses it.
""",
    30: """
worker: A program that computes its share of the work, whatever objects the share belongs to.
log-sum-exp: The logarithm of a sum of exponentials. It is a softmax's divisor, kept as a logarithm
    so that it does not overflow.
partial softmax: The softmax over a part of the keys, with the log-sum-exp of their scores.
""",
    31: """
memory latency: The time from the moment a program asks for a number in memory until it arrives.
in flight: Requested from memory, and not yet arrived.
Little's law: In a queue, the number of things inside is the rate times the time that each stays
    (Little 1961). For memory: bytes in flight = bandwidth * latency.
pipeline stage: One of the tiles that a loop works on at the same time: one is computed while the
    next ones are loaded.
warp: 32 threads of a GPU that run in step. A program has one or more warps, which share its tiles.
""",
    32: """
nibble: Half a byte: four bits, a number from 0 to 15.
round to nearest: For each weight alone, take the nearest value that the format has. Other methods
    look at the weights of a layer together.
outlier: A number that is far larger than the others beside it.
perplexity: The number of equally likely tokens that a model hesitates between before each token of
    a text, on average: the exponential of the mean negative log probability. Lower is better.
""",
    33: """
matrix-vector product: A weight times one row of activations. It reads each number of the weight
    once, for two operations.
subnormal number: A float whose exponent bits are all 0. A float32 then is its digits, as an
    integer, times 2 ** -149.
bitcast: To read the same bits as another type. Nothing is converted.
""",
    34: """
request: A prompt and its sampling parameters, from the moment it arrives until its last token.
batch size: The number of sequences that one step computes together.
engine step: One forward pass of the engine, and the tokens that are chosen from it.
batch-invariant: Giving the same bits for a row whatever other rows are computed with it.
""",
    35: """
static batching: Running a fixed group of requests until the last of them has finished.
continuous batching: Admitting requests and retiring them between any two steps (Yu et al. 2022).
admit: To let a waiting request run, with the blocks that it needs.
retire: To take a finished request out of the batch and give its blocks back.
idle slot: A place in the batch that computes nothing in a step.
first come, first served: In the order of arrival.
""",
    36: """
token budget: The most tokens that one step may compute, of all requests together.
chunked prefill: A prefill in several steps, a chunk of the prompt in each (Agrawal et al. 2024).
inter-token latency: The time between two tokens of one request, as its reader sees it.
""",
    37: """
preempt: To interrupt a request that runs and give its blocks to another.
recomputation: Computing the keys and values of a preempted request again, all in a prefill.
swapping: Copying the blocks of a preempted request to other memory, and back later.
starve: To wait for ever, because others are always served first.
oversubscribe: To promise more than there is, because not everyone uses all of it at once.
""",
    38: """
prefix: The first tokens of a sequence.
system prompt: Instructions that a service puts before every conversation.
prefix sharing: Using one copy of the keys and values for sequences that begin with equal tokens.
chained hash: A hash of a block's tokens and of the hash of the block before it.
collision: Two different things with the same hash.
reference count: The number of tables that have a block.
cached block: A block that is in no table and keeps its content, to be found again.
evict: To take a cached block for other tokens: its content is lost.
least recently used: An order of eviction: first the block that nobody has used for longest.
cold: Of a request whose prefix is not in the cache. Warm: its prefix is.
""",
}


def _parsed(day: Number, text: str) -> list[Term]:
    entries = text.strip().replace("\n    ", " ").splitlines()
    return [Term(*entry.split(": ", 1), day) for entry in entries]


TERMS: tuple[Term, ...] = tuple(
    term for day, text in _BY_DAY.items() for term in _parsed(day, text)
)


def lookup(names: tuple[str, ...], day: Number) -> list[Term]:
    """The terms `names`, in that order. Without names, all terms that `day` defines.

    Raises CourseError for an unknown term and for a term that a later day defines.
    """
    if not names:
        return [term for term in TERMS if term.day == day]
    known = {term.term.lower(): term for term in TERMS}
    found = []
    for name in names:
        term = known.get(name.lower())
        if term is None:
            raise CourseError(f"the glossary has no term {name!r}")
        if position(term.day) > position(day):
            first, now = find(term.day).name, find(day).name
            raise CourseError(f"{first} defines {name!r}, and {first} comes after {now}")
        found.append(term)
    return found
