"""All known ways to read parameters. Each makes a model, and reads it."""

from __future__ import annotations

import copy
import ctypes
import io
import multiprocessing.reduction
import pickle
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.modes import Functions

X = torch.linspace(-1, 1, 24).view(4, 6)
IMAGES = torch.linspace(-1, 1, 96).view(2, 3, 4, 4)
SEQUENCE = torch.linspace(-1, 1, 72).view(3, 4, 6)


class Kind(NamedTuple):
    make: Callable[[], nn.Module]
    read: Callable[[Any], Any]


READERS: dict[str, Kind] = {}


def linear() -> nn.Module:
    return nn.Linear(6, 6)


def trained(model: nn.Module, *inputs: Any) -> Any:
    """Run forward and backward through the module; return the output and the gradients."""
    out = model(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    model.zero_grad()
    out.square().sum().backward()
    return out, [param.grad for param in model.parameters()]


class ReadsSibling(nn.Module):
    """A module that reads the parameter of a submodule that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.a(x), self.b.weight)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Embedding(6, 6), nn.Linear(6, 6, bias=False))
    model[1].weight = model[0].weight
    return model


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()).to(
        memory_format=torch.channels_last
    )


def attention() -> nn.Module:
    return nn.MultiheadAttention(6, 2, batch_first=True)


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(layer(), 2)


class Raw(nn.Module):
    """A module that calls a kernel which reads the memory of its argument and ignores the class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return scripted(x, self.weight)


@torch.jit.script
def scripted(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight + weight.sum()


class Scale(torch.autograd.Function):
    """A Function whose kernel ignores the class of its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return scripted(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum().view_as(weight)


# Scripts keep such a reference before any patch is applied.
apply_scale = Scale.apply


class Outer(torch.autograd.Function):
    """A Function that gets no parameter, but reads a parameter by another Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, holder: nn.Module) -> Tensor:
        return apply_scale(x, holder.weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


# --- modules ---


READERS["linear"] = Kind(linear, lambda m: trained(m, X))
READERS["conv and norm"] = Kind(convolutions, lambda m: trained(m, IMAGES))
READERS["conv and norm, eval"] = Kind(lambda: convolutions().eval(), lambda m: m(IMAGES))
READERS["embedding"] = Kind(
    lambda: nn.Embedding(8, 6), lambda m: trained(m, torch.tensor([1, 5, 7]))
)
READERS["layer norm"] = Kind(lambda: nn.LayerNorm(6), lambda m: trained(m, X))
READERS["batch norm"] = Kind(lambda: nn.BatchNorm1d(6), lambda m: trained(m, X))
READERS["prelu"] = Kind(lambda: nn.PReLU(6), lambda m: trained(m, X))
READERS["bilinear"] = Kind(lambda: nn.Bilinear(6, 6, 6), lambda m: trained(m, X, X))
READERS["attention"] = Kind(attention, lambda m: trained(m, SEQUENCE, SEQUENCE, SEQUENCE))
READERS["encoder layer"] = Kind(layer, lambda m: trained(m, SEQUENCE))
READERS["encoder"] = Kind(encoder, lambda m: trained(m, SEQUENCE))
READERS["other's weight"] = Kind(ReadsSibling, lambda m: trained(m, X))
READERS["tied"] = Kind(tied, lambda m: trained(m, torch.tensor([1, 5, 2])))
READERS["lstm"] = Kind(lambda: nn.LSTM(6, 6, 2), lambda m: trained(m, SEQUENCE))
READERS["gru, bidirectional"] = Kind(
    lambda: nn.GRU(6, 6, bidirectional=True), lambda m: trained(m, SEQUENCE)
)
READERS["rnn"] = Kind(lambda: nn.RNN(6, 6), lambda m: trained(m, SEQUENCE))
READERS["lstm cell"] = Kind(lambda: nn.LSTMCell(6, 6), lambda m: trained(m, X))
READERS["scripted function"] = Kind(Raw, lambda m: trained(m, X))
READERS["weight norm"] = Kind(
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), lambda m: trained(m, X)
)
READERS["parametrized"] = Kind(
    lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)),
    lambda m: [trained(m, X), m.weight],
)


def without_grad(model: nn.Module, *inputs: Any) -> Any:
    model.eval()
    with torch.no_grad():
        return model(*inputs)


READERS["attention's fast path"] = Kind(
    attention, lambda m: without_grad(m, SEQUENCE, SEQUENCE, SEQUENCE)
)
READERS["layer's fast path"] = Kind(layer, lambda m: without_grad(m, SEQUENCE))
READERS["encoder's fast path"] = Kind(encoder, lambda m: without_grad(m, SEQUENCE))


# --- modes ---


