"""Call sites of products in generated code."""

from __future__ import annotations

import pytest
import torch

from gemmtune.inductor.call_site import write_result


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_result_is_taken_over_by_a_buffer_with_memory_of_its_own(mode: type[torch.no_grad]) -> None:
    with mode():
        out, result = torch.zeros(3, 4), torch.arange(12.0).view(3, 4)
        write_result(out, result)
        assert out.data_ptr() == result.data_ptr()
        assert torch.equal(out, result)


def test_result_is_copied_into_a_part_of_a_buffer_and_into_another_layout() -> None:
    whole, result = torch.zeros(6, 4), torch.arange(12.0).view(3, 4)
    write_result(whole[:3], result)
    assert torch.equal(whole[:3], result)
    assert not whole[3:].any()
    out = torch.zeros(3, 4)
    address = out.data_ptr()
    write_result(out, torch.arange(12.0).view(4, 3).t())
    assert out.data_ptr() == address
    assert torch.equal(out, torch.arange(12.0).view(4, 3).t())
