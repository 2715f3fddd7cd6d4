"""A network behind MLServer: a runtime as its users write one. Runs in MLServer's environment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from zoo import CONTESTANTS


class ZooModel(MLModel):
    """Computes with the framework itself."""

    async def load(self) -> bool:
        """Open what the contestant wrote."""
        extra = self.settings.parameters.extra
        self.call = CONTESTANTS[extra["contestant"]].opened(extra["model"], Path(extra["version"]))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Compute a request, or what MLServer made one of several."""
        computed = np.asarray(self.call(NumpyCodec.decode_input(payload.inputs[0])))
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("OUT", computed)])
