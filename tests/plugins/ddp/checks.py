"""What tests of the reducer demand of both arms' records, and the average over ranks done by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from tests.plugins.ddp.arms import Cases, all_both
from tests.support.equality import compare
from tests.support.rarely import ALL_CASES

MANY = 6


def check(
    results: list[dict[str, Any]],
    *,
    backwards: int | None = None,
    stock_models: int = 0,
    bitwise: bool = True,
) -> None:
    """Demand stock's bits on two ranks; on more, ``bitwise`` where the order of sums is stock's.

    It is not where ``p.grad`` is its bucket's view (``gradient_as_bucket_view``): there stock divides by 3, where it
    multiplies by 1/3 otherwise, as we always do.

    Args:
        results: What :func:`tests.plugins.ddp.arms.both` returned, by rank.
        backwards: How many backwards our reducer reduced; more than none by default, if it kept all models.
        stock_models: How many models fell back to the stock reducer.
        bitwise: Demand the bits on more than two ranks, too.
    """
    for result in results:
        compared = compare(result["stock"], result["patched"])
        if bitwise or len(results) <= 2:
            compared.assert_bitwise()
        else:
            compared.assert_equal()
        counters = result["counters"]
        assert counters["stock_models"] == stock_models
        assert counters["models"] > 0
        assert (counters["collectives"] > 0) == (counters["backwards"] > 0)
        if backwards is None:
            assert counters["backwards"] > 0 or stock_models
        else:
            assert counters["backwards"] == backwards


def same_bits(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Demand of what ``both`` returned, by rank, stock's bits on two ranks and its values on more; return it."""
    for result in results:
        compared = compare(result["stock"], result["patched"], reordered=result.get("reordered"))
        (compared.assert_bitwise if len(results) <= 2 else compared.assert_equal)()
    return results


def check_all(
    results: list[dict[str, dict[str, Any]]], *, check: Callable[..., None] = check, **demands: Any
) -> None:
    """Check every case, by default by :func:`check`, and name those that fail."""
    failures = []
    for name in results[0]:
        try:
            check([result[name] for result in results], **demands)
        except AssertionError as error:
            failures.append(f"case {name}: {error}")
    assert not failures, "\n\n".join(failures)


def some(cases: Cases, first: int = 0) -> Cases:
    """Return every third case, for variants of what is tested as a whole elsewhere; with ALL_CASES=1 all of them.

    Args:
        cases: All of them.
        first: With which third, so that several variants together have all cases.
    """
    return cases if ALL_CASES else dict(list(cases.items())[first::3])


def on(world: int, cases: Cases) -> Cases:
    """Return what to run on so many ranks: all cases on two, some of a large table on more."""
    return cases if world == 2 or len(cases) < MANY else some(cases)


def check_cases(
    run: Callable[..., Any],
    loop: Callable[..., Any],
    cases: Cases,
    *,
    options: dict[str, Any] | None = None,
    timeout: float = 120,
    **demands: Any,
) -> list[dict[str, Any]]:
    """Run cases (:func:`on`) in one call of ``run``, which is ``ranks(world)``, and check each; return the results."""
    results: list[dict[str, Any]] = run(
        all_both, loop, on(run.world, cases), options=options, timeout=timeout
    )
    check_all(results, **demands)
    return results


def average_by_hand(module: nn.Module) -> None:
    """Make every gradient that this rank has the average over the ranks, which must have the same ones."""
    for param in module.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad.div_(dist.get_world_size())
