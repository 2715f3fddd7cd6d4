"""The page of metrics where durations are left out and summaries are wanted."""

from conformance.exchange import Eventually, Scene, Scrape, infer, tensor

SCENE = Scene(
    "unmeasured",
    repository="cached",
    models=("counts", "fails"),
    flags=(
        "--cache-config=local,size=30000",
        "--metrics-config=counter_latencies=false",
        "--metrics-config=summary_latencies=true",
        "--metrics-config=summary_quantiles= 5e-1:0.05,0.9x:0.01",
    ),
)

A = tensor("A", "INT32", [2], [1, 2])

EXCHANGES = {
    "asked twice": [infer("counts", A), infer("counts", A)],
    "of the cache": Eventually(
        Scrape("nv_cache_"),
        lambda answer: answer["families"]["nv_cache_num_hits"]["values"]["nv_cache_num_hits"] == 1,
    ),
    "of requests": Scrape("nv_inference_"),
}
