"""llama.cpp, by the package xllamacpp; as a program, a process for files on which it may abort."""

import json
import sys
from pathlib import Path
from typing import Any


def llama_cpp(file: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request for completions. Raises `RuntimeError` if the file cannot be loaded."""
    import xllamacpp as xlc

    params = xlc.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(file), 96, 1, False
    params.cache_type_k = params.cache_type_v = xlc.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xlc.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads, params.verbosity = 1, 0
    return xlc.Server(params).handle_completions(request)


if __name__ == "__main__":
    for line in sys.stdin:
        name, asked = json.loads(line)
        try:
            answer = llama_cpp(Path(name), asked)
        except RuntimeError as error:
            answer = {"error": str(error)}
        print("\n" + json.dumps({"answer": answer}), flush=True)
