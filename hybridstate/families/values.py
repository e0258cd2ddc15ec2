"""Whether stored decay parameters are what their names say."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.errors import NumericError

LARGEST_A_LOG: Final = 8.0
"""Nobody trains a rate of exp(8) = 2,981 per token: the largest A_log seen in a release is 4.3 (Qwen3.6)."""


def check_log_scale(name: str, a_log: NDArray[np.float64]) -> None:
    """Refuse rates stored under the name of their logarithms.

    Args:
        name: of the tensor, for the message.
        a_log: finite values.

    Raises:
        NumericError: an entry is above `LARGEST_A_LOG`.
    """
    at = int(a_log.argmax())
    largest = float(a_log.reshape(-1)[at])
    if largest > LARGEST_A_LOG:
        raise NumericError(
            f"{name}[{at}] is {largest:g}: the logarithm of a decay rate lies below {LARGEST_A_LOG:g}, so these "
            "look like the rates themselves",
            hint="files converted for other programs hold exp(A_log); give the original checkpoint",
            tensor=name,
            index=at,
            found=largest,
        )


def sign_warning(a_log: list[NDArray[np.float64]]) -> str | None:
    """A line where no unit of the whole model has a rate above one, as if -exp(A_log) had been stored.

    Trained models have both signs. All negative is possible, and then every unit decays slowly.
    """
    if any((values >= 0).any() for values in a_log):
        return None
    return (
        "every A_log of this model is negative: right if all of its units decay slowly, wrong if the file "
        "holds -exp(A_log), as GGUF's ssm_a does; then no horizon here is right"
    )
