"""Day 23: the launch of the kernel, and the choice of its backend."""

import torch

from nanoserve.course.exercise import Case, Exercise, exact, raises, wrong

N_Q, N_KV, HEAD_DIM, NUM_SLOTS = 6, 2, 8, 40
STRIDES = ("q_head", "q_seq", "k_slot", "k_head", "v_slot", "v_head", "out_head", "out_seq")


# launch_arguments -------------------------------------------------------------------------------


def launch_arguments(q, k_pool, v_pool, out):
    """The grid of paged_attention_kernel and the eight strides it takes."""
    grid = (q.shape[2], q.shape[1])
    strides = (*q.stride()[1:3], *k_pool.stride()[:2], *v_pool.stride()[:2], *out.stride()[1:3])
    return grid, strides


def named(got, expected) -> str | None:
    """As exact; the message names a wrong stride as the kernel does."""
    message = exact(got, expected)
    if message is None:
        return None
    pair = isinstance(got, tuple) and len(got) == 2 and all(isinstance(x, tuple) for x in got)
    if not pair or [len(x) for x in got] != [2, 8]:
        return message
    if got[0] != expected[0]:
        return f"the grid is {expected[0]}, got {got[0]}"
    wrong = [i for i in range(8) if got[1][i] != expected[1][i]]
    first = f"{STRIDES[wrong[0]]} is {expected[1][wrong[0]]}, got {got[1][wrong[0]]}"
    return f"{len(wrong)} of 8 strides differ: {first}" if len(wrong) > 1 else first


def _zeros(*shape: int, **kwargs) -> torch.Tensor:
    return torch.zeros(shape, **kwargs)


def _plain(query_len: int, **kwargs) -> tuple[torch.Tensor, ...]:
    """(q, k_pool, v_pool, out), each contiguous."""
    q = _zeros(1, N_Q, query_len, HEAD_DIM, **kwargs)
    k_pool, v_pool = _zeros(2, NUM_SLOTS, N_KV, HEAD_DIM, **kwargs)
    return q, k_pool, v_pool, torch.zeros_like(q)


def _view_of_projection() -> tuple[torch.Tensor, ...]:
    _, k_pool, v_pool, out = _plain(5)
    return _zeros(1, 5, N_Q, HEAD_DIM).transpose(1, 2), k_pool, v_pool, out


def _launch_cases() -> list[Case]:
    def both_in_one(answer, q, both, out):
        return answer(q, both[:, 0], both[:, 1], out)

    def wider(answer, wide, k_pool, v_pool, out):
        return answer(wide[..., :HEAD_DIM], k_pool, v_pool, out)

    q, k_pool, v_pool, out = _plain(5)
    heads_first = _zeros(N_KV, NUM_SLOTS, HEAD_DIM).transpose(0, 1)
    return [
        Case("decode: 1 query, all contiguous", _plain(1), kind="grid", compare=named),
        Case("prefill: 5 queries, all contiguous", _plain(5), kind="grid", compare=named),
        Case(
            "q as attention makes it, a view of [1, seq, heads, d]",
            _view_of_projection(),
            kind="strides",
            compare=named,
        ),
        Case(
            "k_pool and v_pool side by side in one [slots, 2, n_kv, d]",
            (q, _zeros(NUM_SLOTS, 2, N_KV, HEAD_DIM), out),
            kind="strides",
            compare=named,
            call=both_in_one,
        ),
        Case(
            "a v_pool that lies head by head",
            (q, k_pool, heads_first, out),
            kind="strides",
            compare=named,
        ),
        Case(
            "q as the first 8 of 14 channels",
            (_zeros(1, N_Q, 5, 14), k_pool, v_pool, out),
            kind="strides",
            compare=named,
            call=wider,
        ),
        Case("float16", _plain(3, dtype=torch.float16), kind="units", compare=named),
    ]


def _changed(q, k_pool, v_pool, out, /, **parts):
    """The right launch with some of its parts replaced."""
    grid, strides = launch_arguments(q, k_pool, v_pool, out)
    right = {"grid": grid, "q": strides[:2], "k": strides[2:4], "v": strides[4:6]}
    right = right | {"out": strides[6:]} | parts
    return right["grid"], (*right["q"], *right["k"], *right["v"], *right["out"])


