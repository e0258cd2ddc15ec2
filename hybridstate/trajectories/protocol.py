"""How a calibration is run: prompts, windows, anchors, horizon (DAMP A.2). Every number is an option."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from hybridstate.defaults import RISK_HORIZON
from hybridstate.errors import UsageError

ALGORITHM_VERSION: Final = 1
"""Raised whenever recorded numbers change, so that old trajectories are not mixed with new ones."""

SPLITS: Final = ("fit", "tune", "validate")
DOMAINS: Final = ("math", "code", "prose")


@dataclass(frozen=True, slots=True)
class Protocol:
    """One calibration protocol.

    Attributes:
        profile: `paper`, `quick` or `custom`.
        prompts_per_split: prompts of each domain in each of the three splits.
        validation_prompts: prompts of each domain in the validation split; None is `prompts_per_split`.
        input_tokens: length of every prompt.
        new_tokens: tokens generated after it, one decoding update each.
        windows: update positions at which a recording window starts.
        anchors: updates after a window's start whose state is scored.
        horizon: updates after an anchor over which the error is followed, H of DAMP Eq. 15.
        temperature: 0 is greedy; None is 1.0 for an embedded model and greedy for others.
        chunk: tokens of prefill between two writes of the cache.
        batch: sequences generated together.
    """

    profile: str = "paper"
    prompts_per_split: int = 4
    validation_prompts: int | None = None
    input_tokens: int = 1024
    new_tokens: int = 4096
    windows: tuple[int, ...] = (0, 2048)
    anchors: tuple[int, ...] = (256, 512, 768)
    horizon: int = RISK_HORIZON
    temperature: float | None = None
    chunk: int = 8192
    batch: int = 36

    def __post_init__(self) -> None:
        last = max(self.windows) + max(self.anchors) + self.horizon
        if last > self.new_tokens:
            raise UsageError(
                f"the last anchor needs {last} updates, but {self.new_tokens} tokens are generated",
                hint="generate more tokens, or lower the horizon",
                found=self.new_tokens,
                expected=last,
            )
        for name in ("prompts_per_split", "input_tokens", "horizon", "chunk", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1", found=getattr(self, name))
        if (self.validation_prompts or self.prompts_per_split) < self.prompts_per_split:
            raise UsageError(
                f"validation_prompts must be at least prompts_per_split, {self.prompts_per_split}",
                found=self.validation_prompts,
            )
        updates = [update for _, update in self.positions()]
        if updates != sorted(set(updates)):
            raise UsageError(
                "anchors must ascend and windows must not overlap",
                found=updates,
                expected="ascending update numbers",
            )
        if min(self.anchors) < 1 or min(self.windows) < 0:
            raise UsageError("anchors count from 1 and windows from 0", found=list(self.anchors))

    @property
    def prompts_per_domain(self) -> int:
        """Prompts of one domain in all three splits."""
        held_out = self.validation_prompts or self.prompts_per_split
        return (len(SPLITS) - 1) * self.prompts_per_split + held_out

    def positions(self) -> tuple[tuple[int, int], ...]:
        """(window, updates done) of each anchor, in order: the 256th update of window 0 is (0, 256)."""
        return tuple((w, w + a) for w in self.windows for a in self.anchors)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, part of the fingerprint."""
        return asdict(self) | {"windows": list(self.windows), "anchors": list(self.anchors)}


PROFILES: Final = {
    "paper": Protocol(),
    # Scaled so that an embedded model takes under 150 s on 2 cores; the horizon stands in for 256.
    "quick": Protocol(
        profile="quick",
        prompts_per_split=1,
        input_tokens=512,
        new_tokens=256,
        windows=(0,),
        anchors=(32, 80, 128),
        horizon=128,
    ),
}


def protocol(profile: str, **changes: Any) -> Protocol:
    """A named profile, with options changed.

    Raises:
        UsageError: unknown profile, or options that contradict each other.
    """
    if profile not in PROFILES:
        raise UsageError(
            f"no calibration profile {profile!r}",
            hint=f"one of {', '.join(PROFILES)}",
            found=profile,
        )
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(PROFILES[profile], **given)


def with_sequences(settings: Protocol, sequences: int, domains: int) -> Protocol:
    """At least so many validation sequences, the same number of each domain, and all prompts in one batch
    where the protocol's own prompts fitted into one.

    Raises:
        UsageError: not a positive number.
    """
    if sequences < 1:
        raise UsageError("sequences must be at least 1", found=sequences)
    wanted = max(settings.prompts_per_split, -(-sequences // domains))
    whole = settings.batch >= settings.prompts_per_domain * domains
    more = replace(settings, validation_prompts=wanted)
    if wanted == settings.prompts_per_split:
        more = replace(settings, validation_prompts=None)
    prompts = more.prompts_per_domain * domains
    return replace(more, batch=max(more.batch, prompts)) if whole else more
