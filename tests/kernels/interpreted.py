"""A program: the kernels of Triton on all cases, with ``TRITON_INTERPRET=1`` where there is no GPU.

Triton reads that variable when it is imported, so the tests start this in a process of its own.
"""

from __future__ import annotations

from importlib import import_module
from unittest.mock import patch

import torch

from slipstream.kernels._window_attention_triton import WindowAttention
from slipstream.kernels.window_attention import reference
from tests.kernels.attention_cases import IN_KERNEL, inputs

window_attention = import_module("slipstream.kernels.window_attention")  # beside its function


def main() -> None:
    for case in IN_KERNEL:
        (*given, mask), gradient = inputs(case, torch.float32)
        scale = given[0].shape[-1] ** -0.5
        result = WindowAttention.apply(*given, mask, scale, 0.0)
        expected = reference(*given, mask)
        found = (result, *torch.autograd.grad(result, given, gradient))
        wanted = (expected, *torch.autograd.grad(expected, given, gradient))
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=0, atol=2e-5 * float(theirs.detach().abs().max())
            )
        print(case)
    check_dropout(WindowAttention)
    print("dropout")
    check_second_derivatives(WindowAttention)
    check_transposed_bias()
    print("second derivatives")


def check_dropout(kernel: type[torch.autograd.Function]) -> None:
    """With values that are one-hot the output shows the probabilities; backward drops the same."""
    (query, key, _, bias, mask), _ = inputs("masks", torch.float32)
    value = torch.eye(9, 20).expand(4, 3, 9, 20).clone().requires_grad_()
    torch.manual_seed(1)
    dropped = kernel.apply(query, key, value, bias, mask, 0.2, 0.25)
    whole = reference(query, key, value, bias, mask, scale=0.2)
    kept = dropped[..., :9] != 0
    torch.testing.assert_close(dropped[..., :9], kept * whole[..., :9] / 0.75)
    assert 0.65 < float(kept[whole[..., :9] > 1e-6].float().mean()) < 0.85
    gradient = torch.randn_like(dropped)
    ours = torch.autograd.grad(dropped, (query, key, value, bias), gradient)
    scores = 0.2 * query @ key.transpose(2, 3) + bias
    assert mask is not None
    scores = scores + mask.repeat(2, 1, 1).unsqueeze(1)
    again = (scores.softmax(-1) * kept / 0.75) @ value
    theirs = torch.autograd.grad(again, (query, key, value, bias), gradient)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 * float(b.abs().max()))


def check_second_derivatives(kernel: type[torch.autograd.Function]) -> None:
    """Of the kernel, with what dropout kept, beside the reference with the same."""
    (*given, mask), _ = inputs("masks", torch.float32)
    assert mask is not None
    eye = torch.eye(9, 20).expand(4, 3, 9, 20)  # shows the probabilities
    for dropout in (0.0, 0.25):
        torch.manual_seed(1)
        kept = kernel.apply(*given[:2], eye, given[3], mask, 0.2, dropout)[..., :9] != 0
        torch.manual_seed(1)
        ours = kernel.apply(*given, mask, 0.2, dropout)
        query, key, value, bias = given
        scores = 0.2 * query @ key.transpose(2, 3) + bias + mask.repeat(2, 1, 1).unsqueeze(1)
        chances = scores.softmax(-1)
        # what is masked shows as 0 without having been dropped, and weighs nothing
        theirs = (chances * (kept if dropout else 1) / (1 - dropout)) @ value
        found, wanted = (penalised(result, given) for result in (ours, theirs))
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * float(b.abs().max()))


def check_transposed_bias() -> None:
    """Second derivatives go through the bias in any layout."""
    (*given, mask), _ = inputs("masks", torch.float32)
    with patch.object(window_attention, "_kernel", lambda query: WindowAttention):
        found, wanted = (
            penalised(attention(*given[:3], given[3].transpose(1, 2), mask), given)
            for attention in (window_attention.window_attention, reference)
        )
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * float(b.abs().max()))


def penalised(result: torch.Tensor, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The gradient of the size of a gradient."""
    first = torch.autograd.grad(result.square().sum(), given, create_graph=True)
    return torch.autograd.grad(torch.stack([g.square().sum() for g in first]).sum(), given)


if __name__ == "__main__":
    main()
