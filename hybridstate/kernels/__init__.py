"""Recurrent-state arithmetic that knows tensors and nothing else.

reference    recurrences, gates and group quantiser in plain torch: what kernels are compared with
layout       where each value of a packed or dense state lies in memory
update       one decode step on pooled states; picks the fastest implementation that works here
ring_update  the same with the packed state written every L-th time only, its inputs kept in a ring meanwhile
checkpoint   retained units to bytes and back
"""