@wrong(
    "The grid's axes are exchanged: axis 0 is the query and axis 1 the query head, so that program "
    "(5, 0) is query 5 of head 0."
)
def _grid_turned(q, k_pool, v_pool, out):
    return _changed(q, k_pool, v_pool, out, grid=(q.shape[1], q.shape[2]))


@wrong(
    "That is a program per KV head. This kernel has a program per query head, which computes its "
    "KV head as head // N_REP."
)
def _grid_of_kv_heads(q, k_pool, v_pool, out):
    return _changed(q, k_pool, v_pool, out, grid=(q.shape[2], k_pool.shape[1]))


@wrong(
    "The grid has one axis: the kernel uses program_id(0) and program_id(1), and program_id(1) "
    "would be 0 in every program."
)
def _grid_flat(q, k_pool, v_pool, out):
    return _changed(q, k_pool, v_pool, out, grid=(q.shape[2] * q.shape[1],))


@wrong(
    "That is a program per channel. Channels are lanes within a program, BLOCK_D of them, and no "
    "axis of the grid."
)
def _grid_of_channels(q, k_pool, v_pool, out):
    return _changed(q, k_pool, v_pool, out, grid=(q.shape[2], q.shape[1], q.shape[3]))


@wrong(
    "These strides are computed from shapes, as if every tensor were contiguous. A view has "
    "strides of its own: call tensor.stride()."
)
def _from_shapes(q, k_pool, v_pool, out):
    query_len, d, n_kv = q.shape[2], q.shape[3], k_pool.shape[1]
    head, slot = (query_len * d, d), (n_kv * d, d)
    return _changed(q, k_pool, v_pool, out, q=head, k=slot, v=slot, out=head)


@wrong(
    "These are q's strides along its batch and head axes. q is [1, n_q, query_len, head_dim]: the "
    "kernel moves along axes 1 and 2.",
    hints="strides",
)
def _axes_0_and_1(q, k_pool, v_pool, out):
    return _changed(q, k_pool, v_pool, out, q=q.stride()[:2], out=out.stride()[:2])


@wrong(
    "q's and out's strides come as (sequence, head). The kernel's parameters are q_head, then "
    "q_seq: the order of the axes.",
    hints="strides",
)
def _sequence_first(q, k_pool, v_pool, out):
    return _changed(q, k_pool, v_pool, out, q=q.stride()[2:0:-1], out=out.stride()[2:0:-1])


@wrong(
    "The pools' strides come as (head, slot). A pool is [num_slots, n_kv, head_dim], and the "
    "kernel takes k_slot first.",
    hints="strides",
)
def _head_before_slot(q, k_pool, v_pool, out):
    return _changed(q, k_pool, v_pool, out, k=k_pool.stride()[1::-1], v=v_pool.stride()[1::-1])


@wrong(
    "v_pool gets k_pool's strides. The two have one shape, and may have different strides: call "
    "stride() of each."
)
def _keys_for_values(q, k_pool, v_pool, out):
    return _changed(q, k_pool, v_pool, out, v=k_pool.stride()[:2])


@wrong("out gets q's strides. out is a tensor of its own, and contiguous where q may be a view.")
def _query_for_out(q, k_pool, v_pool, out):
    return _changed(q, k_pool, v_pool, out, out=q.stride()[1:3])


@wrong(
    "These are bytes. Strides are counted in elements, as tensor.stride() returns them; Triton "
    "multiplies by the element's size.",
    hints="units",
)
def _bytes(q, k_pool, v_pool, out):
    grid, strides = launch_arguments(q, k_pool, v_pool, out)
    return grid, tuple(step * q.element_size() for step in strides)


