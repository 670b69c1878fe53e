// Traffic of one JavaScript client library, checked; the soak test starts it with node.
//
//     node calls.mjs openai http://127.0.0.1:8000 60
//
// Ends with one line of JSON: each call with its request id, when it was sent and its seconds; the
// wrong answers; and the library's version.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import path from "node:path";
import { readFileSync } from "node:fs";

const REST_MS = 2000; // between two calls
const MODEL = "demo";
const QUESTION = "What is a list?";
const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};

// The packages are below the working directory, not beside this file.
const require = createRequire(path.join(process.cwd(), "package.json"));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const version = (name) =>
  JSON.parse(readFileSync(path.join(process.cwd(), "node_modules", name, "package.json"))).version;

async function openai(url) {
  const { default: OpenAI } = await load("openai");
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", timeout: 120000 });
  const messages = [{ role: "user", content: QUESTION }];
  return {
    version: version("openai"),
    calls: {
      async whole(headers) {
        const answer = await client.chat.completions.create(
          { model: MODEL, messages, max_tokens: 16 }, { headers },
        );
        assert.ok(["stop", "length"].includes(answer.choices[0].finish_reason));
      },
      async stream(headers) {
        const stream = await client.chat.completions.create(
          { model: MODEL, messages, max_tokens: 16, stream: true }, { headers },
        );
        let end = null;
        for await (const chunk of stream) end = chunk.choices[0]?.finish_reason ?? end;
        assert.ok(["stop", "length"].includes(end));
      },
      async tool(headers) {
        const tool = { type: "function", function: { name: "get_weather", parameters: PARAMETERS } };
        const answer = await client.chat.completions.create(
          { model: MODEL, messages, tools: [tool], tool_choice: "required", max_tokens: 64 }, { headers },
        );
        if (answer.choices[0].finish_reason !== "length") {
          JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments);
        }
      },
      async response(headers) {
        const answer = await client.responses.create(
          { model: MODEL, input: QUESTION, max_output_tokens: 16 }, { headers },
        );
        assert.ok(["completed", "incomplete"].includes(answer.status));
      },
      async events(headers) {
        const stream = await client.responses.create(
          { model: MODEL, input: QUESTION, max_output_tokens: 16, stream: true }, { headers },
        );
        let last = "";
        for await (const event of stream) last = event.type;
        assert.ok(["response.completed", "response.incomplete"].includes(last));
      },
    },
  };
}

async function aiSdk(url) {
  const { generateText, streamText, tool, jsonSchema } = await load("ai");
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const model = createOpenAICompatible({ name: "server", baseURL: `${url}/v1` })(MODEL);
  const tools = { get_weather: tool({ description: "weather", inputSchema: jsonSchema(PARAMETERS) }) };
  return {
    version: version("ai"),
    calls: {
      async whole(headers) {
        const answer = await generateText({ model, prompt: QUESTION, maxOutputTokens: 16, headers });
        assert.ok(["stop", "length"].includes(answer.finishReason));
      },
      async stream(headers) {
        const answer = streamText({ model, prompt: QUESTION, maxOutputTokens: 16, headers });
        for await (const part of answer.textStream) assert.equal(typeof part, "string");
        assert.ok(["stop", "length"].includes(await answer.finishReason));
      },
      async tool(headers) {
        const answer = await generateText({
          model, prompt: QUESTION, tools, toolChoice: "required", maxOutputTokens: 64, headers,
        });
        if (answer.finishReason !== "length") assert.equal(answer.toolCalls[0].toolName, "get_weather");
      },
    },
  };
}

const [name, url, seconds] = process.argv.slice(2);
const { version: found, calls } = await { openai, "ai-sdk": aiSdk }[name](url);
const names = Object.keys(calls);
const wrong = [];
const made = [];
const until = performance.now() + 1000 * Number(seconds);
while (performance.now() < until) {
  const call = names[made.length % names.length];
  const requestId = `node-${name}-${made.length}`;
  const [sent, begin] = [Date.now() / 1000, performance.now()];
  try {
    await calls[call]({ "X-Request-Id": requestId });
  } catch (error) {
    wrong.push(`${name}: ${call}: ${error}`.slice(0, 1000));
  }
  made.push([requestId, call, sent, (performance.now() - begin) / 1000]);
  await new Promise((resolve) => setTimeout(resolve, REST_MS));
}
console.log(
  JSON.stringify({ calls: made.length, made, wrong: wrong.slice(0, 20), version: found }),
);
process.exit(0);
