"""Floating-point formats of KV values: tables that convert between 16-bit formats and the 8-bit format E4M3.

E4M3 is the format that engines call fp8_e4m3 ("fn": no infinities, one NaN). It has a sign, 4 bits of exponent with
bias 7, and 3 bits of fraction. Magnitudes go up to 448; the numbers below 2^-6 are 2^-9 apart.
"""

from enum import StrEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

E4M3_LARGEST = 448.0
_E4M3_LARGEST_CODE = 0x7E
_E4M3_LEAST_EXPONENT = -6  # exponent of the smallest normal number
_E4M3_FRACTION_BITS = 3


class HalfFormat(StrEnum):
    """Floating-point formats with 16 bits."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def fraction_bits(self) -> int:
        return 7 if self is HalfFormat.BFLOAT16 else 10

    @property
    def largest(self) -> int:
        """Bit pattern of the largest finite number. Magnitudes have the same order as their bit patterns."""
        return 0x7F7F if self is HalfFormat.BFLOAT16 else 0x7BFF

    @property
    def half_step(self) -> float:
        """Largest relative rounding error of a normal number."""
        return 0.5 ** (self.fraction_bits + 1)

    @property
    def half_least(self) -> float:
        """Half of the smallest positive number, which is the largest rounding error near zero."""
        return 2.0**-134 if self is HalfFormat.BFLOAT16 else 2.0**-25

    def numbers(self, patterns: NDArray[np.uint16]) -> NDArray[np.float32]:
        """Return the exact numbers of these bit patterns."""
        if self is HalfFormat.BFLOAT16:
            return (patterns.astype(np.uint32) << 16).view(np.float32)
        return patterns.view(np.float16).astype(np.float32)

    def patterns(self, numbers: NDArray[np.float32]) -> NDArray[np.uint16]:
        """Round to the nearest numbers of this format, ties to even; return their bit patterns.

        A number whose magnitude is too large becomes the largest finite number.
        """
        largest = float(self.numbers(np.array([self.largest], np.uint16))[0])
        inside = np.clip(numbers, -largest, largest)
        if self is HalfFormat.FLOAT16:
            return inside.astype(np.float16).view(np.uint16)
        bits = inside.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def e4m3_codes(numbers: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the E4M3 codes of the nearest E4M3 numbers, ties to even.

    Numbers beyond the largest E4M3 number get the code of that number.
    """
    magnitudes = np.minimum(np.abs(numbers), E4M3_LARGEST)
    exponents = np.where(magnitudes > 0, np.frexp(magnitudes)[1] - 1, _E4M3_LEAST_EXPONENT)
    exponents = np.maximum(exponents, _E4M3_LEAST_EXPONENT)
    eighths = np.rint(np.ldexp(magnitudes, _E4M3_FRACTION_BITS - exponents)).astype(np.int64)
    # If rounding up has given the next power of two (`eighths` is 16), this sum increases the exponent by one.
    codes = ((exponents - _E4M3_LEAST_EXPONENT) << _E4M3_FRACTION_BITS) + eighths
    signs = np.where(np.signbit(numbers), 0x80, 0)
    result: NDArray[np.uint8] = (np.minimum(codes, _E4M3_LARGEST_CODE) | signs).astype(np.uint8)
    return result


def e4m3_numbers() -> NDArray[np.float64]:
    """Return the numbers of the 256 E4M3 codes, by code.

    The two codes of NaN, which `e4m3_codes` never returns, count as 448 and -448.
    """
    codes = np.minimum(np.arange(256) & 0x7F, _E4M3_LARGEST_CODE)
    exponents, eighths = codes >> _E4M3_FRACTION_BITS, codes & 7
    normal = exponents > 0
    magnitudes = np.ldexp(eighths + 8.0 * normal, np.maximum(exponents, 1) - 1 + _E4M3_LEAST_EXPONENT - 3)
    return np.where(np.arange(256) < 128, magnitudes, -magnitudes)


@lru_cache(maxsize=64)
def e4m3_encoder(half: HalfFormat, exponent: int) -> NDArray[np.uint8]:
    """Return a table from each 16-bit pattern to the E4M3 code of its number divided by 2**exponent.

    The entries for infinities and NaN are meaningless.
    """
    patterns = np.arange(1 << 16, dtype=np.uint16)
    finite = (patterns & 0x7FFF) <= half.largest
    numbers = half.numbers(np.where(finite, patterns, 0).astype(np.uint16)).astype(np.float64)
    return e4m3_codes(np.ldexp(numbers, -exponent))


@lru_cache(maxsize=1024)
def e4m3_decoder(half: HalfFormat, exponent: int) -> NDArray[np.uint16]:
    """Return a table from each E4M3 code to the 16-bit pattern of its number times 2**exponent."""
    numbers = np.ldexp(e4m3_numbers(), exponent)
    largest = float(np.finfo(np.float32).max)
    return half.patterns(np.clip(numbers, -largest, largest).astype(np.float32))
