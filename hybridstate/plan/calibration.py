"""What a plan takes from the folder that `hybridstate calibrate` writes. No torch.

`calibration.json` names the model's digests, the protocol, `k_hi`, `group`, `selector` and
`key_order`; `calibration.safetensors` holds `layers.{i}.risk` f32 `[H, K]` and
`layers.{i}.protected` i16 `[H, K_hi]`, and where the format `damp+reorder` was run its `value_scale` f32
`[H, V]`, `value_order` i16 `[H, V]` and `protected_reorder` i16 `[H, K_hi]`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hybridstate.checkpoint.documents import an_object, parse_json, read_bytes
from hybridstate.errors import UNREADABLE, PlanMismatch, SourceError
from hybridstate.plan.schema import ValidationRow
from hybridstate.provenance import sha256_bytes

CALIBRATION_FILE: Final = "calibration.json"
ARRAYS_FILE: Final = "calibration.safetensors"
SCHEMA: Final = "hybridstate.calibration/1"
_FORMATS: Final = {"low_format": "int8-step", "high_format": "fp16"}
_AGAIN: Final = "run `hybridstate calibrate MODEL -o DIR` again"


@dataclass(frozen=True, slots=True, eq=False)
class ValueMaps:
    """Value scaling and reordering of one layer, as `damp+reorder` chose them.

    Attributes:
        scale: c, float32 `[H, V]` by value dim of the model.
        order: int16 `[H, V]`, stored column -> value dim.
        protected: `[H, K_hi]`, the key channels chosen together with them.
    """

    scale: NDArray[np.float32]
    order: NDArray[np.int16]
    protected: NDArray[np.int16]


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """A calibration as a plan needs it.

    Attributes:
        path: the folder.
        model: name of the model it ran on.
        digests: `config`, `index` and `decay` of that checkpoint.
        k_hi, group, selector, key_order: the packed format it selected channels for.
        risk: per linear layer, `[H, K]` float32.
        protected: per linear layer, `[H, K_hi]`.
        block: the `calibration` block of the plan.
        values: per linear layer, its value maps; empty where `damp+reorder` was not run.
    """

    path: Path
    model: str
    digests: dict[str, str]
    k_hi: int
    group: int
    selector: str
    key_order: str
    risk: tuple[NDArray[np.float32], ...]
    protected: tuple[NDArray[np.int16], ...]
    block: dict[str, Any]
    values: tuple[ValueMaps, ...] = ()


def read_calibration(path: str | Path) -> Calibration:
    """Read and check a calibration folder.

    Raises:
        SourceError: a file is missing or corrupt, or an array has the wrong form.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    folder = Path(path)
    file, arrays_file = folder / CALIBRATION_FILE, folder / ARRAYS_FILE
    for needed in (file, arrays_file):
        if not needed.is_file():
            raise SourceError(
                f"{folder} has no {needed.name}",
                hint=_AGAIN,
                file=str(needed),
                expected=needed.name,
            )
    try:
        content = an_object(parse_json(read_bytes(file)), file.name)
        arrays = load_file(arrays_file)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise SourceError(
            f"{folder}: not readable: {error}", hint=_AGAIN, file=str(folder)
        ) from error
    try:
        return _parse(folder, content, arrays)
    except UNREADABLE as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise SourceError(
            f"{file}: not a calibration this version reads: {reason}",
            hint=_AGAIN,
            file=str(file),
        ) from error


