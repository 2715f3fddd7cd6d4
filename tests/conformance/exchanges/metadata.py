"""Metadata, configuration and readiness over HTTP."""

from conformance.exchange import get
from conformance.exchanges.scenes import GOOD

SCENE = GOOD

EXCHANGES = {
    "server": get("/v2"),
    **{f"metadata of {model}": get(f"/v2/models/{model}") for model in GOOD.models},
    **{f"configuration of {model}": get(f"/v2/models/{model}/config") for model in GOOD.models},
    "one version": get("/v2/models/versions/versions/3"),
    "configuration of a version": get("/v2/models/versions/versions/1/config"),
    "unknown model": get("/v2/models/none"),
    "unknown version": get("/v2/models/versions/versions/2"),
    "version that is no number": get("/v2/models/versions/versions/x"),
    "version zero": get("/v2/models/versions/versions/0"),
    "negative version": get("/v2/models/versions/versions/-1"),
    "version with leading zeros": get("/v2/models/versions/versions/003"),
    "version that ends in letters": get("/v2/models/versions/versions/3x"),
    "version with a plus": get("/v2/models/versions/versions/+3"),
    "version beyond 64 bits": get("/v2/models/versions/versions/99999999999999999999"),
    "version with a fraction": get("/v2/models/versions/versions/1.5"),
    "directory with leading zeros": get("/v2/models/versions/versions/7"),
    "configuration of an unknown model": get("/v2/models/none/config"),
    "configuration of an unknown version": get("/v2/models/versions/versions/2/config"),
    "configuration of a version that is no number": get("/v2/models/versions/versions/x/config"),
    "model ready": get("/v2/models/echo/ready"),
    "version ready": get("/v2/models/versions/versions/3/ready"),
    "unknown model ready": get("/v2/models/none/ready"),
    "unknown version ready": get("/v2/models/versions/versions/2/ready"),
    "ready of a version that is no number": get("/v2/models/versions/versions/x/ready"),
}
