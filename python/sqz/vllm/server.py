"""vLLM's HTTP server: clients name contexts, list them, load and remove them, and see what was fetched."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from . import registered
from .frontend import NAME, drive, leases_of, names_of_extra
from .leases import Leases

GENERATING = "to_sampling_params", "to_chat_completion_request", "sampling_params"  # of requests that take a context
LOSING = "use_beam_search", "label_token_ids", "questions"  # of those that vLLM makes others of, without the context


def install() -> None:
    """Patches vLLM's server. A request may also choose its context by its model, "served@moby"."""
    from vllm.entrypoints.openai.models import api_router
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.serve.engine.serving import BaseServing

    check_model, models, attach = BaseServing._check_model, OpenAIServingModels.show_available_models, api_router.attach_router

    @functools.wraps(check_model)
    async def check(self: Any, request: Any) -> Any:
        name = request.model or ""
        at = next((at for at, letter in enumerate(name) if letter == "@" and self.models.is_base_model(name[:at])), 0)
        where, extra = ((request.sampling_params, "extra_args") if hasattr(request, "sampling_params")
                        else (request, "vllm_xargs"))
        given = getattr(where, extra, None)
        if at and not self.models.is_base_model(name):
            request.model, given = name[:at], {**(given or {}), NAME: name[at + 1:]}
            if any(hasattr(request, one) for one in GENERATING):
                setattr(where, extra, given)
        try:  # here, because a stream that has begun cannot be an error any more
            engine, names = self.models.engine_client, names_of_extra(given)
            losing = next((one for one in LOSING if getattr(request, one, False)), None)
            if names is not None and losing is not None:
                raise ValueError(f"{NAME}: found {names} with {losing}, expected one of the two")
            leases_of(engine).release(await drive(leases_of(engine).acquire(names, counted=False), engine))
        except LookupError as error:
            return self.create_error_response(error.args[0], "NotFoundError", HTTPStatus.NOT_FOUND)
        except ValueError as error:
            return self.create_error_response(str(error))
        return await check_model(self, request)

    @functools.wraps(models)
    async def show_models(self: Any) -> Any:
        shown = await models(self)
        base = shown.data[0]
        shown.data += [base.model_copy(update={"id": f"{base.id}@{name}"}) for name in registered().library.names()]
        return shown

    @functools.wraps(attach)
    def attach_with(app: Any) -> None:
        attach(app)
        add_routes(app)

    BaseServing._check_model, OpenAIServingModels.show_available_models = check, show_models
    api_router.attach_router = attach_with


def add_routes(app: Any) -> None:
    """GET /v1/contexts; POST and DELETE /v1/contexts/NAME if SQZ_CONTEXTS_WRITE is set."""
    from fastapi import HTTPException, Request

    def refuse_unless_writing() -> None:
        if not registered().write:
            raise HTTPException(HTTPStatus.FORBIDDEN, "the library is for reading alone: start the server with "
                                                      "SQZ_CONTEXTS_WRITE=1")

    async def listed(request: Request) -> dict[str, Any]:
        engine, library = request.app.state.engine_client, registered().library
        leases = leases_of(engine)
        shown = []
        for name in library.names():
            try:
                file = library.file(name)
            except (LookupError, ValueError):  # it went meanwhile
                continue
            one = leases.resident.get(file)
            entry: dict[str, Any] = {"name": name, "bytes": file.bytes, "resident": bool(one and one.info)}
            if one and one.info:
                entry |= {"tokens": one.info.tokens, "requests": one.users}
                one.users += 1  # or its slot may be emptied meanwhile
                try:
                    entry["delivered_budget"] = (await engine.collective_rpc("sqz_delivered", args=(one.slot,)))[0]
                finally:
                    one.users -= 1
            shown.append(entry)
        return {"contexts": shown, **vars(leases.counters)}

    async def load(request: Request, name: str) -> dict[str, Any]:
        refuse_unless_writing()
        engine = request.app.state.engine_client
        try:
            lease = await drive(leases_of(engine).acquire([name], counted=False), engine)
        except LookupError as error:
            raise HTTPException(HTTPStatus.NOT_FOUND, error.args[0]) from None
        except ValueError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
        leases_of(engine).release(lease)
        return {"name": name, "tokens": lease.tokens, "bytes": lease.files[0].bytes}

    async def remove(name: str) -> dict[str, Any]:
        refuse_unless_writing()
        try:
            os.unlink(registered().library.file(name).path)
        except LookupError as error:
            raise HTTPException(HTTPStatus.NOT_FOUND, error.args[0]) from None
        except (ValueError, OSError) as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
        return {"name": name, "removed": True}

    for route, function, method in (("/v1/contexts", listed, "GET"), ("/v1/contexts/{name:path}", load, "POST"),
                                    ("/v1/contexts/{name:path}", remove, "DELETE")):
        function.__annotations__.update(request=Request, name=str)
        app.add_api_route(route, function, methods=[method])


class Metrics:
    """For prometheus_client: what the leases of an engine have counted."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        for name, value in vars(self._leases.counters).items():
            yield CounterMetricFamily(f"sqz_context_{name}", f"{name.replace('_', ' ')} of contexts", value=value)
