"""What the log gate contributes to a chunk.

G is the cumulative log gate of a chunk, Gc its last value. Exponents are never positive.
"""

LOG2E = 1.4426950408889634
GATE_FLOOR = -128.0  # exp of it is 0 in fp32
