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
        return {"torch": str(error), "cuda": None, "gpus": [], "kernels": None}
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
        "kernels": _kernel_backend("cuda" if gpus else "cpu"),
    }


def _kernel_backend(device: str) -> str | None:
    """Backend of the decode kernel for the paper's format, or None where it cannot be told."""
    import torch

    from hybridstate.defaults import GROUP
    from hybridstate.kernels.layout import PackedLayout
    from hybridstate.kernels.update import backend

    layout = PackedLayout(key_dim=128, value_dim=128, k_hi=16, group=GROUP)
    return str(backend(torch.device(device), layout))


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
    output.table("versions", ("package", "found"), [(k, _text(v)) for k, v in versions.items()])
    kernels = device["kernels"] or f"unknown ({device['torch']})"
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
        output.text(f"no GPU: calibrate and bench run on the CPU, decode kernels: {kernels}")
    output.table(
        "embedded models",
        ("name", "family", "bytes"),
        [(m["name"], m["family"] or "not installed", m["bytes"]) for m in models],
    )


def _text(value: object) -> str:
    if value is None:
        return "-"
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
