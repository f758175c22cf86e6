"""Codes to values: each of all codes, by conversion and by the bit tricks of the machine code."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl

from kvstore.kernels.jit.unpack import asm_body, factor, part

PARTS = {"int8_th": 2, "fp8_bh": 2, "int4_kivi": 4}
WORDS = torch.arange(1 << 16).to(torch.int16)


@triton.jit
def unpack(words_ptr, out_ptr, N: tl.constexpr, PART: tl.constexpr, FORMAT: tl.constexpr):
    i = tl.arange(0, N)
    words = tl.load(words_ptr + i)
    tl.store(out_ptr + i, part(words, PART, FORMAT, tl.float32, False))


def values(kv_format: str, number: int) -> torch.Tensor:
    """What part `number` of every 16-bit word stands for."""
    bits = WORDS.int() & 0xFFFF
    if kv_format == "int4_kivi":
        return ((bits >> (4 * number)) & 15).float() - 8
    code = ((bits >> (8 * number)) & 255).to(torch.uint8)
    return code.view(torch.int8 if kv_format == "int8_th" else torch.float8_e4m3fn).float()


CASES = [(kv_format, number) for kv_format, parts in PARTS.items() for number in range(parts)]


@pytest.mark.parametrize(("kv_format", "number"), CASES)
def test_every_code_is_converted_exactly(kv_format: str, number: int) -> None:
    """All words: int8 and int4 whole numbers, e4m3 with subnormals; its NaN is not looked at."""
    out, right = torch.empty(1 << 16), values(kv_format, number)
    unpack[(1,)](WORDS, out, N=1 << 16, PART=number, FORMAT=kv_format)
    known = ~torch.isnan(right)
    assert torch.equal(out[known], right[known])


class Machine:
    """Runs the few PTX instructions of the bit tricks on tensors of 32-bit registers."""

    def __init__(self, x: torch.Tensor, kind: torch.dtype) -> None:
        self.registers, self.kind = {"x": x}, kind

    def run(self, body: str) -> torch.Tensor:
        for line in filter(None, (text.strip() for text in body.split(";"))):
            name, target, *sources = re.split(r"[\s,]+", line)
            self.registers[target] = self.step(name, [self.read(word) for word in sources])
        return self.registers["y"]

    def read(self, word: str) -> torch.Tensor:
        if word in self.registers:
            return self.registers[word]
        return torch.tensor(int(word, 0), dtype=torch.int64)

    def step(self, name: str, a: list[torch.Tensor]) -> torch.Tensor:
        if name == "mov.b32":
            return a[0]
        if name == "shl.b32":
            return (a[0] << a[1]) & 0xFFFFFFFF
        if name == "shr.u32":
            return a[0] >> a[1]
        if name == "and.b32":
            return a[0] & a[1]
        if name == "lop3.b32":  # (a & b) | c and (a & b) ^ c
            return {0xEA: torch.bitwise_or, 0x6A: torch.bitwise_xor}[int(a[3])](a[0] & a[1], a[2])
        x, y, *z = (self.halves(word) for word in a)
        if name.startswith("fma.rn"):
            return self.whole(x * y + z[0])
        return self.whole(x - y if name.startswith("sub") else x * y)

    def halves(self, words: torch.Tensor) -> torch.Tensor:
        words = words.reshape(-1)
        pair = torch.stack([words & 0xFFFF, words >> 16]).to(torch.int32).to(torch.int16)
        return pair.view(self.kind).double()

    def whole(self, pair: torch.Tensor) -> torch.Tensor:
        bits = pair.to(self.kind).view(torch.int16).to(torch.int64) & 0xFFFF
        return bits[0] | bits[1] << 16


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kv_format", "number"), CASES)
def test_the_bit_tricks_are_exact(kv_format: str, number: int, kind: torch.dtype) -> None:
    """What runs on NVIDIA's chips alone gives the same values, for both words of a pair."""
    bits, right = WORDS.long() & 0xFFFF, values(kv_format, number)
    dtype = tl.bfloat16 if kind is torch.bfloat16 else tl.float16
    x, body = bits | bits.flip(0) << 16, asm_body(kv_format, number, dtype)
    right = right / factor(kv_format, dtype)
    machine = Machine(x, kind)
    found = machine.halves(machine.run(body)).float()
    for have, want in ((found[0], right), (found[1], right.flip(0))):
        known = ~torch.isnan(want)
        assert torch.equal(have[known], want[known])
