"""The CPU allocator against the naive rule: a request's tokens fill its last page, then fresh pages in order."""

import random

import pytest

torch = pytest.importorskip("torch")

from kvc.sglang.cpu import decode, extend  # noqa: E402


@pytest.mark.parametrize("page", [1, 4, 16, 64])
def test_every_slot_follows_its_page(page):
    rnd = random.Random(page)
    for _ in range(50):
        before = [rnd.randrange(0, 100) for _ in range(rnd.randrange(1, 5))]
        after = [n + rnd.randrange(1, 100) for n in before]
        last = [1000 * page * (i + 1) + (n - 1) % page if n else -1 for i, n in enumerate(before)]
        free = torch.randperm(400) + 5000
        out = torch.full((sum(after) - sum(before),), -1)
        extend(*map(torch.tensor, (before, after, last)), free, out, 8, page)
        slots, taken = iter(out.tolist()), 0
        for start, end, slot in zip(before, after, last, strict=True):
            for position in range(start, end):
                got = next(slots)
                if position % page == 0:
                    assert got == free[taken] * page
                    taken += 1
                else:
                    assert got == slot + 1
                slot = got


def test_decode_adds_one_token_to_each():
    out = torch.empty(2, dtype=torch.int64)
    decode(torch.tensor([17, 20]), torch.tensor([15, 50]), torch.tensor([9, 8]), out, 2, 16)
    assert out.tolist() == [9 * 16, 51]


def test_a_shortage_is_left_to_the_allocator():
    out = torch.full((40,), -1)
    extend(torch.tensor([0]), torch.tensor([40]), torch.tensor([-1]), torch.tensor([3]), out, 1, 16)