def in_inference_mode(model: nn.Module) -> Any:
    with torch.inference_mode():
        return model(X)


def under_autocast(model: nn.Module) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return trained(model, X), trained(model, X)


READERS["inference mode"] = Kind(linear, in_inference_mode)
READERS["autocast"] = Kind(linear, under_autocast)


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})


def under_a_dispatch_mode(model: nn.Module) -> Any:
    with Watching() as mode:
        out = model(X)
    return out, mode.seen


def under_a_function_mode(model: nn.Module) -> Any:
    with Functions():
        return model(X)


READERS["dispatch mode"] = Kind(linear, under_a_dispatch_mode)
READERS["function mode"] = Kind(linear, under_a_function_mode)
READERS["checkpoint"] = Kind(linear, lambda m: trained(Checkpointed(m, use_reentrant=False), X))
READERS["checkpoint, reentrant"] = Kind(
    linear, lambda m: trained(Checkpointed(m, use_reentrant=True), X)
)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inner, use_reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=self.use_reentrant)


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.module.weight, None


def in_backward(model: nn.Module) -> Any:
    x = X.clone().requires_grad_()
    ReadsInBackward.apply(x, model).sum().backward()
    return x.grad


READERS["in backward"] = Kind(linear, in_backward)


# --- functions ---

READERS["matmul"] = Kind(linear, lambda m: X @ m.weight)
READERS["keyword"] = Kind(linear, lambda m: F.linear(input=X, weight=m.weight))
READERS["list"] = Kind(linear, lambda m: torch.cat([X, m.weight]))
READERS["einsum"] = Kind(linear, lambda m: torch.einsum("ij,jk", X, m.weight))
READERS["unknown container"] = Kind(linear, lambda m: torch.stack(Bag([m.weight, m.weight])))
READERS["operator"] = Kind(linear, lambda m: torch.ops.aten.mul.Tensor(m.weight, 2))
READERS["foreach"] = Kind(linear, lambda m: torch._foreach_norm([m.weight, m.bias]))
READERS["function"] = Kind(lambda: nn.PReLU(), lambda m: [trained(Applied(m), X)])
READERS["function by its own name"] = Kind(
    lambda: nn.PReLU(), lambda m: [trained(Applied(m, apply_scale), X)]
)
READERS["function in a function"] = Kind(lambda: nn.PReLU(), lambda m: Outer.apply(X, m))
READERS["functional call"] = Kind(
    linear, lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (X,))
)


def gradient_of_an_output(model: nn.Module) -> Any:
    x = torch.ones(6, 6, requires_grad=True)
    (2 * x).backward(model.weight)
    return x.grad


READERS["func.grad"] = Kind(
    linear, lambda m: torch.func.grad(lambda w: F.linear(X, w).sum() + w.norm())(m.weight)
)
READERS["func.grad, captured"] = Kind(
    linear, lambda m: torch.func.grad(lambda x: F.linear(x, m.weight).sum())(X)
)
READERS["gradient of an output"] = Kind(linear, gradient_of_an_output)
READERS["func.vjp"] = Kind(
    linear, lambda m: torch.func.vjp(lambda w: w.square(), m.weight)[1](X.new_ones(6, 6))
)
READERS["func.jvp"] = Kind(
    linear, lambda m: torch.func.jvp(lambda w: w.square(), (m.weight,), (torch.ones(6, 6),))
)
READERS["func.hessian"] = Kind(linear, lambda m: torch.func.hessian(lambda b: (b**3).sum())(m.bias))
READERS["functionalize"] = Kind(
    linear, lambda m: torch.func.functionalize(lambda w: w * 2)(m.weight)
)
READERS["vmap"] = Kind(linear, lambda m: torch.vmap(lambda w: w.sum())(m.weight))
READERS["vmap, captured"] = Kind(linear, lambda m: torch.vmap(lambda x: F.linear(x, m.weight))(X))
READERS["grads per sample"] = Kind(linear, lambda m: per_sample(m))


class Bag(list):  # type: ignore[type-arg]
    pass


class Applied(nn.Module):
    def __init__(self, inner: nn.Module, apply: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.inner, self.apply_function = inner, apply

    def forward(self, x: Tensor) -> Any:
        return (self.apply_function or Scale.apply)(x, self.inner.weight)


def per_sample(model: nn.Module) -> Any:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, (x,)).square().sum()

    return torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), X)


# --- values ---

