"""Products with weights in four bits, which are unpacked in registers.

A weight [out, in] is numbers uint8 [out, in / 2], and scales and minimums bfloat16 [out, in / 32]:
value = number * scale + minimum. The low four bits of byte j are number 2j, the high ones 2j + 1.
"""

from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import torch

from nanoserve.kernels import tlsim
from nanoserve.kernels.dispatch import DTYPES, _can_overlap, _gpu, select_backend
from nanoserve.kernels.sizes import next_power_of_2

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS and Windows have no Triton: tlsim replaces it
    from nanoserve.kernels import tlsim as triton
    from nanoserve.kernels.tlsim import language as tl

GROUP = 32  # numbers that share a scale and a minimum
MOST_ROWS = 16


@triton.jit
def load_groups(
    tile,
    word_ptr,
    scale_ptr,
    minimum_ptr,
    num_out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """OUT rows of the weight, from row tile * OUT on; 0 in rows and groups that do not exist.

    Returns words [OUT, GROUPS, 4], scales and minimums [OUT, GROUPS]. A thread loads the four words
    of a group, 16 bytes.
    """
    out = (tile * OUT + tl.arange(0, OUT)).to(tl.int64)
    group = tl.arange(0, GROUPS)
    mask = (out < num_out)[:, None] & (group < IN // 32)[None, :]
    word = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    words_at = word_ptr + (out * (IN // 8))[:, None, None] + word[None]
    words = tl.load(words_at, mask[:, :, None], 0, eviction_policy="evict_first")
    # The third axis of the grid has one program, so this adds 0. But the compiler no longer sees
    # neighbours here: a thread loads the scale of its own group, not of eight groups in a row.
    at = (out * (IN // 32))[:, None] + (group.to(tl.int64) + tl.program_id(2))[None, :]
    scale = tl.load(scale_ptr + at, mask, 0.0, eviction_policy="evict_first")
    minimum = tl.load(minimum_ptr + at, mask, 0.0, eviction_policy="evict_first")
    return words, scale, minimum


@triton.jit
def dequant_matvec_kernel(
    x_ptr,  # [rows, in]
    word_ptr,  # int32 [out, in / 8], contiguous: 8 numbers each, the first in the lowest bits
    scale_ptr,  # [out, in / 32], contiguous
    minimum_ptr,  # [out, in / 32], contiguous
    y_ptr,  # [rows, out], contiguous
    num_out,
    x_row,
    IN: tl.constexpr,
    OUT: tl.constexpr,  # results of one iteration of the loop
    GROUPS: tl.constexpr,  # in / 32, padded to a power of two
    OVERLAP: tl.constexpr,  # start the next kernel early (CUDA's programmatic dependent launch)
):
    """y = x @ weight.T, row by row. Programs: [at most out / OUT, rows]. Sums in float32.

    Bits 4k to 4k + 3 of a word, the others 0, are as a float32 the subnormal number
    q * 2**(4k - 149): no conversion is needed. x has the factor 2**(88 - 4k), so that a product is
    q * x * 2**-61. This is exact for x from 2**-65 to 2**35.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    words, scale, minimum = load_groups(
        tl.program_id(0), word_ptr, scale_ptr, minimum_ptr, num_out, IN, OUT, GROUPS
    )
    group, place = tl.arange(0, GROUPS), tl.arange(0, 8)
    word = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    x_at = x_ptr + tl.program_id(1) * x_row + word[:, :, None] * 8 + place[None, None, :]
    x = tl.load(x_at, (group < IN // 32)[:, None, None], 0.0).to(tl.float32)  # [GROUPS, 4, 8]
    total = tl.sum(tl.sum(x, axis=2), axis=1) * 2.0**-61
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_out, OUT), tl.num_programs(0)):
        next_words, next_scale, next_minimum = (
            load_groups(  # these arrive while this tile is summed
                tile + tl.num_programs(0),
                word_ptr,
                scale_ptr,
                minimum_ptr,
                num_out,
                IN,
                OUT,
                GROUPS,
            )
        )
        dot = tl.zeros((OUT, GROUPS, 4), tl.float32)
        for k in tl.static_range(8):
            # Column k of x: adding -0.0 changes nothing, so the compiler leaves the sum out.
            x_k = tl.sum(tl.where((place == k)[None, None, :], x, -0.0), axis=2)
            if k < 5:
                bits = words & (15 << (4 * k))
                x_k = x_k * 2.0 ** (88 - 4 * k)
            else:  # a float32 has 23 bits for its digits
                bits = (words >> 12) & (15 << (4 * k - 12))
                x_k = x_k * 2.0 ** (100 - 4 * k)
            dot += bits.to(tl.float32, bitcast=True) * x_k[None]
        sums = scale.to(tl.float32) * tl.sum(dot, axis=2) + minimum.to(tl.float32) * total[None, :]
        y = tl.sum(sums, axis=1) * 2.0**61
        out = (tile * OUT + tl.arange(0, OUT)).to(tl.int64)
        tl.store(y_ptr + tl.program_id(1).to(tl.int64) * num_out + out, y, mask=out < num_out)
        words, scale, minimum = next_words, next_scale, next_minimum


@triton.jit
def dequant_rows_kernel(
    x_ptr,  # as for dequant_matvec_kernel
    word_ptr,
    scale_ptr,
    minimum_ptr,
    y_ptr,
    num_out,
    x_row,
    rows,
    IN: tl.constexpr,
    ROWS: tl.constexpr,  # rows, padded to 16
    OUT: tl.constexpr,
    WORDS: tl.constexpr,  # words of one iteration of the loop
):
    """y = x @ weight.T for 2 to 16 rows, by tensor cores. Programs: [out / OUT].

    Values are rounded to x's dtype, as in a dequantised weight. Sums in float32.
    """
    out = (tl.program_id(0) * OUT + tl.arange(0, OUT)).to(tl.int64)
    row = tl.arange(0, ROWS)
    acc = tl.zeros((OUT, ROWS), tl.float32)
    for start in range(0, IN // 8, WORDS):
        word = start + tl.arange(0, WORDS)
        used = word < IN // 8
        mask = (out < num_out)[:, None] & used[None, :]
        words = tl.load(word_ptr + (out * (IN // 8))[:, None] + word[None, :], mask, 0)
        at = (out * (IN // 32))[:, None] + (word // 4)[None, :]
        scale = tl.load(scale_ptr + at, mask, 0.0).to(tl.float32)
        minimum = tl.load(minimum_ptr + at, mask, 0.0).to(tl.float32)
        x_at = x_ptr + (row * x_row)[None, :] + (word * 8)[:, None]
        x_mask = used[:, None] & (row < rows)[None, :]
        for k in tl.static_range(8):
            x = tl.load(x_at + k, x_mask, 0.0)  # [WORDS, ROWS]
            number = (words >> (4 * k)) & 15
            values = (number.to(tl.float32) * scale + minimum).to(x.dtype)
            acc = tl.dot(values, x, acc, input_precision="ieee")
    y_at = y_ptr + (row * num_out)[None, :] + out[:, None]
    tl.store(y_at, acc, mask=(out < num_out)[:, None] & (row < rows)[None, :])


@dataclass(frozen=True)
class MatvecLaunch:
    """The launch parameters of a product with a weight in four bits.

    out: rows of the weight in one iteration, or one program; num_warps of 32 threads compute them.
    programs: at most so many for each multiprocessor; 0: as many as there is work for. words:
    those of one iteration of dequant_rows_kernel.
    """

    out: int
    num_warps: int
    programs: int = 0
    words: int = 0


# By compute capability and the largest `in`. The comments give what was measured on an H200 (9.0)
# in bfloat16, one row. The launches of 7.5 were compiled, not measured.
FEW_ROWS = {
    ((7, 5), 2_048): MatvecLaunch(4, 4, programs=4),
    ((7, 5), 16_384): MatvecLaunch(1, 8, programs=4),
    ((7, 5), 1 << 30): MatvecLaunch(1, 16, programs=2),
    ((9, 0), 2_048): MatvecLaunch(4, 4, programs=4),  # 16,384 x 2,048: 9.2 µs; 6 programs: 12.0
    ((9, 0), 16_384): MatvecLaunch(1, 8, programs=4),  # 2,048 x 8,192: 6.0 µs; 4 warps: 6.2
    ((9, 0), 1 << 30): MatvecLaunch(1, 16, programs=2),
}
# 16,384 x 2,048 with 5 to 16 rows: 47 to 49 µs; 4 warps and 64 words: 62.
MANY_ROWS = {(7, 5): MatvecLaunch(16, 1, words=32)}
FEW = 4  # up to so many rows, the product row by row was faster


def dequant_matvec(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> torch.Tensor:
    """x [rows, in] times a weight [out, in] in four bits -> [rows, out], for 1 to 16 rows.

    The weight is as this file's first lines say; x may have any strides. The backend is that of
    select_backend for x's device. Raises ValueError as check_matvec and select_backend do.
    """
    check_matvec(x, numbers, scales, minimums)
    backend = select_backend(x.device)
    if backend == "triton":
        return dequant_matvec_triton(x, numbers, scales, minimums)
    if backend == "tlsim":
        return dequant_matvec_tlsim(x, numbers, scales, minimums)
    return dequant_matvec_reference(x, numbers, scales, minimums)


def check_matvec(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> None:
    """Raise a ValueError that names the argument if a kernel would compute a wrong result."""
    if x.dim() != 2 or not 1 <= len(x) <= MOST_ROWS:
        raise ValueError(f"x must be [rows, in] with 1 to {MOST_ROWS} rows, got {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be float32, float16 or bfloat16, got {x.dtype}")
    width = x.shape[1]
    if width == 0 or width % GROUP:
        raise ValueError(f"x's `in` must be a multiple of {GROUP}, got {width}")
    if numbers.dtype != torch.uint8 or numbers.dim() != 2 or numbers.shape[1] != width // 2:
        raise ValueError(
            f"numbers must be uint8 [out, {width // 2}] as x has {width} columns, got "
            f"{numbers.dtype} {list(numbers.shape)}"
        )
    shape = (len(numbers), width // GROUP)
    for name, part in (("scales", scales), ("minimums", minimums)):
        if part.dtype != torch.bfloat16 or part.shape != shape:
            raise ValueError(
                f"{name} must be bfloat16 {list(shape)}, got {part.dtype} {list(part.shape)}"
            )
    for name, part in (("numbers", numbers), ("scales", scales), ("minimums", minimums)):
        if part.device != x.device:
            raise ValueError(f"{name} is on {part.device}, but x is on {x.device}")
        if not part.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(part.stride())}")
    if numbers.storage_offset() % 4:
        raise ValueError("numbers must begin at a multiple of 4 bytes: kernels read 4 at a time")


def dequant_matvec_reference(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> torch.Tensor:
    """The oracle: dequantise the whole weight in float32, multiply, and round to x's dtype."""
    return (x.float() @ dequantize(numbers, scales, minimums).T).to(x.dtype)


def dequantize(numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor) -> torch.Tensor:
    """The values of a weight in four bits: float32 [out, in]."""
    bits = torch.stack([numbers & 15, numbers >> 4], dim=-1)  # [out, in / 2, 2]
    groups = bits.view(*scales.shape, GROUP).float()
    return (groups * scales.float()[..., None] + minimums.float()[..., None]).flatten(1)


def launch_matvec(
    kernels: object,
    x: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor,
    launch: MatvecLaunch,
    multiprocessors: int = 0,
    overlap: bool = False,
) -> torch.Tensor:
    """Launch dequant_matvec_kernel, or dequant_rows_kernel if `launch` has words.

    `kernels` has the two under these names, jitted by Triton or by tlsim. `overlap` starts the next
    kernel early, which needs compute capability 9.0. Other arguments and result as for
    dequant_matvec.
    """
    (rows, width), num_out = x.shape, len(numbers)
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(rows, num_out, dtype=x.dtype, device=x.device)
    arguments = (x, numbers.view(torch.int32), scales, minimums, y, num_out, x.stride(0))
    tiles = -(-num_out // launch.out)
    sizes = {"IN": width, "OUT": launch.out, "num_warps": launch.num_warps}
    if launch.words:
        kernels.dequant_rows_kernel[(tiles,)](
            *arguments, rows, ROWS=MOST_ROWS, WORDS=launch.words, **sizes
        )
        return y
    programs = min(tiles, launch.programs * multiprocessors or tiles)
    pdl = {"launch_pdl": True} if overlap else {}
    kernels.dequant_matvec_kernel[(programs, rows)](
        *arguments, GROUPS=next_power_of_2(width // 32), OVERLAP=overlap, **sizes, **pdl
    )
    return y


def matvec_launch(rows: int, width: int, capability: tuple[int, int]) -> MatvecLaunch:
    """The launch parameters for x [rows, width] on a GPU of a compute capability.

    The row is the newest that is not newer than the GPU, and of these the narrowest that is wide
    enough.
    """
    if rows > FEW:
        return MANY_ROWS[max(since for since in MANY_ROWS if since <= capability)]
    fits = [(since, -widest) for since, widest in FEW_ROWS if since <= capability]
    since, widest = max((since, widest) for since, widest in fits if width <= -widest)
    return FEW_ROWS[since, -widest]


def dequant_matvec_triton(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> torch.Tensor:
    """The kernels by Triton: compiled, or interpreted. Arguments as for dequant_matvec."""
    capability, multiprocessors = _gpu(x.device)
    launch = matvec_launch(*x.shape, capability)
    overlap = capability >= (9, 0) and _can_overlap()
    with torch.cuda.device_of(x):
        return launch_matvec(
            _compiled_kernels(), x, numbers, scales, minimums, launch, multiprocessors, overlap
        )


def dequant_matvec_tlsim(
    x: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> torch.Tensor:
    """The kernels under tlsim, without tlsim's checks. Arguments as for dequant_matvec."""
    words = min(64, max(16, next_power_of_2(x.shape[1] // 8))) if len(x) > FEW else 0
    with tlsim.options(checks=False, wave=32):
        return launch_matvec(
            _simulated_kernels(), x, numbers, scales, minimums, MatvecLaunch(16, 1, words=words)
        )


NAMES = ("dequant_matvec_kernel", "dequant_rows_kernel")


@cache
def _compiled_kernels() -> SimpleNamespace:
    return SimpleNamespace(**{name: globals()[name] for name in NAMES})


@cache
def _simulated_kernels() -> SimpleNamespace:
    """The kernels under tlsim, which reads their source once."""
    return SimpleNamespace(**{name: tlsim.jit(globals()[name]) for name in NAMES})
