"""Deferred requantisation: a packed state, and a ring of the inputs since it was last written.

With S_0 what the last rewrite stored and n updates since, the exact state is (a = exp(g), one per head or channel)

    S_n = D_n S_0 + sum_{i <= n} (D_n / D_i) k_i u_i^T
    D_n = a_n ... a_1        u_i = beta_i (v_i - (a_i S_{i-1})^T k_i)

so a step reads S_0 and the held (k_i, u_i, g_i), and only every L-th one writes S_0: an L-th of the requantisations
and nearly half of the bytes. Its output needs no state S_n but

    S_n^T a k = S_0^T (D k) + sum_i [k . (D / D_i) k_i] u_i   and the same for q, with D = a D_n

u_i is in stored coordinates, T = S / c. The step that would fill the ring rewrites instead, so L - 1 entries are kept.
A held entry of zeros changes nothing: starting a slot with some of them staggers its rewrites against the others'.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybridstate.defaults import FP16_MAX
from hybridstate.errors import NumericError
from hybridstate.kernels.fusion import NO_FUSION, StepFusion
from hybridstate.kernels.layout import PackedLayout
from hybridstate.kernels.reference import l2norm

LEAST_LOG_DECAY = -100.0
"""Log decays are floored here: exp(-100) is 4e-44, nothing beside kept values, and sums of them keep their digits."""

LONGEST = 16
"""Updates between two rewrites at the most: one matrix product of the kernels holds 16 entries."""


@dataclass(frozen=True, slots=True)
class Ring:
    """Inputs of the slots of a pool since their packed states were last written.

    Attributes:
        keys: normalised k, [P, Hk, L - 1, K], float16 (or wider, for the reference).
        values: pseudo values u, [P, H, L - 1, V], float16.
        gates: KDA: log decay, float16 [P, H, L - 1, K]; GDN: its sum since the last rewrite, float32 [P, H, L].
        phases: entries held, int32 [P, H]; equal over the heads of a slot, each read and written by its own program.
    """

    keys: Tensor
    values: Tensor
    gates: Tensor
    phases: Tensor

    @staticmethod
    def empty(
        slots: int,
        key_heads: int,
        heads: int,
        layout: PackedLayout,
        every: int,
        *,
        per_channel: bool,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float16,
    ) -> "Ring":
        """Rings that hold nothing.

        Args:
            slots, key_heads, heads: P, Hk, H.
            layout: dimensions of the states.
            every: L, updates between two rewrites, 2 to 16.
            per_channel: KDA rather than GDN.
            device: where the pool is.
            dtype: of keys, values and KDA gates; the kernels take float16.

        Raises:
            NumericError: L out of range, or heads that do not divide.
        """
        if not 2 <= every <= LONGEST or heads % key_heads:
            raise NumericError(
                f"no ring of {every} updates for {heads} value heads on {key_heads} key heads",
                expected=f"2 to {LONGEST} updates, value heads a multiple of key heads",
            )
        room, wide = every - 1, torch.float64 if dtype == torch.float64 else torch.float32
        gate_shape = (slots, heads, room, layout.key_dim) if per_channel else (slots, heads, every)
        return Ring(
            torch.zeros(slots, key_heads, room, layout.key_dim, dtype=dtype, device=device),
            torch.zeros(slots, heads, room, layout.value_dim, dtype=dtype, device=device),
            torch.zeros(gate_shape, dtype=dtype if per_channel else wide, device=device),
            torch.zeros(slots, heads, dtype=torch.int32, device=device),
        )

    @property
    def every(self) -> int:
        """L, updates between two rewrites."""
        return self.keys.shape[2] + 1

    @property
    def per_channel(self) -> bool:
        """Whether gates are per channel (KDA)."""
        return self.gates.dim() == 4

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Its tensors, each with one row per slot."""
        return self.keys, self.values, self.gates, self.phases

    @property
    def slot_bytes(self) -> int:
        """Resident bytes of one slot's ring, phases included."""
        return sum(x[0].numel() * x.element_size() for x in self.parts)

    @property
    def bits_per_value(self) -> float:
        """Resident bits of the ring per value of the states it belongs to."""
        values = self.phases.shape[1] * self.keys.shape[-1] * self.values.shape[-1]
        return 8 * self.slot_bytes / values

    def start(self, slots: Tensor, *, stagger: bool = True) -> None:
        """Empty the rings of slots whose packed states were just written; no synchronisation.

        Args:
            slots: int64 [n], without padding.
            stagger: begin at phase `slot % L` with entries of zeros, so that a batch of slots admitted
                together rewrites about an L-th of itself at each step rather than all of it at every L-th.
                Otherwise begin at phase 0; what the entries hold does not matter then.
        """
        if not stagger:
            self.phases.index_fill_(0, slots, 0)
            return
        for part in (self.keys, self.values, self.gates):
            part.index_fill_(0, slots, 0)
        phases = slots.remainder(self.every).to(torch.int32)
        self.phases[slots] = phases[:, None].expand(-1, self.phases.shape[1])

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy rings between slots, as the packed states must be too: int64 [n] each."""
        for part in self.parts:
            part[target] = part[source]


def step_bytes(
    layout: PackedLayout, key_heads: int, heads: int, every: int, *, per_channel: bool
) -> tuple[float, float]:
    """Bytes of packed state and of ring that one update of one slot reads and writes, mean over L.

    The packed state is read at every step and written at one in L. Step n of a cycle reads n entries; all but the
    rewriting step append one. Keys belong to a key head, and every value head of it reads them.
    """
    entry = 2 * heads * (layout.value_dim + (layout.key_dim if per_channel else 0))
    entry += 2 * key_heads * layout.key_dim
    reads_and_appends = ((every - 1) / 2 + (every - 1) / every) * entry
    sums = 0 if per_channel else 4 * heads * ((every - 1) / 2 + 1)
    phases = 8 * heads
    return heads * layout.head_bytes * (1 + 1 / every), reads_and_appends + sums + phases


def ring_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, ring: Ring,
    slots: Tensor, out: Tensor, value_scale: Tensor | None, layout: PackedLayout,
    fusion: StepFusion = NO_FUSION,
) -> None:  # fmt: skip
    """One step in float64 on any device; arguments as in `ring_update.ring_step`. Synchronises."""
    live = slots >= 0
    rows = slots[live]
    scale = 1.0 if value_scale is None else value_scale.double()
    state = layout.unpack(pool[rows]).double()
    q, k, g, beta = fusion.derive(q[live], k[live], g[live].double(), beta[live].double())
    o, entry, sums = ring_read(q, k, v[live] / scale, g, beta, state, ring, rows)
    out.zero_()
    out[live] = (o * scale).to(out.dtype)
    full = ring.phases[rows] >= ring.every - 1  # [n, H]
    new = ring_state(state, ring, rows, entry, sums)
    pool[rows] = torch.where(full[..., None], layout.pack(new), pool[rows])
    _append(ring, rows, full, entry)


def ring_flush(pool: Tensor, ring: Ring, slots: Tensor, layout: PackedLayout) -> None:
    """Write what rings hold into the packed states and empty them. Synchronises."""
    rows = slots[slots >= 0]
    held = ring.phases[rows] > 0
    new = ring_state(layout.unpack(pool[rows]).double(), ring, rows)
    pool[rows] = torch.where(held[..., None], layout.pack(new), pool[rows])
    ring.phases[rows] = 0


Entry = tuple[Tensor, Tensor, Tensor]
"""k [n, Hk, K], u [n, H, V] and log decay [n, H, K or 1] of one update, as the ring holds them."""


def ring_read(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, ring: Ring, rows: Tensor
) -> tuple[Tensor, Entry, tuple[Tensor, Tensor]]:  # fmt: skip
    """Output of one update, and its ring entry, without the new state.

    Args:
        q, k, v, g, beta: as in `reference.recurrent_step`, v in stored coordinates.
        state: S_0 of these rows, float64 [n, H, K, V].
        ring: as before the update.
        rows: slots, int64 [n].

    Returns:
        o [n, H, V] in stored coordinates; the entry, rounded as the ring stores it; log fades of the
        held entries [n, H, L - 1, K or 1] and of S_0 [n, H, K or 1] up to this update.
    """
    repeat = v.shape[1] // q.shape[1]
    kn = l2norm(k.double())
    qn = (l2norm(q.double()) * q.shape[-1] ** -0.5).repeat_interleave(repeat, 1)
    key = kn.repeat_interleave(repeat, 1)
    gate = (g if g.dim() == 3 else g[..., None]).double().clamp_min(LEAST_LOG_DECAY)
    if ring.per_channel:
        gate = gate.to(ring.gates.dtype).double()
    fades, total = _fades(ring, rows, gate)
    aged = _held(ring, rows, ring.keys).double() * fades.exp()
    values = _held(ring, rows, ring.values).double()

    def read(x: Tensor) -> Tensor:
        scores = (aged * x[:, :, None]).sum(-1, keepdim=True)
        old = (state * (x * total.exp())[..., None]).sum(-2)
        summed: Tensor = old + (scores * values).sum(-2)
        return summed

    delta = (v.double() - read(key)) * beta.double()[..., None]
    o = read(qn) + (qn * key).sum(-1, keepdim=True) * delta
    stored = delta.clamp(-FP16_MAX, FP16_MAX) if ring.values.dtype == torch.float16 else delta
    entry = (kn.to(ring.keys.dtype), stored.to(ring.values.dtype), gate)
    return o, entry, (fades, total)


def ring_state(
    state: Tensor,
    ring: Ring,
    rows: Tensor,
    entry: Entry | None = None,
    sums: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The state that S_0 and the ring stand for, after one more update where `entry` is given.

    Args: as in and from `ring_read`.

    Returns:
        float64 [n, H, K, V].
    """
    if sums is None:
        heads = ring.phases.shape[1]
        width = ring.gates.shape[-1] if ring.per_channel else 1
        sums = _fades(ring, rows, state.new_zeros(rows.shape[0], heads, width))
    fades, total = sums
    aged = _held(ring, rows, ring.keys).double() * fades.exp()
    new = state * total.exp()[..., None] + aged.mT @ _held(ring, rows, ring.values).double()
    if entry is not None:
        key = entry[0].double().repeat_interleave(new.shape[1] // entry[0].shape[1], 1)
        new = new + key[..., None] * entry[1].double()[:, :, None]
    return new


def _held(ring: Ring, rows: Tensor, part: Tensor) -> Tensor:
    """Entries [n, H, L - 1, ...] of one part, zero beyond the phase."""
    heads = ring.phases.shape[1]
    found = part[rows].repeat_interleave(heads // part.shape[1], 1)
    index = torch.arange(found.shape[2], device=found.device)
    kept: Tensor = found.masked_fill(~(index < ring.phases[rows][..., None])[..., None], 0)
    return kept


def _fades(ring: Ring, rows: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Log fade of every held entry and of S_0, up to and including a present log decay [n, H, K or 1]."""
    if ring.per_channel:
        past = _held(ring, rows, ring.gates).double()
        later = past.flip(2).cumsum(2).flip(2) - past
        return later + gate[:, :, None], past.sum(2) + gate
    past = _held(ring, rows, ring.gates[..., None]).double()
    count = ring.phases[rows].long()
    before = past.gather(2, (count - 1).clamp_min(0)[..., None, None])[:, :, 0]
    total = before.masked_fill((count == 0)[..., None], 0) + gate
    return (total[:, :, None] - past)[:, :, : ring.every - 1], total


def _append(ring: Ring, rows: Tensor, full: Tensor, entry: Entry) -> None:
    """Store one update behind the held ones, or empty the rings that were full."""
    key, value, gate = entry
    count = ring.phases[rows].long()
    first = slice(None, None, ring.phases.shape[1] // key.shape[1])
    n, h = torch.nonzero(~full, as_tuple=True)
    at = count[n, h]
    if not ring.per_channel:
        before = ring.gates[rows[n], h, (at - 1).clamp_min(0)].double().masked_fill(at == 0, 0)
        ring.gates[rows[n], h, at] = (before + gate[n, h, 0]).to(ring.gates.dtype)
    else:
        ring.gates[rows[n], h, at] = gate[n, h].to(ring.gates.dtype)
    ring.values[rows[n], h, at] = value[n, h]
    n, h = torch.nonzero(~full[:, first], as_tuple=True)
    ring.keys[rows[n], h, count[:, first][n, h]] = key[n, h]
    ring.phases[rows] = torch.where(full, 0, count + 1).to(torch.int32)