READERS["detach"] = Kind(linear, lambda m: m.weight.detach())
READERS["data"] = Kind(linear, lambda m: m.weight.data)
READERS["index"] = Kind(linear, lambda m: m.weight[2])
READERS["iterate"] = Kind(linear, lambda m: list(m.bias))
READERS["tolist"] = Kind(linear, lambda m: m.weight.tolist())
READERS["item"] = Kind(linear, lambda m: float(m.weight.max()))
READERS["repr"] = Kind(linear, lambda m: repr(m.weight))
READERS["str of module's state"] = Kind(linear, lambda m: str(dict(m.named_parameters())))
READERS["clone"] = Kind(linear, lambda m: m.weight.clone())
READERS["to"] = Kind(linear, lambda m: m.to(torch.float64).weight)
READERS["numpy"] = Kind(linear, lambda m: m.weight.detach().numpy().tolist())
READERS["numpy.asarray"] = Kind(
    linear, lambda m: numpy.asarray(m.requires_grad_(False).weight).tolist()
)
READERS["dlpack"] = Kind(linear, lambda m: torch.from_dlpack(m.requires_grad_(False).weight))
READERS["address"] = Kind(linear, lambda m: at_address(m.weight))
READERS["storage"] = Kind(linear, lambda m: list(m.weight.untyped_storage()))
READERS["state_dict"] = Kind(linear, lambda m: m.state_dict())
READERS["parameters_to_vector"] = Kind(
    linear, lambda m: nn.utils.parameters_to_vector(m.parameters())
)
READERS["Parameter"] = Kind(
    linear, lambda m: [nn.Parameter(m.weight), type(nn.Parameter(m.bias)) is nn.Parameter]
)
READERS["swap_tensors"] = Kind(linear, lambda m: swapped(m.weight))


def swapped(param: nn.Parameter) -> Tensor:
    zeros = nn.Parameter(torch.zeros(6, 6))
    torch.utils.swap_tensors(param, zeros)
    return zeros


def at_address(tensor: Tensor) -> Any:
    return list((ctypes.c_float * 36).from_address(tensor.data_ptr()))


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    assert b"ovpatch" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(value: Any) -> Any:
    data = pickle.dumps(value)
    assert b"ovpatch" not in data
    return pickle.loads(data)


def plain(module: nn.Module) -> Any:
    return [(type(param).__module__, type(param).__name__, param) for param in module.parameters()]


READERS["torch.save"] = Kind(linear, lambda m: saved(m.state_dict()))
READERS["torch.save of the module"] = Kind(linear, lambda m: plain(saved(m)))
READERS["torch.save of a parameter"] = Kind(linear, lambda m: saved([m.weight])[0])
READERS["pickle"] = Kind(linear, lambda m: plain(pickled(m)))
READERS["deepcopy"] = Kind(linear, lambda m: plain(copy.deepcopy(m)))
READERS["copy"] = Kind(linear, lambda m: copy.copy(m.weight))
READERS["between processes"] = Kind(linear, lambda m: sent(m.weight))


def sent(param: nn.Parameter) -> Any:
    data = multiprocessing.reduction.ForkingPickler.dumps(param)
    assert b"ovpatch" not in bytes(data)
    return pickle.loads(data)


# --- writers ---


def clamped(model: nn.Module) -> Any:
    model.weight.data.clamp_(-0.1, 0.1)
    return model(X)


def multiplied(model: nn.Module) -> Any:
    with torch.no_grad():
        model.weight.mul_(0.5)
        model.bias[1:] = 3
    return model(X)


def loaded(model: nn.Module) -> Any:
    model.load_state_dict({"weight": torch.ones(6, 6), "bias": torch.zeros(6)})
    return model(X)


def replaced(model: nn.Module) -> Any:
    model.weight.data = model.bias.data.repeat(6, 1)
    return model(X)


READERS["clamp in place"] = Kind(linear, clamped)
READERS["multiply in place"] = Kind(linear, multiplied)
READERS["load_state_dict"] = Kind(linear, loaded)
READERS["data set"] = Kind(linear, replaced)
READERS["vector_to_parameters"] = Kind(
    linear, lambda m: [nn.utils.vector_to_parameters(torch.arange(42.0), m.parameters()), m(X)]
)


def averaged(model: nn.Module) -> Any:
    average = [torch.zeros_like(param) for param in model.parameters()]
    torch._foreach_lerp_(average, list(model.parameters()), 0.25)
    for mean, param in zip(average, model.parameters(), strict=True):
        mean.lerp_(param, 0.5)
    return [mean.detach() for mean in average]


def averaged_model(model: nn.Module) -> Any:
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    average.update_parameters(model)
    return average(X)


READERS["EMA by references"] = Kind(linear, averaged)
READERS["AveragedModel"] = Kind(linear, averaged_model)


# --- threads ---


def in_threads(model: nn.Module) -> Any:
    found: dict[int, Any] = {}
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        barrier.wait()
        found[number] = model(X)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[number] for number in range(4)]


READERS["threads"] = Kind(linear, in_threads)
