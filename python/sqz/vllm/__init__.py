"""sqz in vLLM: every request is answered as if the index's fixed context stood in front of it.

    SQZ_INDEX=manual.sqz SQZ_BUDGET=0.125 vllm serve MODEL --attention-backend CUSTOM --max-model-len 8192

vLLM loads this plug-in from entry-point group `vllm.general_plugins` in each of its processes. Without SQZ_INDEX it
does nothing. Prompts hold what follows the context: the context takes no blocks of vLLM's cache, and its tokens are
neither counted nor computed. Each further variable is an argument of sqz.Session: see sqz.vllm.options.
"""

from __future__ import annotations

import os

from .options import Options

_registered: Options | None = None


def register() -> None:
    """Makes vLLM serve from the index that SQZ_INDEX names, which is opened once in this process.

    Twice is once. Raises sqz.Error, with what is wrong, if the index cannot be opened, and ValueError if this process
    serves with other options already.
    """
    global _registered
    options = Options.from_environment(os.environ)
    if options is None or options == _registered:
        return
    if _registered is not None:
        raise ValueError(f"SQZ_INDEX and its options: found {options}, but this process serves with {_registered}: "
                         "use another process")
    tokens = options.opened.info.tokens
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import rope, startup

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, "sqz.vllm.cpu.Backend")  # vLLM takes no other on a CPU
    else:
        register_backend(AttentionBackendEnum.CUSTOM, "sqz.vllm.cuda.Backend")
    startup.check_configurations(options)
    rope.begin_at(tokens)
    _registered = options


def registered() -> Options:
    """What this process serves. AssertionError if nothing is registered."""
    assert _registered is not None
    return _registered
