"""Day 27: right answers to `attention_bytes` and `roofline_seconds`, in several styles."""

import torch


def by_tensors(kv_lens, n_kv, head_dim, dtype):
    """The bytes of tensors of keys and values without memory."""
    total = 0
    for kv_len in kv_lens:
        total += torch.empty(2, kv_len, n_kv, head_dim, dtype=dtype, device="meta").nbytes
    return total


def by_tokens(kv_lens, n_kv, head_dim, dtype):
    """The bytes of one token, for each token."""
    number = torch.finfo(dtype).bits // 8
    key = number * n_kv * head_dim
    return sum(key + key for kv_len in kv_lens for _ in range(kv_len))


def by_torch(kv_lens, n_kv, head_dim, dtype):
    """A product of shapes, summed by torch."""
    tokens = int(torch.tensor(kv_lens).sum())
    return torch.Size([tokens, 2, n_kv, head_dim]).numel() * dtype.itemsize


def by_comparison(flops, bytes_read, peak_flops, bandwidth):
    """An if."""
    compute, read = flops / peak_flops, bytes_read / bandwidth
    if compute > read:
        return compute
    return read


def by_the_ridge(flops, bytes_read, peak_flops, bandwidth):
    """The height of the roofline at this arithmetic intensity, then the time."""
    rate = min(peak_flops, bandwidth * (flops / bytes_read))
    return flops / rate


def by_sorting(flops, bytes_read, peak_flops, bandwidth):
    """The last of two sorted times."""
    return sorted([bytes_read / bandwidth, flops / peak_flops])[-1]


RIGHT = {
    "attention_bytes": (by_tensors, by_tokens, by_torch),
    "roofline_seconds": (by_comparison, by_the_ridge, by_sorting),
}
