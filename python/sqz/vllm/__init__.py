"""sqz in vLLM: every request is answered as if fixed contexts of a library of indexes stood in front of it.

    SQZ_CONTEXTS=indexes/ SQZ_BUDGET=0.125 vllm serve MODEL --attention-backend CUSTOM --max-model-len 8192

vLLM loads this plug-in from entry-point group `vllm.general_plugins` in each of its processes. A request names its
context, moby for indexes/moby.sqz, or several, one behind the other: `"vllm_xargs": {"sqz_context": ["moby", "log"]}`.
SQZ_INDEX is the index of requests that name none. Without both variables the plug-in does nothing. Prompts hold what
follows the contexts: these take no blocks of vLLM's cache, and their tokens are neither counted nor computed. Each
further variable is an argument of sqz.Session: see sqz.vllm.options.
"""

from __future__ import annotations

import os

from .options import Options

_registered: Options | None = None


def register() -> None:
    """Makes vLLM serve from the indexes that SQZ_INDEX and SQZ_CONTEXTS name.

    Twice is once. Raises sqz.Error or OSError, with what is wrong, if the first index cannot be opened, and ValueError
    if there is none or if this process serves with other options already.
    """
    global _registered
    options = Options.from_environment(os.environ)
    if options is None or options == _registered:
        return
    if _registered is not None:
        raise ValueError(f"SQZ_INDEX and its options: found {options}, but this process serves with {_registered}: "
                         "use another process")
    _ = options.first
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # whose positions cannot be moved from outside
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import frontend, runner, server, startup, states

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "sqz.vllm.cpu.Backend")  # vLLM takes no other on a CPU
    else:
        register_backend(AttentionBackendEnum.CUSTOM, "sqz.vllm.cuda.Backend")
    startup.check_configurations(options)
    runner.install()
    states.install()
    frontend.install()
    server.install()
    _registered = options


def registered() -> Options:
    """What this process serves. AssertionError if nothing is registered."""
    assert _registered is not None
    return _registered
