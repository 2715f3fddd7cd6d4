"""Which paths and methods there are, and what comes back for the others."""

from conformance.exchange import Http, Raw, Session, get, infer, post, tensor
from conformance.exchanges.scenes import GOOD

SCENE = GOOD

ECHO = infer("echo", tensor("IN", "INT32", [1, 2], [1, 2]))
BODY = ECHO.body
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)

EXCHANGES = {
    "live": get("/v2/health/live"),
    "ready": get("/v2/health/ready"),
    "HEAD": Http("HEAD", "/v2/health/live"),
    "PUT on health": Http("PUT", "/v2/health/live"),
    "POST on health": post("/v2/health/ready"),
    "OPTIONS on health": Http("OPTIONS", "/v2/health/live"),
    "POST on server metadata": post("/v2"),
    "DELETE on server metadata": Http("DELETE", "/v2"),
    "POST on model metadata": post("/v2/models/echo"),
    "POST on model ready": post("/v2/models/echo/ready"),
    "POST on config": post("/v2/models/echo/config"),
    "POST on statistics": post("/v2/models/echo/stats"),
    "POST on all statistics": post("/v2/models/stats"),
    "GET on infer": get("/v2/models/echo/infer"),
    "PUT on infer": Http("PUT", "/v2/models/echo/infer", BODY),
    "GET on generate": get("/v2/models/echo/generate"),
    "GET on index": get("/v2/repository/index"),
    "GET on load": get("/v2/repository/models/echo/load"),
    "GET on unload": get("/v2/repository/models/echo/unload"),
    "PUT on logging": Http("PUT", "/v2/logging"),
    "method of no meaning": Http("FROB", "/v2/health/live"),
    "method of no meaning, with a body": Http("FROB", "/v2/models/echo/infer", BODY),
    "method of no meaning, on index": Http("FROB", "/v2/repository/index"),
    "method of no meaning, and no such path": Http("FROB", "/v2/nothing"),
    "method in small letters": Http("get", "/v2/health/live"),
    "method of WebDAV": Http("PROPFIND", "/v2/health/live"),
    "the connection goes on after a method of no meaning": Session(
        (Http("FROB", "/v2/health/live"), get("/v2/health/live"))
    ),
    "root": get("/"),
    "no such path": get("/v2/nothing"),
    "version 1 of the protocol": get("/v1/models/echo"),
    "version 2 in capitals": get("/V2/health/live"),
    "trailing slash on server metadata": get("/v2/"),
    "trailing slash on live": get("/v2/health/live/"),
    "trailing slash on model": get("/v2/models/echo/"),
    "trailing slash on infer": Http("POST", "/v2/models/echo/infer/", BODY),
    "two slashes": get("/v2//models/echo"),
    "models": get("/v2/models"),
    "model without name": get("/v2/models/"),
    "versions without number": get("/v2/models/echo/versions"),
    "version without action": get("/v2/models/versions/versions/3"),
    "unknown action": get("/v2/models/echo/weights"),
    "unknown action of a version": get("/v2/models/echo/versions/1/weights"),
    "too many parts": get("/v2/models/echo/versions/1/config/more"),
    "query string": get("/v2/models/echo?verbose=1"),
    "query string on live": get("/v2/health/live?x"),
    "query string on infer": Http("POST", "/v2/models/echo/infer?x=1", BODY),
    "fragment": get("/v2/models/echo#part"),
    "percent-encoded name": get("/v2/models/%65cho"),
    "percent-encoded slash": get("/v2/models%2Fecho"),
    "percent-encoded name on infer": Http("POST", "/v2/models/%65cho/infer", BODY),
    "a dot for a name": get("/v2/models/./ready"),
    "a dot for a name: metadata": get("/v2/models/."),
    "a dot for a name: infer": Http("POST", "/v2/models/./infer", BODY),
    "two dots for a name": get("/v2/models/../ready"),
    "two dots and no action": get("/v2/models/../x"),
    "two dots to another path": get("/v2/models/../health/live"),
    "a blank for a name": Http("POST", "/v2/models/%20/infer", BODY),
    "a blank for a name: ready": get("/v2/models/%20/ready"),
    "health without version": get("/health"),
    "live at the root": get("/v2/live"),
    "model in the singular": get("/v2/model/echo"),
    "the path in capitals": get("/V2/models/echo"),
    "name with a space": get("/v2/models/my%20model"),
    "absolute form": get("http://exam/v2/health/live"),
    "metrics on the HTTP port": get("/metrics"),
    "HTTP/1.0": Http("GET", "/v2/models/echo", version="HTTP/1.0"),
    "HTTP/1.0 that keeps the connection": Http(
        "GET", "/v2/health/live", headers=(("Connection", "keep-alive"),), version="HTTP/1.0"
    ),
    "connection closed on request": get("/v2/health/live", connection="close"),
    "GET with a body": Http("GET", "/v2/health/live", b"x" * 10),
    "requests on one connection": Session(
        (get("/v2/health/live"), get("/v2/nothing"), ECHO, Http("PUT", "/v2"), get("/v2/models/none"), ECHO)
    ),
    "bad request, and then a good one": Session((Http("POST", "/v2/models/echo/infer", b"{"), ECHO)),
    "two requests at once": Raw(get("/v2/health/live").encode() + get("/v2/models/none").encode(), 2),
    "three requests at once, one of them refused": Raw(
        get("/v2/nothing").encode() + ECHO.encode() + get("/v2/health/ready").encode(), 3
    ),
    "lower-case header names": Raw(
        b"POST /v2/models/echo/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
    ),
    "no Host": Raw(b"GET /v2/health/live HTTP/1.1\r\n\r\n"),
    "chunked body": Raw(
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:10], BODY[10:11], BODY[11:]))
        + b"0\r\n\r\n"
    ),
    "Content-Length and Transfer-Encoding": Raw(
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % (len(CHUNKED)) + CHUNKED
    ),
    "a transfer coding beside chunked": Raw(
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKED
    ),
    "chunked body with a trailer": Raw(
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        + b"%x;name=value\r\n%s\r\n" % (len(BODY), BODY)
        + b"0\r\nX-Trailer: 1\r\n\r\n"
    ),
    "100-continue": Raw(
        b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
    ),
    "no HTTP at all": Raw(b"garbage\r\n\r\n"),
    "header without a colon": Raw(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nnonsense\r\n\r\n"),
    "metrics": Http("GET", "/nothing", port="metrics"),
    "method of no meaning on metrics": Http("FROB", "/metrics", port="metrics"),
    "trailing slash and more on metrics": Http("GET", "/metrics/x", port="metrics"),
    "POST on metrics": Http("POST", "/metrics", b"", port="metrics"),
}
