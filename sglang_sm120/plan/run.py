"""`sglang-sm120 plan`: reads the model, chooses, and prints or writes what was found."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from sglang_sm120 import stdout
from sglang_sm120.errors import ConfigError, UnsupportedError
from sglang_sm120.plan import l2
from sglang_sm120.plan.choose import plan
from sglang_sm120.plan.fits import Request
from sglang_sm120.plan.gpus import DETECT, GPUS, Detected, detect, find
from sglang_sm120.plan.l2_layers import can_pin, layers_of
from sglang_sm120.plan.launch import PLACEHOLDER
from sglang_sm120.plan.memory import Split, problems
from sglang_sm120.plan.options import DEFAULT_CONTEXT, PlanOptions
from sglang_sm120.plan.record import record
from sglang_sm120.plan.shapes import ModelShape, read_shape

NOTHING_FITS = 1


def run(options: PlanOptions) -> int:
    """Plan, and print tables or JSON.

    Returns:
        0, or 1 if nothing fits.

    Raises:
        ConfigError: a model, a GPU or a number that makes no sense. UnsupportedError: --plot without matplotlib.
    """
    if options.plot is not None:
        _require_picture(options.plot)  # before anything is printed
    shape = read_shape(options.model)
    found = _gpus(options)
    if options.l2:
        return _l2(options, shape, found)
    request = Request(
        context=_context(options, shape),
        concurrency=options.concurrency,
        kv_dtype=_kv_dtype(options, shape),
        mtp=_mtp(options, shape),
        gpu=found.gpu,
    )
    planned = plan(shape, request, found.count, options.nodes)
    made = record(planned, served_as(options.model))
    if options.json:
        stdout.write(json.dumps(made, indent=2) + "\n")
    else:
        from sglang_sm120.plan.report import print_plan

        with stdout.writing():
            print_plan(made, whole=options.all)
    if options.plot is not None:
        _draw(made, options.plot)  # last, so that a disk that is full takes nothing else with it
    return 0 if planned.latency is not None else NOTHING_FITS


def _l2(options: PlanOptions, shape: ModelShape, found: Detected) -> int:
    """Print what --sm120-l2 would fetch with tensor parallelism over the GPUs of one node."""
    gpu, tp = found.gpu, found.count
    if gpu.l2_bytes is None:
        raise ConfigError(
            f"--l2, and how much L2 {gpu.title} has is not known here",
            "a GPU whose L2 is in the table",
            "name one of `sglang-sm120 plan --list`; a server asks its own GPU",
        )
    faults = [fault for fault in problems(shape, Split(tp=tp)) if fault]
    if faults:
        raise ConfigError(f"--l2 with --gpus {tp}: {faults[0]}", "a TP size that the model divides by", "change --gpus")
    layers = layers_of(shape, tp)
    most = gpu.persisting_l2_bytes or 0
    if options.l2_persist_bytes is not None and options.l2_persist_bytes > most:
        raise ConfigError(
            f"--sm120-l2-persist-mb of {options.l2_persist_bytes >> 20} MB",
            f"at most {most >> 20}: what {gpu.title} lets set aside of its L2",
            "lower it, or leave it out for the most",
        )
    plans = l2.prefetches(layers, options.l2_prefetch_bytes or l2.default_prefetch_bytes(gpu.l2_bytes))
    aside = most if options.l2_persist_bytes is None else options.l2_persist_bytes
    pins = l2.pinned(layers, aside, lambda weight: can_pin(shape, weight))
    if options.json:
        stdout.write(json.dumps(l2.record(shape.name, tp, gpu.l2_bytes, plans, pins), indent=2) + "\n")
        return 0
    lines = [
        f"{shape.name}, TP{tp}, {gpu.title}: {gpu.l2_bytes >> 20} MB of L2, counted from the config",
        *(f"- {line}" for line in l2.describe(plans, pins)),
        "Off by default; --sm120-l2 prefetch, persist or both: docs/l2.md. `sglang-sm120 bench l2` measures the gain.",
    ]
    stdout.write("\n".join(lines) + "\n")
    return 0


def list_all(*, as_json: bool = False) -> int:
    """Print the catalogue and the table of GPUs, or both as one JSON object."""
    from sglang_sm120.plan.catalogue import entries

    if as_json:
        found = {"models": entries(), "gpus": [asdict(gpu) for gpu in GPUS]}
        stdout.write(json.dumps(found, indent=2) + "\n")
        return 0
    from sglang_sm120.plan.report import gib, print_catalogue

    p2p = {True: "yes", False: "no", None: "not known here"}
    gpus = [(gpu.name, gpu.title, gib(gpu.cuda_bytes), p2p[gpu.p2p], gpu.source) for gpu in GPUS]
    models = [tuple(str(value or "") for value in entry.values()) for entry in entries()]
    with stdout.writing():
        print_catalogue(models, gpus)
    return 0


def served_as(model: str) -> str:
    """What `sglang serve` is given for MODEL: the checkpoint's folder, or a placeholder for a name of the catalogue."""
    path = Path(model)
    if path.is_dir():
        return model
    return str(path.parent) if path.is_file() else PLACEHOLDER


