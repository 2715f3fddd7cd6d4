// OpenAI's client for Node against a server: what came of each use, as one line of JSON.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "once" }];
const few = { model, temperature: 0, max_tokens: 8, ignore_eos: true };

async function refusal(call) {
  try {
    await call();
    return null;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
}

async function streamed() {
  let text = "";
  let usage = null;
  let reason = null;
  const options = { stream: true, stream_options: { include_usage: true } };
  for await (const chunk of await client.chat.completions.create({ ...few, ...options, messages })) {
    text += chunk.choices[0]?.delta.content ?? "";
    reason = chunk.choices[0]?.finish_reason ?? reason;
    usage = chunk.usage ?? usage;
  }
  return { text, usage, reason };
}

async function left() {
  const endless = await client.completions.create({ ...few, prompt: "once", max_tokens: 50000, stream: true });
  let events = 0;
  for await (const _ of endless) {
    events += 1;
    if (events === 3) endless.controller.abort();
  }
  return events;
}

const ids = [];
for await (const each of client.models.list()) ids.push(each.id);
const whole = await client.chat.completions.create({ ...few, messages });
const several = await client.completions.create({ ...few, prompt: ["once", "twice"], n: 2, logprobs: 0 });
console.log(
  JSON.stringify({
    ids,
    whole: { ...whole.choices[0].message, reason: whole.choices[0].finish_reason, usage: whole.usage },
    several: several.choices.map((choice) => [choice.index, choice.logprobs.tokens.length]),
    streamed: await streamed(),
    left: await left(),
    unknown: await refusal(() => client.completions.create({ ...few, model: "nobody", prompt: "once" })),
    wrong: await refusal(() => client.chat.completions.create({ ...few, messages, temperature: "hot" })),
    long: await refusal(() => client.completions.create({ ...few, prompt: "o".repeat(2000) })),
  }),
);
