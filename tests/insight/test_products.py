"""The yardstick of matrix products: their sums in pieces, for whatever computes them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

# What is replaced is replaced for the rest of a process.
PROGRAM = """
import sys, warnings
import torch
from ovpatch.insight.verify import products

warnings.simplefilter("error")
torch.manual_seed(0)

def values():
    dtype = torch.float32
    a, b, c = torch.randn(30, 200), torch.randn(200, 40), torch.randn(40)
    layer = torch.nn.Linear(200, 40)
    x = torch.randn(3, 30, 200, requires_grad=True)
    called = {called}
    y = called(layer)(x)
    y.square().sum().backward()
    yield from (a @ b, torch.addmm(c, a, b), torch.addmm(c, a, b, beta=0.5, alpha=2.0), torch.addmm(c, a, b, beta=0))
    yield from (torch.mm(a, b, out=torch.empty(0)), torch.addmm(c, a, b, beta=3, out=torch.empty(30, 40)))
    yield from (y.detach(), x.grad, layer.weight.grad, layer.bias.grad)
    with torch.autocast("cpu", torch.bfloat16):
        yield a @ b
    with torch.inference_mode():
        yield layer(x.detach())
    yield from (a[:, :0] @ b[:0], a[:, :1] @ b[:1], a[:0] @ b, b.t() @ a.t(), (a > 0).long() @ (b > 0).long())
    yield (a.to(torch.complex64) * 1j).conj() @ b.to(torch.complex64)

def run():
    torch.manual_seed(0)
    return list(values())

stock = run()
products.reorder({pieces})
ours = run()
moved = [not torch.equal(one, other) for one, other in zip(stock, ours)]
def distance(one, other):
    one, other = one.cdouble(), other.cdouble()
    return float((one - other).abs().max() / one.abs().max().clamp(min=1.0)) if one.numel() else 0.0

near = [distance(one, other) < (1e-2 if one.dtype == torch.bfloat16 else 1e-5) for one, other in zip(stock, ours)]
assert all(near), near
assert [one.shape for one in stock] == [other.shape for other in ours]
assert [one.dtype for one in stock] == [other.dtype for other in ours]
assert all(moved[:6]) and all(moved[6:9]), moved
products.reorder(1)
assert sum(not torch.equal(one, other) for one, other in zip(ours, run())) > 6, "other pieces, other sums"
"""


@pytest.mark.parametrize(
    ("called", "pieces"),
    [("lambda layer: layer", 2), ("lambda layer: torch.compile(layer, backend='aot_eager', fullgraph=True)", 3)],
    ids=["eager", "compiled"],
)
def test_sums_are_near_and_not_the_same(called, pieces):
    program = textwrap.dedent(PROGRAM).replace("{called}", called).replace("{pieces}", str(pieces))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