def _parse(folder: Path, content: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Calibration:
    if content["schema"] != SCHEMA:
        raise PlanMismatch(
            f"{folder / CALIBRATION_FILE}: schema {content['schema']}, this version reads {SCHEMA}",
            hint="calibrate and export with the same hybridstate",
            file=str(folder / CALIBRATION_FILE),
            found=str(content["schema"]),
            expected=SCHEMA,
        )
    for part, format_ in _FORMATS.items():
        if content.get(part, format_) != format_:
            raise PlanMismatch(
                f"{folder / CALIBRATION_FILE}: {part} is {content[part]!r:.60}, plans hold {format_}",
                hint="calibrate and export with the same hybridstate",
                file=str(folder / CALIBRATION_FILE),
                found=str(content[part]),
                expected=format_,
            )
    _check_bytes(folder, content, arrays)
    indices = sorted(int(name.split(".")[1]) for name in arrays if name.endswith(".risk"))
    if not indices:
        raise SourceError(f"{folder / ARRAYS_FILE} holds no layers.*.risk", file=str(folder))
    k_hi = int(content["k_hi"])
    risk, protected = [], []
    for index in indices:
        scores = arrays[f"layers.{index}.risk"]
        chosen = arrays[f"layers.{index}.protected"]
        if (str(scores.dtype), str(chosen.dtype)) != ("float32", "int16"):
            raise SourceError(
                f"{folder / ARRAYS_FILE}: layers.{index}: risk is {scores.dtype} and protected "
                f"{chosen.dtype}, expected float32 and int16",
                hint=_AGAIN,
                file=str(folder / ARRAYS_FILE),
                layer=index,
            )
        if scores.ndim != 2 or chosen.shape != (scores.shape[0], k_hi):
            raise SourceError(
                f"{folder / ARRAYS_FILE}: layers.{index}: risk {list(scores.shape)} and protected "
                f"{list(chosen.shape)} do not fit {k_hi} channels per head",
                hint=_AGAIN,
                file=str(folder / ARRAYS_FILE),
                layer=index,
            )
        risk.append(scores)
        protected.append(chosen)
    values = _value_maps(folder, arrays, indices, [scores.shape[0] for scores in risk], k_hi)
    model = an_object(content["model"], "model")
    digests = an_object(model["digests"], "model.digests")
    validation = content.get("validation", [])
    if not isinstance(validation, list):
        raise TypeError("validation is no list of formats")
    return Calibration(
        path=folder,
        model=str(model["name"]),
        digests={part: str(digests[part]) for part in ("config", "index", "decay")},
        k_hi=k_hi,
        group=int(content["group"]),
        selector=str(content["selector"]),
        key_order=str(content["key_order"]),
        risk=tuple(risk),
        protected=tuple(protected),
        block={
            "protocol": content["protocol"],
            "fingerprint": content["fingerprint"],
            "prompt_digests": content["prompt_digests"],
            "seed": content.get("seed"),
            "split_agreement": content.get("split_agreement"),
            "split_agreement_random": content.get("split_agreement_random"),
            "repeated_32gram_share": content.get("repeated_32gram_share"),
            "validation_sequences": content.get("validation_sequences"),
            "validation_positions": content.get("validation_positions"),
            "validation": [
                {
                    name: an_object(row, f"validation[{n}]")[name]
                    for name in ValidationRow.model_fields
                }
                for n, row in enumerate(validation)
            ],
        },
        values=values,
    )


def _value_maps(
    folder: Path, arrays: dict[str, NDArray[Any]], indices: list[int], heads: list[int], k_hi: int
) -> tuple[ValueMaps, ...]:
    """Value maps of every layer, or none where no layer has them.

    Raises:
        SourceError: a layer lacks a part, or an array has the wrong form.
    """
    names = {"value_scale": "float32", "value_order": "int16", "protected_reorder": "int16"}
    if not any(f"layers.{i}.value_order" in arrays for i in indices):
        return ()
    found = []
    for index, count in zip(indices, heads, strict=True):
        parts = [arrays.get(f"layers.{index}.{name}") for name in names]
        scale, order, protected = parts
        if (
            scale is None
            or order is None
            or protected is None
            or [str(a.dtype) for a in (scale, order, protected)] != list(names.values())
            or scale.shape != order.shape
            or order.ndim != 2
            or len(order) != count
            or protected.shape != (count, k_hi)
            or (np.sort(order, axis=1) != np.arange(order.shape[1])).any()
            or not (np.isfinite(scale) & (scale > 0)).all()
        ):
            raise SourceError(
                f"{folder / ARRAYS_FILE}: layers.{index}: {', '.join(names)} are not value maps of "
                f"{count} heads with {k_hi} channels",
                hint=_AGAIN,
                file=str(folder / ARRAYS_FILE),
                layer=index,
            )
        found.append(ValueMaps(scale, order, protected))
    return tuple(found)


def _check_bytes(folder: Path, content: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> None:
    """Arrays whose digest `calibration.json` names must have it."""
    for name, given in an_object(content.get("arrays", {}), "arrays").items():
        listed = an_object(given, f"arrays.{name}")
        found = sha256_bytes(arrays[name].tobytes()) if name in arrays else None
        if found != listed["sha256"]:
            problem = "is missing" if found is None else "was changed"
            raise SourceError(
                f"{folder / ARRAYS_FILE}: {name} {problem}",
                hint=_AGAIN,
                file=str(folder / ARRAYS_FILE),
                array=name,
                found=found,
                expected=listed["sha256"],
            )