def _gpus(options: PlanOptions) -> Detected:
    if options.gpu != DETECT:
        assert options.gpus is not None, "options have a number unless GPUs are detected"
        return Detected(find(options.gpu), options.gpus)
    here = detect()
    if options.gpus is None or options.gpus <= here.count:
        return Detected(here.gpu, options.gpus or here.count)
    note = f"--gpus {options.gpus}, but nvidia-smi lists {here.count}: planned for {options.gpus}"
    note = f"{here.gpu.note}; {note}" if here.gpu.note else note
    return Detected(replace(here.gpu, note=note), options.gpus)


def _context(options: PlanOptions, shape: ModelShape) -> int:
    if options.context is None:
        return min(DEFAULT_CONTEXT, shape.max_context)
    if options.context > shape.max_context:
        raise ConfigError(
            f"--context {options.context:,}, and {shape.name} has {shape.max_context:,}",
            "a context that the model was made for; SGLang refuses more",
            f"take --context {shape.max_context} or less",
        )
    return options.context


def _kv_dtype(options: PlanOptions, shape: ModelShape) -> str:
    """What SGLang 0.5.23 takes by itself on compute capability 10 and newer (its arg_groups/overrides.py)."""
    if options.kv_dtype != "auto":
        return options.kv_dtype
    return "fp8_e4m3" if shape.attention.kind == "dsa" else "bfloat16"


def _mtp(options: PlanOptions, shape: ModelShape) -> bool:
    if options.mtp and not shape.mtp_layers:
        raise ConfigError(
            f"--mtp, and {shape.name} has no MTP head", "a model with num_nextn_predict_layers", "leave out --mtp"
        )
    return options.mtp


def _require_picture(path: str) -> None:
    """Raises: ConfigError if no picture can be put there, UnsupportedError without matplotlib."""
    from sglang_sm120.plan.plot import formats

    known, file = formats(), Path(path)
    if not path or file.is_dir():
        raise _no_picture(path, "no file" if not path else "a folder")
    if not file.parent.is_dir():
        raise _no_picture(path, f"there is no folder {file.parent}")
    if file.suffix.removeprefix(".").lower() not in known:
        raise _no_picture(path, f"formats are {', '.join(known)}")


def _draw(made: dict[str, object], path: str) -> None:
    from sglang_sm120.plan.plot import draw

    try:
        draw(made, path)
    except UnsupportedError:
        raise
    except (OSError, ValueError) as error:
        raise _no_picture(path, str(error)) from error


def _no_picture(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"--plot {path!r} cannot be written ({why})", "a file such as plan.png, in a folder that is there", "name it"
    )
