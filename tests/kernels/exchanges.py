"""Sums that leave different bits in the lanes of a warp, found in the code that the compiler makes of a kernel.

Lanes exchange values and add. An addition fused with the product that was exchanged, fma(a, b, round(c d)) in one lane
and fma(c, d, round(a b)) in the other, ends in two numbers for one value, and where both are stored to one place of
shared memory (a change of layout) either may win.
"""

import re


def fused_exchanges(ptx: str) -> set[str]:
    """Source lines of multiply-adds whose addend another lane sent, and whose product this lane sent."""
    products: dict[str, set[str]] = {}
    sent: dict[str, str] = {}
    found, line = set(), "?"
    for text in ptx.splitlines():
        if place := re.findall(r"(\w+\.py:\d+)", text) if ".loc" in text else []:
            line = place[-1]
        elif made := re.match(r"\s*mul(?:\.rn)?\.f32\s+(%\w+), (\S+), (\S+);", text):
            products[made[1]] = {made[2], made[3]}
        elif made := re.match(r"\s*shfl\.sync\.bfly\.b32\s+(%\w+), (%\w+),", text):
            sent[made[1]] = made[2]
        elif (
            made := re.match(r"\s*fma\.rn\.f32\s+%\w+, (\S+), (\S+), (%\w+);", text)
        ) and products.get(sent.get(made[3], "")) == {made[1], made[2]}:
            found.add(line)
    return found
