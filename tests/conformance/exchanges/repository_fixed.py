"""The repository's calls where models are neither loaded nor unloaded by them."""

from conformance.exchange import get, post
from conformance.exchanges.scenes import SMALL

SCENE = SMALL

EXCHANGES = {
    "name of the server": get("/v2"),
    "ready": get("/v2/health/ready"),
    "index": post("/v2/repository/index"),
    "index with an empty object": post("/v2/repository/index", {}),
    "index of what is ready": post("/v2/repository/index", {"ready": True}),
    "index of everything": post("/v2/repository/index", {"ready": False}),
    "index of a repository": post("/v2/repository/models/index"),
    "index of another repository": post("/v2/repository/other/index"),
    "index with ready as text": post("/v2/repository/index", {"ready": "true"}),
    "index with ready as null": post("/v2/repository/index", {"ready": None}),
    "index with an unknown key": post("/v2/repository/index", {"colour": 1}),
    "index with an array": post("/v2/repository/index", []),
    "index with bad JSON": post("/v2/repository/index", b"{"),
    "load": post("/v2/repository/models/echo/load"),
    "load with parameters": post("/v2/repository/models/echo/load", {"parameters": {"config": "{}"}}),
    "load with an unknown parameter": post("/v2/repository/models/echo/load", {"parameters": {"colour": 1}}),
    "load of an unknown model": post("/v2/repository/models/none/load"),
    "load from a repository": post("/v2/repository/other/models/echo/load"),
    "load with bad JSON": post("/v2/repository/models/echo/load", b"{"),
    "unload": post("/v2/repository/models/echo/unload"),
    "unload from a repository": post("/v2/repository/other/models/echo/unload"),
    "unload of an unknown model": post("/v2/repository/models/none/unload"),
    "unload with bad JSON": post("/v2/repository/models/echo/unload", b"{"),
    "model without action": post("/v2/repository/models/echo"),
    "unknown action": post("/v2/repository/models/echo/reload"),
    "repository": post("/v2/repository"),
    "still there": get("/v2/models/echo/ready"),
}