@wrong(
    "These are sizes, the numbers of entries along an axis. A stride is the distance in memory "
    "between two neighbours along an axis.",
    hints="strides",
)
def _sizes(q, k_pool, v_pool, out):
    pools = (*k_pool.shape[:2], *v_pool.shape[:2])
    grid, _ = launch_arguments(q, k_pool, v_pool, out)
    return grid, (*q.shape[1:3], *pools, *out.shape[1:3])


@wrong(
    "The strides of head_dim are among them. The kernel takes eight: it adds `dim` as it is, since "
    "channels lie side by side.",
    hints="strides",
)
def _channels_too(q, k_pool, v_pool, out):
    grid, _ = launch_arguments(q, k_pool, v_pool, out)
    tails = (q.stride()[1:], k_pool.stride(), v_pool.stride(), out.stride()[1:])
    return grid, tuple(step for tail in tails for step in tail)


@wrong(
    "14 strides; the kernel takes 8: none for the batch, which is 1, and none for channels, which "
    "lie side by side.",
    hints="strides",
)
def _all_strides(q, k_pool, v_pool, out):
    grid, _ = launch_arguments(q, k_pool, v_pool, out)
    return grid, (*q.stride(), *k_pool.stride(), *v_pool.stride(), *out.stride())


LAUNCH = Exercise(
    "launch_arguments",
    _launch_cases,
    hints={
        "grid": (
            "How many programs does the kernel have, and which axis of the grid is which?",
            "Read its first two lines: program_id(0) is the query, program_id(1) the query head. "
            "q is [1, n_q, query_len, head_dim].",
            "grid = (q.shape[2], q.shape[1])",
        ),
        "strides": (
            "Does the shape of a tensor say where its rows lie?",
            "No: a view uses the memory of the tensor that it was made from. Each tensor's "
            "stride() is a tuple, one number per axis. Of q and out you need axes 1 and 2, of the "
            "pools axes 0 and 1.",
            "strides = (*q.stride()[1:3], *k_pool.stride()[:2], *v_pool.stride()[:2], "
            "*out.stride()[1:3])",
        ),
        "units": (
            "In which unit does a kernel count offsets?",
            "In elements, as tensor.stride() does. The pointer's type gives the bytes of an "
            "element.",
            "Pass the strides as they are, with no element_size().",
        ),
    },
    solution=launch_arguments,
    wrong=(
        _grid_turned, _grid_of_kv_heads, _grid_flat, _grid_of_channels, _from_shapes,
        _axes_0_and_1, _sequence_first, _head_before_slot, _keys_for_values, _query_for_out,
        _bytes, _sizes, _channels_too, _all_strides,
    ),
)  # fmt: skip


# choose -----------------------------------------------------------------------------------------

BACKENDS = ("triton", "tlsim", "reference")


def choose(device_type, has_triton, capability, override=None):
    """The backend for a device: "triton", "tlsim" or, by override, "reference"."""
    able = device_type == "cuda" and has_triton and capability >= (7, 5)
    if override is None:
        return "triton" if able else "tlsim"
    if override not in BACKENDS:
        raise ValueError(f"there is no backend {override!r}")
    if override == "triton" and not able:
        raise ValueError(f'"triton" cannot run on {device_type} here')
    return override


