"""Compression of the recurrent state of hybrid linear-attention models: analyse, calibrate, plan, measure.

The verbs of the command line are functions here, with the same names and options. They return frozen
dataclasses with `to_json()`, print nothing, and raise what `hybridstate.errors` lists. Importing the
package loads none of its libraries; each verb loads what it needs when it is called.
"""

from typing import TYPE_CHECKING, Any

from hybridstate.errors import (
    HybridStateError,
    MissingRequirement,
    NumericError,
    PlanMismatch,
    SourceError,
    UnsupportedModel,
    UsageError,
)

if TYPE_CHECKING:
    from hybridstate.api import (
        analyze,
        bench_codecs,
        bench_decode,
        bench_exchange,
        bench_quality,
        bench_restore,
        bench_serve,
        bench_simulate,
        bench_update,
        calibrate,
        export_plan,
        inspect,
        validate_horizons,
        verify,
    )

__version__ = "0.1.0"

__all__ = [
    "HybridStateError",
    "MissingRequirement",
    "NumericError",
    "PlanMismatch",
    "SourceError",
    "UnsupportedModel",
    "UsageError",
    "__version__",
    "analyze",
    "bench_codecs",
    "bench_decode",
    "bench_exchange",
    "bench_quality",
    "bench_restore",
    "bench_serve",
    "bench_simulate",
    "bench_update",
    "calibrate",
    "export_plan",
    "inspect",
    "validate_horizons",
    "verify",
]


def __getattr__(name: str) -> Any:
    """The verbs, from `hybridstate.api` on first use."""
    if name in __all__:
        from hybridstate import api

        return getattr(api, name)
    raise AttributeError(f"module 'hybridstate' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
