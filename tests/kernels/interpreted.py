"""A program: the kernels of Triton on all cases, with ``TRITON_INTERPRET=1`` where there is no GPU.

Triton reads that variable when it is imported, so the tests start this in a process of its own.
"""

from __future__ import annotations

import torch

from slipstream.kernels._window_attention_triton import WindowAttention
from slipstream.kernels.window_attention import reference
from tests.kernels.attention_cases import CASES, inputs


def main() -> None:
    for case in CASES:
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


if __name__ == "__main__":
    main()
