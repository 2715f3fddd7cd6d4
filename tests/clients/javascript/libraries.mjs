// Libraries against a server: what came of each use, as one line of JSON. The tests say what it has to be.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embed, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL] = process.argv.slice(2);
const Place = z.object({ at: z.string() });
const prompt = "Look up.";
const messages = [{ role: "user", content: prompt }];
const looks = [];
const look = tool({
  description: "Look at a place.",
  inputSchema: Place,
  execute: async ({ at }) => {
    looks.push(at);
    return `${at} is blue`;
  },
});

// OpenAI's own.

const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0 });
const definition = {
  type: "function",
  function: { name: "look", description: "Look at a place.", parameters: z.toJSONSchema(Place) },
};

async function openaiTools() {
  const asked = { model: "caller", messages, tools: [definition], parallel_tool_calls: false };
  const whole = await client.chat.completions.create(asked);
  const runner = client.chat.completions.stream(asked);
  const streamed = (await runner.finalChatCompletion()).choices[0];
  return [whole.choices[0], streamed].map((choice) => [
    choice.finish_reason,
    choice.message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]),
  ]);
}

async function openaiForms() {
  const chat = await client.chat.completions.parse({
    model: "place",
    messages,
    response_format: zodResponseFormat(Place, "place"),
  });
  const response = await client.responses.parse({
    model: "place",
    input: prompt,
    text: { format: zodTextFormat(Place, "place") },
  });
  return [chat.choices[0].message.parsed, response.output_parsed];
}

async function openaiResponses() {
  const stream = client.responses.stream({ model: "speaker", input: prompt, store: false });
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  const final = await stream.finalResponse();
  return [text, final.output_text, final.status, final.usage.output_tokens];
}

// Vercel's, over chat completions and over Anthropic's API.

const chats = createOpenAICompatible({
  name: "nerite",
  baseURL,
  apiKey: "any",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const messagesApi = createAnthropic({ baseURL, apiKey: "any" });

async function text(model) {
  const whole = await generateText({ model, prompt, maxRetries: 0 });
  const stream = streamText({ model, prompt, maxRetries: 0 });
  let parts = "";
  for await (const part of stream.textStream) parts += part;
  const usage = await stream.usage;
  return [whole.text, whole.finishReason, parts, usage.outputTokens === whole.usage.outputTokens];
}

async function thoughts(model) {
  const stream = streamText({ model, prompt, maxRetries: 0 });
  await stream.consumeStream();
  return [(await stream.reasoningText)?.trim(), (await stream.text).trim()];
}

// The model calls the tool each time, so that the loop ends at its limit.
async function tools(model) {
  looks.length = 0;
  const asked = { model, prompt, tools: { look }, stopWhen: stepCountIs(2), maxRetries: 0 };
  const whole = await generateText(asked);
  const stream = streamText(asked);
  await stream.consumeStream();
  return [whole, { steps: await stream.steps }].map(({ steps }) => [
    steps.length,
    steps[0].finishReason,
    steps[0].toolCalls.map((call) => [call.toolName, call.input]),
    steps[0].toolResults.map((result) => result.output),
  ]);
}

async function form(model) {
  const found = await generateText({ model, prompt, output: Output.object({ schema: Place }), maxRetries: 0 });
  return found.output;
}

async function refusal() {
  try {
    await generateText({ model: chats("nobody"), prompt, maxRetries: 0 });
    return null;
  } catch (error) {
    return [error.statusCode, error.message, error.isRetryable];
  }
}

const vector = await embed({ model: chats.textEmbeddingModel("vectors"), value: "sky" });
console.log(
  JSON.stringify({
    openai: { tools: await openaiTools(), forms: await openaiForms(), responses: await openaiResponses() },
    chats: {
      text: await text(chats("speaker")),
      thoughts: await thoughts(chats("thinker")),
      tools: await tools(chats("caller")),
      form: await form(chats("place")),
      vector: vector.embedding,
      refusal: await refusal(),
    },
    messages: {
      text: await text(messagesApi("speaker")),
      tools: await tools(messagesApi("claude-any")),
    },
  }),
);
