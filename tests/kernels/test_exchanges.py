"""An addition that is fused with the product other lanes got is found in PTX; `compile_launches` looks for it."""

from tests.kernels.exchanges import fused_exchanges

PLACE = ".loc\t1 12 3 // x.py:12:3\n"
EXCHANGE = "mul.f32 \t%r3, %r1, %r2;\nshfl.sync.bfly.b32 \t%r4, %r3, 16, 31, -1;\n"


def test_the_pattern_is_found_at_its_line_and_nothing_else() -> None:
    fused = "fma.rn.f32 \t%r5, %r1, %r2, %r4;\n"
    assert fused_exchanges(PLACE + EXCHANGE + fused) == {"x.py:12"}
    assert not fused_exchanges(PLACE + EXCHANGE + "add.f32 \t%r5, %r3, %r4;\n")
    assert not fused_exchanges(PLACE + EXCHANGE + "fma.rn.f32 \t%r5, %r1, %r6, %r4;\n")
    rounded = EXCHANGE.replace("mul.f32", "fma.rn.f32").replace("%r2;", "%r2, 0f00000000;", 1)
    assert not fused_exchanges(PLACE + rounded + "add.f32 \t%r5, %r3, %r4;\n")
