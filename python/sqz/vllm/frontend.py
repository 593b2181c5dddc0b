"""The front end of vLLM: requests get leases of their contexts, and clients name and list them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import AsyncIterator, Generator
from typing import Any

from . import registered, runner
from .leases import Call, Lease, Leases, Resident, Wait, Work

NAME = "sqz_context"  # of vllm_xargs: a name, or several, one behind the other
SALT = "sqz_salt"


def install() -> None:
    """Patches vLLM's engines for asyncio and for plain code, and its server."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine

    generate, add_request, step = AsyncLLM.generate, LLMEngine.add_request, LLMEngine.step
    abort_request = LLMEngine.abort_request
    process_inputs = InputProcessor.process_inputs

    @functools.wraps(generate)
    async def generate_with(self: Any, prompt: Any, sampling_params: Any, *rest: Any, **named: Any) -> AsyncIterator[Any]:
        lease = await drive(leases_of(self).acquire(names_of(sampling_params)), self)
        try:
            parameters = behind(lease, prompt, sampling_params, self.model_config)
            # Whoever stops early closes the outer generator alone. The request ends before its lease does.
            async with contextlib.aclosing(generate(self, prompt, parameters, *rest, **named)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            leases_of(self).release(lease)

    @functools.wraps(add_request)
    def add_request_with(self: Any, request_id: str, prompt: Any, params: Any, *rest: Any, **named: Any) -> Any:
        lease = drive_now(leases_of(self).acquire(names_of(params)), self)
        try:
            params = behind(lease, prompt, params, self.model_config)
            added = add_request(self, request_id, prompt, params, *rest, **named)
        except BaseException:
            leases_of(self).release(lease)
            raise
        self.sqz_held[added] = lease
        return added

    @functools.wraps(abort_request)
    def abort_request_with(self: Any, *arguments: Any, **named: Any) -> None:
        abort_request(self, *arguments, **named)
        release_ended(self)

    @functools.wraps(step)
    def step_with(self: Any) -> Any:
        outputs = step(self)
        release_ended(self)
        return outputs

    @functools.wraps(process_inputs)
    def process_inputs_with(self: Any, *arguments: Any, **named: Any) -> Any:
        request = process_inputs(self, *arguments, **named)
        extra = getattr(request.sampling_params, "extra_args", None) or {}
        if SALT in extra or request.cache_salt:  # a block of vLLM's cache is right after its own contexts alone
            request.cache_salt = f"{extra.get(SALT, '')}|{request.cache_salt or ''}"
        return request

    AsyncLLM.generate, LLMEngine.add_request, LLMEngine.step = generate_with, add_request_with, step_with
    LLMEngine.abort_request = abort_request_with
    InputProcessor.process_inputs = process_inputs_with


def leases_of(engine: Any) -> Leases:
    """Those of an AsyncLLM or LLMEngine."""
    if not hasattr(engine, "sqz_leases"):
        options, (first, info) = registered(), engine.vllm_config.sqz_first
        leases = Leases(options.library, options.memory, info.model_fingerprint)
        leases.resident[first] = Resident(0, first.bytes, users=int(bool(options.index)), info=info)
        engine.sqz_leases = leases
        engine.sqz_held = {}
        with contextlib.suppress(ImportError, ValueError):  # without prometheus, or another engine of the process counts
            from prometheus_client import REGISTRY

            from .server import Metrics

            REGISTRY.register(Metrics(engine.sqz_leases))
    leases = engine.sqz_leases
    assert isinstance(leases, Leases)
    return leases


def release_ended(engine: Any) -> None:
    """Releases the leases of requests that an LLMEngine no longer has, finished or aborted."""
    known, held = engine.output_processor, getattr(engine, "sqz_held", {})
    for request in [one for one in held if one not in known.request_states and one not in known.parent_requests]:
        leases_of(engine).release(held.pop(request))


def names_of(params: Any) -> list[str] | None:
    """The contexts that a request names; None: it names none. ValueError for anything else."""
    return names_of_extra(getattr(params, "extra_args", None))


def names_of_extra(extra: dict[str, Any] | None) -> list[str] | None:
    """The same from vllm_xargs."""
    given = (extra or {}).get(NAME)
    for name in (runner.CONTEXTS, runner.TOKENS, SALT):
        if name in (extra or {}):
            raise ValueError(f"vllm_xargs: found {name}, which is the server's own; expected {NAME}")
    names = [given] if isinstance(given, str) else given
    if isinstance(given, str) and given.startswith("["):
        with contextlib.suppress(ValueError, RecursionError):  # or the name begins so
            names = json.loads(given)
    if names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return names
    raise ValueError(f"{NAME}: found {given!r}, expected a name or a list of names")


def behind(lease: Lease, prompt: Any, params: Any, model: Any) -> Any:
    """The parameters of a request that begins behind its contexts. ValueError if it goes beyond the model's positions."""
    from sqz.transformers.fingerprint import max_positions

    positions, longest = max_positions(model.hf_text_config), model.max_model_len
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if ids is not None and getattr(params, "max_tokens", None) is not None:
        longest = min(longest, len(ids) + params.max_tokens)
    if 0 < positions < lease.tokens + longest:
        raise ValueError(f"{NAME}: found contexts of {lease.tokens} tokens and a request of up to {longest}, expected at "
                         f"most {positions} together, the model's positions")
    if not lease.contexts:
        return params
    params = params.clone()
    params.extra_args = {**(params.extra_args or {}), runner.CONTEXTS: [list(one) for one in lease.contexts],
                         runner.TOKENS: lease.tokens, SALT: lease.salt}
    return params


def _go_on(steps: Generator[Any, Any, Lease], outcome: Any) -> Any:
    """What Leases.acquire() wants next, or its Lease. outcome: the result of what it wanted, or the error."""
    try:
        return steps.throw(outcome) if isinstance(outcome, Exception) else steps.send(outcome)
    except StopIteration as end:
        return end.value


async def drive(steps: Generator[Any, Any, Lease], engine: Any) -> Lease:
    """Leases.acquire() under asyncio: others go on meanwhile. Loading goes on if whoever drives is cancelled, because
    others may wait for it; then the lease is given back."""
    item = _go_on(steps, None)
    while item is Wait.ROOM:
        await asyncio.sleep(0.005)
        item = _go_on(steps, None)
    loading = asyncio.ensure_future(_load(item, steps, engine))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        def give_back(ended: asyncio.Future[Lease]) -> None:
            if not ended.cancelled() and ended.exception() is None:
                leases_of(engine).release(ended.result())

        loading.add_done_callback(give_back)
        raise


async def _load(item: Any, steps: Generator[Any, Any, Lease], engine: Any) -> Lease:
    """Takes the steps from `item` on."""
    while not isinstance(item, Lease):
        try:
            if isinstance(item, Call):
                outcome = await engine.collective_rpc(item.method, args=item.arguments)
            elif isinstance(item, Work):
                outcome = await asyncio.to_thread(item.function)
            else:
                outcome = await asyncio.sleep(0.005, None)
        except Exception as error:
            outcome = error
        item = _go_on(steps, outcome)
    return item


def drive_now(steps: Generator[Any, Any, Lease], engine: Any) -> Lease:
    """The same in plain code, where no other request ends meanwhile."""
    item = _go_on(steps, None)
    while not isinstance(item, Lease):
        outcome: Any = None
        try:
            if isinstance(item, Call):
                outcome = engine.collective_rpc(item.method, args=item.arguments)
            elif isinstance(item, Work):
                outcome = item.function()
            elif item is Wait.LOADING:
                time.sleep(0.005)
            else:
                outcome = ValueError(f"{NAME}: found more contexts at once than SQZ_MEMORY holds, expected less: give "
                                     "generate() fewer prompts, or more memory")
        except Exception as error:
            outcome = error
        item = _go_on(steps, outcome)
    return item
