"""The SageMaker port: a ping, invocations of one model, and models that come and go."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from nerite.config.options import SagemakerOptions
from nerite.core.client_text import checked
from nerite.core.errors import NeriteError
from nerite.transports.bounds import Bounds
from nerite.transports.clouds.dialects import SAGEMAKER, SAGEMAKER_MODELS
from nerite.transports.clouds.sagemaker_models import NOT_FOUND, SagemakerModels
from nerite.transports.http import reply
from nerite.transports.http.handler import HttpExchange
from nerite.transports.http.head import RequestHead
from nerite.transports.http.plan import Plan
from nerite.transports.http.reply import Reply
from nerite.transports.http.router import Router
from nerite.transports.http.service import HttpService
from nerite.transports.http.target import Target

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_TARGET: Final = "x-amzn-sagemaker-target-model"
_MODELS: Final = re.compile(r"/models(?:/(?P<name>[^/]*))?(?P<invoke>/invoke)?")


class SagemakerRouter:
    """Leads SageMaker's requests to what HTTP answers, and to the models that it has loaded."""

    def __init__(self, router: Router, options: SagemakerOptions, models: SagemakerModels) -> None:
        self._router = router
        self._options = options
        self._models = models

    def target(self, head: RequestHead) -> Target:
        """Return what a head asks for."""
        options = self._options
        if head.path == "/ping":
            return self._router.at(f"/v2/health/{options.ping_mode}", head)
        if head.path == "/invocations":
            return self._router.at(f"/v2/models/{options.default_model}/{options.inference_type}", head, SAGEMAKER)
        match = _MODELS.fullmatch(head.path)
        if match is None or head.method not in ("GET", "POST", "DELETE"):
            return Target(reply.BAD_REQUEST)
        name, target_model = match["name"] or "", head.headers.get(_TARGET)
        try:
            checked(name, "the model in the path")
            checked(target_model or "", f"header '{_TARGET}'")
        except NeriteError as error:
            return Target(refusal=reply.error_reply(error, reply.PLAIN))
        if head.method == "POST" and match["invoke"]:
            return self._router.inference(head, target_model or name, "", SAGEMAKER_MODELS)
        refusal = self._router.locked("model-repository", head)
        if head.method == "POST":
            return Target(refusal=refusal, call=self._models.load(target_model))
        if head.method == "DELETE":
            return Target(refusal=refusal, call=self._models.unload(name))
        return Target(refusal=refusal, call=self._models.tell(name) if name else self._models.tell_all)


class SagemakerService(HttpService):
    """The handler of the port: it knows that a model may be gone before it is asked."""

    def __init__(
        self,
        server: InferenceServer,
        target_of: Callable[[RequestHead], Target],
        models: SagemakerModels,
        bounds: Bounds,
        *,
        max_input_size: int,
    ) -> None:
        super().__init__(server, target_of, bounds, max_input_size=max_input_size)
        self._models = models

    def begin(self, head: RequestHead) -> Reply | None:
        """Refuse also to invoke a model that SageMaker has not loaded, or no longer has."""
        return super().begin(head) or self._unknown(head)

    def handle_again(self, connection: HttpExchange, plan: Plan, data: bytearray) -> None:
        """Answer an inference as before, unless the model is gone."""
        unknown = self._unknown(connection.head)
        if unknown is None:
            super().handle_again(connection, plan, data)
        else:
            connection.send([unknown.encode()])

    def _unknown(self, head: RequestHead) -> Reply | None:
        target: Target = head.route
        if target.dialect is not SAGEMAKER_MODELS:
            return None
        name = head.path.removeprefix("/models/").removesuffix("/invoke")
        return None if name in self._models else NOT_FOUND
