"""Day 5: right answers in other styles than the package's."""

import torch
import torch.nn.functional as F


def with_functional(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def with_products(x, gate, up, down):
    z = x @ gate.T
    return (z * torch.sigmoid(z) * (x @ up.T)) @ down.T


def with_one_product(x, gate, up, down):
    """Gate and up stacked into one matrix, cut apart again after the product."""
    both = F.linear(x, torch.cat([gate, up]))
    z, other = both.chunk(2, dim=-1)
    return F.linear(z / (1 + torch.exp(-z)) * other, down)


def unit_by_unit(x, gate, up, down):
    """Each hidden unit adds its share of the result."""
    out = torch.zeros(*x.shape[:-1], down.shape[0])
    for i in range(gate.shape[0]):
        z = (x.float() * gate[i].float()).sum(-1, keepdim=True)
        unit = z * z.sigmoid() * (x.float() * up[i].float()).sum(-1, keepdim=True)
        out += unit * down[:, i].float()
    return out.to(x.dtype)


def with_einsum(x, gate, up, down):
    z = torch.einsum("...h,ih->...i", x, gate)
    h = torch.einsum("...h,ih->...i", x, up).mul(F.silu(z))
    return torch.einsum("...i,hi->...h", h, down)


RIGHT = {"swiglu": (with_functional, with_products, with_one_product, unit_by_unit, with_einsum)}
