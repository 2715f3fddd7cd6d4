"""The scenes that the exchanges are played in. Each costs the start of two servers."""

from conformance.exchange import Scene
from conformance.repositories import repository

FORWARDED = "x-forward|^triton_|^sequence_|^(priority|timeout|headers|binary_data_output)$"
GOOD = Scene(
    "good",
    # All that have a complete configuration.
    models=tuple(name for name, files in repository("good").items() if "config.pbtxt" in files),
    flags=(
        "--disable-auto-complete-config",
        f"--http-header-forward-pattern={FORWARDED}",
        # What is gRPC's own is forwarded by no pattern.
        f"--grpc-header-forward-pattern={FORWARDED}|^te$|^content-|^grpc-",
    ),
)
SMALL = Scene(
    "small",
    models=("echo", "noconfig", "pair", "trouble", "versions"),
    flags=("--id=exam", "--model-control-mode=none"),
)
RESTRICTED = Scene(
    "restricted",
    models=("echo",),
    flags=(
        "--http-restricted-api=health,inference:x-key=open",
        "--http-restricted-api=model-repository,statistics:x-admin=sesame",
        "--grpc-restricted-protocol=inference,metadata:key=open",
        "--grpc-restricted-protocol=model-repository:admin=sesame",
    ),
)
EXPLICIT = Scene(
    "explicit",
    models=("echo", "pair", "versions", "arguments"),
    flags=("--model-control-mode=explicit", "--load-model=pair", "--disable-auto-complete-config"),
)
POLL = Scene(
    "poll",
    models=("echo", "versions"),
    flags=("--model-control-mode=poll", "--repository-poll-secs=1"),
)
SEVERAL = Scene(
    "several",
    models=("echo", "pair"),
    second=("echo", "versions"),
    flags=("--model-control-mode=explicit", "--disable-auto-complete-config"),
)
NAMESPACES = Scene(
    "namespaces",
    models=("echo", "pair"),
    second=("echo", "versions"),
    flags=("--model-control-mode=explicit", "--model-namespacing=true", "--disable-auto-complete-config"),
)
STREAMS = Scene("streams", repository="streams", flags=("--disable-auto-complete-config",))
STREAMS_COUNTED = Scene("streams-counted", repository="streams", models=("many", "one"), flags=STREAMS.flags)
SHARED = Scene(
    "shared", repository="shared", flags=("--disable-auto-complete-config",), own_flags=("--allow-client-shm=true",)
)
SAGEMAKER = Scene(
    "sagemaker",
    models=("echo", "pair", "trouble"),
    flags=("--model-control-mode=explicit", "--load-model=*", "--disable-auto-complete-config"),
    cloud="sagemaker",
    environment=(("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "echo"),),
)
VERTEX = Scene(
    "vertex",
    models=("echo", "pair", "trouble"),
    flags=(
        "--model-control-mode=explicit",
        "--load-model=*",
        "--disable-auto-complete-config",
        "--vertex-ai-default-model=echo",
    ),
    cloud="vertex-ai",
    environment=(("AIP_HEALTH_ROUTE", "/health"), ("AIP_PREDICT_ROUTE", "/predict")),
)
TRACED = Scene(
    "traced",
    models=("echo", "pair"),
    flags=(
        "--trace-config=triton,file={models}.trace",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=7",
        "--trace-config=count=100",
        "--model-control-mode=explicit",
        "--load-model=echo",
        "--disable-auto-complete-config",
    ),
)
TELEMETRY = Scene(
    "telemetry",
    models=("echo",),
    flags=(
        "--trace-config=mode=opentelemetry",
        "--trace-config=opentelemetry,url=localhost:9/v1/traces",
        "--trace-config=opentelemetry,resource=b=c",
        "--trace-config=opentelemetry,bsp_max_queue_size=11",
        "--trace-config=triton,file={models}.trace",
        "--disable-auto-complete-config",
    ),
)
ENSEMBLES = Scene(
    "ensembles", repository="ensembles", flags=("--exit-on-error=false", "--disable-auto-complete-config")
)
ENSEMBLES_EXPLICIT = Scene(
    "ensembles-explicit",
    repository="ensembles",
    flags=("--model-control-mode=explicit", "--disable-auto-complete-config"),
)
ARGUMENTS = Scene(
    "arguments",
    repository="calls",
    models=("lab", "echo", "late"),
    flags=("--model-control-mode=explicit", "--load-model=lab", "--load-model=echo", "--disable-auto-complete-config"),
)
CALLS = Scene(
    "calls",
    repository="calls",
    flags=(
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in ("lab", "alab", "echo", "counter", "fails", "errs", "info")),
        "--disable-auto-complete-config",
    ),
)
WARM = Scene("warm", repository="warm", flags=("--model-control-mode=explicit", "--disable-auto-complete-config"))
CACHED = Scene(
    "cached",
    repository="cached",
    flags=(
        "--cache-config=local,size=30000",
        "--model-control-mode=explicit",
        *(
            f"--load-model={model}"
            for model in (
                "batched",
                "counts",
                "fails",
                "forgets",
                "outputs",
                "parameters",
                "shapes",
                "wide",
            )
        ),
        "--disable-auto-complete-config",
    ),
)
LIMITED = Scene(
    "limited",
    repository="limited",
    flags=(
        "--rate-limit=execution_count",
        "--rate-limit-resource=room:1",
        "--rate-limit-resource=room:2",
        "--rate-limit-resource=door:1",
        "--rate-limit-resource=yard:1:7",
        "--host-policy=first,cpu-cores=0-0",
        "--host-policy=nocores,cpu-cores=9000-9001",
        "--host-policy=norange,cpu-cores=0",
        "--host-policy=nonode,numa-node=99",
        "--model-control-mode=explicit",
        "--load-model=often",
        "--load-model=seldom",
        "--load-model=several",
        "--load-model=free",
        "--disable-auto-complete-config",
    ),
)
SHARED_CODE = Scene(
    "shared-code", repository="shared_code", flags=("--model-control-mode=explicit",), backends=("teller",)
)
BROKEN = Scene(
    "broken",
    repository="broken",
    flags=("--exit-on-error=false", "--disable-auto-complete-config"),
)
SEQUENCES = Scene("sequences", repository="sequences", flags=("--disable-auto-complete-config",))
SEQUENCES_HELD = Scene(
    "sequences-held",
    repository="sequences",
    flags=SEQUENCES.flags,
    environment=(("TRITONSERVER_DELAY_SCHEDULER", "2"), ("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", "1")),
)
ITERATIVE = Scene(
    "iterative",
    repository="iterative",
    flags=(
        "--model-control-mode=explicit",
        "--disable-auto-complete-config",
        *(f"--load-model={model}" for model in ("begins", "begins_text", "streamed", "turns")),
    ),
)