def _choose_cases() -> list[Case]:
    def case(what: str, kind: str, *args) -> Case:
        return Case(what, args, kind=kind)

    def refused(what: str, *args) -> Case:
        return Case(what, args, kind="refuse", expected=raises(ValueError, args[-1]))

    return [
        case("an H200, capability 9.0", "gpu", "cuda", True, (9, 0)),
        case("a T4, capability 7.5", "gpu", "cuda", True, (7, 5)),
        case("an L4, capability 8.9", "gpu", "cuda", True, (8, 9)),
        case("a B200, capability 10.0", "gpu", "cuda", True, (10, 0)),
        case("a V100, capability 7.0", "gpu", "cuda", True, (7, 0)),
        case("a Jetson Xavier, capability 7.2", "gpu", "cuda", True, (7, 2)),
        case("a P40, capability 6.1", "gpu", "cuda", True, (6, 1)),
        case("an H200 where Triton is missing", "elsewhere", "cuda", False, (9, 0)),
        case("the CPU, Triton installed", "elsewhere", "cpu", True, None),
        case("the CPU of a Windows laptop", "elsewhere", "cpu", False, None),
        case("the CPU of a machine that has an H200", "elsewhere", "cpu", True, (9, 0)),
        case("a Mac's GPU, were Triton there", "elsewhere", "mps", True, None),
        case('an H200, override "tlsim"', "override", "cuda", True, (9, 0), "tlsim"),
        case('the CPU, override "reference"', "override", "cpu", True, None, "reference"),
        case('an L4, override "triton"', "override", "cuda", True, (8, 9), "triton"),
        case('a T4, override "triton"', "override", "cuda", True, (7, 5), "triton"),
        refused('the CPU, override "triton"', "cpu", True, None, "triton"),
        refused('the CPU beside an H200, override "triton"', "cpu", True, (9, 0), "triton"),
        refused('a V100, override "triton"', "cuda", True, (7, 0), "triton"),
        refused('no Triton, override "triton"', "cuda", False, (9, 0), "triton"),
        refused('an H200, override "cuda"', "cuda", True, (9, 0), "cuda"),
    ]


def _by(able, override, *, reject=True, known=BACKENDS):
    """The right choice for a device that is able to run Triton, or not."""
    if override is None:
        return "triton" if able else "tlsim"
    if reject and override not in known:
        raise ValueError(f"there is no backend {override!r}")
    if reject and override == "triton" and not able:
        raise ValueError('"triton" cannot run here')
    return override


@wrong(
    "Triton is chosen wherever it is installed, for tensors on the CPU too. It compiles for GPUs: "
    "a launch on CPU tensors fails."
)
def _wrong_device(device_type, has_triton, capability, override=None):
    return _by(has_triton and (capability is None or capability >= (7, 5)), override)


@wrong(
    "The device is ignored: any machine with a GPU gets Triton. Tensors can lie on the CPU of a "
    'machine that has an H200, where Triton cannot load them: compare with "cuda" too.'
)
def _device_forgotten(device_type, has_triton, capability, override=None):
    return _by(has_triton and capability is not None and capability >= (7, 5), override)


@wrong(
    "Every device but the CPU is taken for an NVIDIA GPU. A Mac's GPU is not one, and has no "
    'capability: compare with "cuda".'
)
def _not_the_cpu(device_type, has_triton, capability, override=None):
    able = device_type != "cpu" and has_triton and (capability is None or capability >= (7, 5))
    return _by(able, override)


@wrong("has_triton is ignored: a GPU alone is not enough, Triton must be installed as well.")
def _triton_forgotten(device_type, has_triton, capability, override=None):
    return _by(device_type == "cuda" and capability >= (7, 5), override)


@wrong("The capability is ignored: an older GPU gets Triton, which fails at the first launch.")
def _any_gpu(device_type, has_triton, capability, override=None):
    return _by(device_type == "cuda" and has_triton, override)


@wrong(
    'The capability is compared as text, where "10.0" comes before "7.5": the newest GPUs get '
    "tlsim. "
    "Compare the pair with (7, 5)."
)
def _as_text(device_type, has_triton, capability, override=None):
    able = device_type == "cuda" and has_triton
    return _by(able and "{}.{}".format(*capability) >= "7.5", override)


@wrong(
    "The capability is a pair, and Python does not compare a pair with the number 7.5. Compare "
    "with the pair (7, 5)."
)
def _as_float(device_type, has_triton, capability, override=None):
    return _by(device_type == "cuda" and has_triton and capability >= 7.5, override)


@wrong(
    "Both parts of the capability have a limit of their own, so that 9.0 fails for its 0. Python "
    "compares pairs like words: the second part counts only where the first is equal."
)
def _part_by_part(device_type, has_triton, capability, override=None):
    able = device_type == "cuda" and has_triton
    return _by(able and capability[0] >= 7 and capability[1] >= 5, override)


@wrong("Only the first part of the capability is compared, so a V100 (7.0) passes as a T4 does.")
def _major_only(device_type, has_triton, capability, override=None):
    return _by(device_type == "cuda" and has_triton and capability[0] >= 7, override)


