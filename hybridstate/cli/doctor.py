"""`hybridstate doctor`: what this installation can do, and what is missing for the rest."""

from typing import Any

import typer

from hybridstate.cli.options import Json, Quiet
from hybridstate.cli.output import Output, command


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(
        "doctor",
        short_help="Versions, GPU, kernels, embedded models and the Hub.",
        epilog="Example: hybridstate doctor --json",
    )(doctor)


def doctor(json: Json = False, quiet: Quiet = False) -> None:
    """Versions, GPU, kernels and embedded models of this installation, and how it reaches the Hub.

    Always exits with 0 when it can look: an absent GPU is a fact, not an error.
    """
    with command("doctor", json=json, quiet=quiet) as output:
        from hybridstate.provenance import environment

        versions = environment()
        device = _device()
        models = _embedded()
        hub = _hub()
        output.result(
            {"environment": versions, "device": device, "embedded_models": models, "hub": hub}
        )
        if not json:
            _show(output, versions, device, models)
            output.table(
                "Hugging Face Hub", ("what", "found"), [(k, _text(v)) for k, v in hub.items()]
            )


def _device() -> dict[str, Any]:
    """GPU name, memory and kernel backend; imports torch, so `doctor` takes a few seconds."""
    try:
        import torch
    except ImportError as error:
        absent: dict[str, Any] = {
            "kernels": None,
            "kernels_reason": None,
            "kernel_dims": [],
            "prefill": {},
        }
        return {"torch": str(error), "cuda": None, "gpus": [], **absent}
    gpus = [
        {
            "name": torch.cuda.get_device_name(i),
            "memory_bytes": int(torch.cuda.get_device_properties(i).total_memory),
            "capability": list(torch.cuda.get_device_capability(i)),
        }
        for i in range(torch.cuda.device_count())
    ]
    return {
        "torch": "ok",
        "cuda": torch.version.cuda,
        "gpus": gpus,
        **_kernels("cuda" if gpus else "cpu"),
    }


KERNEL_DIMS = (
    (128, 128),
    (64, 64),
    (96, 192),
    (128, 96),
    (192, 128),
    (256, 256),
    (256, 512),
)
"""Key and value channels per head of released models and others that the kernels take; the first is the paper's."""


def _kernels(device: str) -> dict[str, Any]:
    """The decode kernel that runs the paper's format here and why, tested now, and what other sizes may use.

    Other sizes are tested when they are first used; here they say only whether the matrix kernel exists for them.
    """
    import torch

    from hybridstate.kernels.layout import PackedLayout
    from hybridstate.kernels.prefill import Geometry, choose
    from hybridstate.kernels.update import backend, backend_reason

    paper = PackedLayout(*KERNEL_DIMS[0], k_hi=16)
    chosen, reason = (f(torch.device(device), paper) for f in (backend, backend_reason))
    dims = []
    for key_dim, value_dim in KERNEL_DIMS:
        layout = PackedLayout(key_dim, value_dim, 16 * max(1, round(key_dim / 128)))
        obstacle = layout.fragment_obstacle
        dims.append(
            {
                "key_dim": key_dim,
                "value_dim": value_dim,
                "layout": layout.layout_id,
                "matrix_kernel": obstacle is None,
                "why": obstacle or "fits the matrix instruction",
            }
        )
    prefill = {
        name: choose(device, torch.bfloat16, Geometry(2, 4, *KERNEL_DIMS[0], per_channel)).reason
        for name, per_channel in (("GDN", False), ("KDA", True))
    }
    return {
        "kernels": str(chosen),
        "kernels_reason": reason,
        "kernel_dims": dims,
        "prefill": prefill,
    }


def _hub() -> dict[str, Any]:
    """Where Hub models come from and are kept, and whether there is a login; never the token."""
    from huggingface_hub import constants, get_token

    from hybridstate.checkpoint.cache import default_root
    from hybridstate.checkpoint.hub import offline_by_environment

    root = default_root()
    return {
        "endpoint": constants.ENDPOINT,
        "logged_in": get_token() is not None,
        "offline": offline_by_environment(),
        "cache": str(root),
        "cached_bytes": sum(f.stat().st_size for f in root.rglob("*") if f.is_file()),
    }


def _embedded() -> list[dict[str, Any]]:
    from hybridstate.checkpoint import EMBEDDED, open_checkpoint
    from hybridstate.errors import HybridStateError

    found: list[dict[str, Any]] = []
    for name in EMBEDDED:
        try:
            checkpoint = open_checkpoint(name)
            found.append({"name": name, "family": checkpoint.spec.name, "bytes": checkpoint.size})
        except HybridStateError as error:
            found.append({"name": name, "family": None, "bytes": None, "error": error.message})
    return found


def _show(
    output: Output, versions: dict[str, Any], device: dict[str, Any], models: list[dict[str, Any]]
) -> None:
    output.table("versions", ("package", "found"), [(k, _found(k, v)) for k, v in versions.items()])
    kernels = device["kernels"] or f"unknown ({device['torch']})"
    if kernels == "reference":
        kernels = "none, the torch reference runs"
    if device["gpus"]:
        output.table(
            f"GPUs (CUDA {device['cuda']}, decode kernels: {kernels})",
            ("name", "memory", "capability"),
            [
                (
                    gpu["name"],
                    f"{gpu['memory_bytes'] / 2**30:.0f} GiB",
                    ".".join(map(str, gpu["capability"])),
                )
                for gpu in device["gpus"]
            ],
        )
    else:
        output.text("")
        output.text("no GPU: calibrate and bench run on the CPU")
        output.text(f"decode kernels: {kernels}")
    if device["kernel_dims"]:
        output.table(
            "decode kernels of the packed state",
            ("key x value channels", "kernel that fits", "why"),
            [
                (
                    f"{d['key_dim']} x {d['value_dim']}",
                    "matrix (Gluon)" if d["matrix_kernel"] else "plain Triton",
                    d["why"],
                )
                for d in device["kernel_dims"]
            ],
            note=_kernel_note(
                device["kernels"], device["kernels_reason"], gpu=bool(device["gpus"])
            ),
        )
        output.table(
            "prefill of 128 x 128 states",
            ("recurrence", "runs"),
            list(device["prefill"].items()),
        )
    output.table(
        "embedded models",
        ("name", "family", "bytes"),
        [(m["name"], m["family"] or "not installed", m["bytes"]) for m in models],
    )


def _kernel_note(chosen: str, reason: str, *, gpu: bool) -> str:
    """What runs here at 128 x 128, and that it does so instead of the kernel that would fit."""
    if chosen == "reference":
        table = "the table is for a GPU with both kernels; on this"
        return (
            f"{table} GPU the reference runs ({reason})"
            if gpu
            else f"{table} CPU the reference runs"
        )
    found = f"chosen here for 128 x 128: {reason}"
    return found if chosen == "gluon" else f"{found}; {chosen} runs instead of the matrix kernel"


def _found(name: str, value: object) -> str:
    """A version; fla is optional: transformers and `bench update` use it where it is."""
    if value is None and name in ("fla_core", "flash_linear_attention"):
        return "not installed (optional)"
    return _text(value)


def _text(value: object) -> str:
    if value is None:
        return "-"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
