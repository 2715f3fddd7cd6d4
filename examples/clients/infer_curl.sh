#!/bin/sh
# Talks to the example models with curl: one request in JSON, one in binary.
#
#     sh examples/clients/infer_curl.sh [examples/clients/pictures/three.txt]
#
# URL is where the server is, localhost:8000 unless the environment says otherwise.
set -eu

URL=${URL:-localhost:8000}
PICTURE=${1:-$(dirname "$0")/pictures/seven.txt}

# Prints what stands between the brackets of "data":[...] in an answer.
data() { sed 's/.*"data":\[\([^]]*\)\].*/\1/'; }

echo "JSON: the same numbers for the two versions of the model 'scaler'"
for version in 1 2; do
    answer=$(curl --silent --show-error --fail-with-body "$URL/v2/models/scaler/versions/$version/infer" --data '{
        "inputs": [ { "name": "numbers", "datatype": "FP32", "shape": [5], "data": [1, 2, 3, 4, 10] } ]
    }')
    echo "  version $version: $(echo "$answer" | data)"
done

echo "binary: a picture"
tr '.' ' ' < "$PICTURE"

# A binary request is a head in JSON, which says how many bytes of tensors follow, and then these bytes. Here they are the
# drawing itself, with its marks turned into bytes of 0 and 255.
height=$(wc -l < "$PICTURE" | tr -d ' ')
width=$(head -n 1 "$PICTURE" | tr -d '\n' | wc -c | tr -d ' ')
head='{"inputs":[{"name":"image","datatype":"UINT8","shape":[1,'$height','$width'],
    "parameters":{"binary_data_size":'$((height * width))'}}]}'
pixels=$({ printf '%s' "$head"; tr -d '\n' < "$PICTURE" | LC_ALL=C tr '.#' '\000\377'; } |
    curl --silent --show-error --fail-with-body "$URL/v2/models/digits_preprocess/infer" --data-binary @- \
        --header "Inference-Header-Content-Length: ${#head}" --header 'Content-Type: application/octet-stream' | data)

answer=$(curl --silent --show-error --fail-with-body "$URL/v2/models/digits/infer" --data '{
    "inputs": [ { "name": "pixels", "datatype": "FP32", "shape": [1, 64], "data": ['"$pixels"'] } ],
    "outputs": [ { "name": "probabilities", "parameters": { "classification": 1 } } ]
}' | data | tr -d '"')
echo "This is a ${answer##*:} (probability ${answer%%:*})."