@wrong("A T4 has exactly (7, 5), the smallest that is allowed: `>` refuses it, `>=` does not.")
def _above(device_type, has_triton, capability, override=None):
    return _by(device_type == "cuda" and has_triton and capability > (7, 5), override)


@wrong(
    "The override is ignored. It exists to compare two backends on one machine, and comes first."
)
def _override_ignored(device_type, has_triton, capability, override=None):
    return choose(device_type, has_triton, capability)


@wrong(
    'The override counts on the CPU alone. On a GPU it counts as well: with "tlsim" one compares '
    "the two there."
)
def _gpu_decides(device_type, has_triton, capability, override=None):
    able = device_type == "cuda" and has_triton and capability >= (7, 5)
    return _by(able, None if able and override in BACKENDS else override)


@wrong('A third backend exists, by override alone: "reference", the oracle.')
def _two_only(device_type, has_triton, capability, override=None):
    able = device_type == "cuda" and has_triton and capability >= (7, 5)
    return _by(able, override, known=("triton", "tlsim"))


@wrong(
    "An override that cannot run falls back in silence. The caller then measures tlsim and takes "
    "it for Triton: raise ValueError."
)
def _silent_fallback(device_type, has_triton, capability, override=None):
    able = device_type == "cuda" and has_triton and capability >= (7, 5)
    return _by(able, "tlsim" if override == "triton" and not able else override)


@wrong(
    "The override is returned unchecked: an unknown name too, and Triton where it cannot run. "
    "Raise ValueError here, not in the launch."
)
def _override_unseen(device_type, has_triton, capability, override=None):
    able = device_type == "cuda" and has_triton and capability >= (7, 5)
    return _by(able, override, reject=False)


@wrong(
    'Without an override this raises where Triton cannot run. Return "tlsim" there, so that the '
    "engine runs.",
    hints="elsewhere",
)
def _no_fallback(device_type, has_triton, capability, override=None):
    return choose(device_type, has_triton, capability, override or "triton")


@wrong(
    "The fallback is the oracle, and then no independent result is left to check the engine with. "
    'Fall back to "tlsim", which runs the kernel.',
    hints="elsewhere",
)
def _oracle_as_fallback(device_type, has_triton, capability, override=None):
    found = choose(device_type, has_triton, capability, override)
    return "reference" if found == "tlsim" and override is None else found


CHOOSE = Exercise(
    "choose",
    _choose_cases,
    hints={
        "gpu": (
            "A capability is a pair of numbers. How are pairs compared?",
            "Python compares tuples from the left: (10, 0) >= (7, 5), (7, 0) < (7, 5). No text, no "
            "decimal number.",
            "able = device_type == 'cuda' and has_triton and capability >= (7, 5)",
        ),
        "elsewhere": (
            "Three conditions must hold for Triton. Which one fails here, and which backend runs "
            "then?",
            'The device must be "cuda", Triton installed, the GPU new enough. Test in this order: '
            "without a GPU the capability is None. If any fails, return tlsim.",
            'return "triton" if able else "tlsim", with able false before the capability is read',
        ),
        "override": (
            "Which argument decides first?",
            "The override, where there is one: test it before anything else is returned.",
            "if override is not None and it can run: return override",
        ),
        "refuse": (
            "Which overrides are errors?",
            "A name that is none of the three, and triton where Triton cannot run. Both are "
            "ValueErrors that name the override.",
            'if override == "triton" and not able: raise ValueError(f\'"triton" cannot run on '
            "{device_type}')",
        ),
    },
    solution=choose,
    wrong=(
        _wrong_device, _device_forgotten, _not_the_cpu, _triton_forgotten, _any_gpu,
        _as_text, _as_float, _part_by_part, _major_only, _above, _override_ignored,
        _gpu_decides, _two_only,
        _silent_fallback, _override_unseen, _no_fallback, _oracle_as_fallback,
    ),
)  # fmt: skip

EXERCISES = (LAUNCH, CHOOSE)
