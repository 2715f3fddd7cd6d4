// Calls the server with grpc-js and prints what it got, as one JSON object. Usage: node client.js HOST:PORT PROTO_FOLDER
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, folder] = process.argv.slice(2);
const definition = loader.loadSync("nerite/wire/grpc_service.proto", { includeDirs: [folder], longs: Number });
const service = grpc.loadPackageDefinition(definition).inference.GRPCInferenceService;
const client = new service(address, grpc.credentials.createInsecure(), {
  "grpc.max_receive_message_length": -1,
  "grpc.max_send_message_length": -1,
});

function call(method, request, options = {}) {
  return new Promise((resolve) => {
    const running = client[method](request, new grpc.Metadata(), options, (error, answer) =>
      resolve(error ? { code: error.code, details: error.details } : answer),
    );
    if (options.cancelAfter) setTimeout(() => running.cancel(), options.cancelAfter);
  });
}

function question(model, count, value) {
  const data = Buffer.alloc(4 * count);
  for (let at = 0; at < count; at++) data.writeFloatLE(value === undefined ? at : value, 4 * at);
  return {
    modelName: model,
    inputs: [{ name: "INPUT0", datatype: "FP32", shape: [1, count] }],
    rawInputContents: [data],
  };
}

async function infer(model, count) {
  const asked = question(model, count);
  const answer = await call("ModelInfer", asked);
  return answer.rawOutputContents ? answer.rawOutputContents[0].equals(asked.rawInputContents[0]) : answer;
}

async function main() {
  const sizes = [1, 16, 4096, 150528, 2000000];
  const result = {
    live: await call("ServerLive", {}),
    metadata: (await call("ModelMetadata", { name: "identity" })).name,
    sizes: [],
    together: await Promise.all(Array.from({ length: 64 }, (_, at) => infer("identity", 100 + at))),
    large_together: await Promise.all(Array.from({ length: 8 }, (_, at) => infer("identity", 300000 + at))),
    unknown: await call("ModelInfer", question("nobody", 1)),
    wrong: await call("ModelInfer", { ...question("identity", 1), inputs: [{ name: "X", datatype: "FP32", shape: [1, 1] }] }),
    deadline: await call("ModelInfer", question("sleepy", 1, 2), { deadline: Date.now() + 200 }),
    cancelled: await call("ModelInfer", question("sleepy", 1, 2), { cancelAfter: 200 }),
  };
  for (const size of sizes) result.sizes.push(await infer("identity", size));
  console.log(JSON.stringify(result));
  client.close();
}

main();
