"""A child process in which SGLang resolves printed commands, as its launcher does before it loads a model.

Reads a JSON list of {"config", "argv"} from standard input; MODEL in argv stands for a folder with that config. Writes
a JSON list: what SGLang resolved, or `error`. SGLang is told that the machine has compute capability 12.0, and that its
platform drafts and keeps linear-attention states; nothing is loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

READ = (
    "tp_size", "ep_size", "pp_size", "dp_size", "attn_dp_size", "nnodes", "page_size", "moe_runner_backend",
    "chunked_prefill_size", "max_running_requests", "max_mamba_cache_size", "mem_fraction_static", "kv_cache_dtype",
    "speculative_num_draft_tokens", "context_length",
)  # fmt: skip


def main() -> None:
    """Resolve every command."""
    torch.cuda.get_device_capability = lambda *args: (12, 0)
    from sglang.srt.arg_groups import mamba_hook, speculative_hook

    type(speculative_hook.current_platform).supports_speculative_algorithm = lambda self, name: True
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    cases = json.load(sys.stdin)
    print(json.dumps([resolved(case) for case in cases]), file=sys.stdout)


def resolved(case: dict[str, Any]) -> dict[str, Any]:
    """One command, or why SGLang refuses it."""
    from sglang.srt import runtime_context
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    runtime_context.reset_context()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(case["config"]))
        words = [folder if word == "MODEL" else word for word in case["argv"]]
        beside = ["--device", "cpu", "--skip-tokenizer-init", "--load-format", "dummy"]
        parsed = parser.parse_args(["--model-path", *words, *beside])
        try:
            runtime_context.override_platform(is_blackwell=True, is_sm120=True, is_cuda=True).install()
            args = ServerArgs.from_cli_args(parsed)
            args.resolve_once()
        except (ValueError, AssertionError, RuntimeError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        view = resolved_view(args)
        return {name: getattr(view, name) for name in READ}


if __name__ == "__main__":
    main()
