// The AI SDK: `responses` (the default of @ai-sdk/openai), `chat`, `anthropic`, `compatible`.
// The same contract as loop.py. Run with the packages' folder in NODE_PACKAGES.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const env = process.env;
const require = createRequire(`${env.NODE_PACKAGES}/x.js`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, streamText, stepCountIs, tool } = await load("ai");
const { z } = await load("zod");
const variant = process.argv[2];
const baseURL = `${env.NODE_URL}/v1`;
const apiKey = env.NODE_KEY;

async function model() {
  if (variant === "anthropic") {
    const { createAnthropic } = await load("@ai-sdk/anthropic");
    return createAnthropic({ baseURL, apiKey })(env.NODE_MODEL);
  }
  if (variant === "compatible") {
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    return createOpenAICompatible({ name: "node", baseURL, apiKey, includeUsage: true })(env.NODE_MODEL);
  }
  const { createOpenAI } = await load("@ai-sdk/openai");
  const openai = createOpenAI({ baseURL, apiKey });
  return variant === "chat" ? openai.chat(env.NODE_MODEL) : openai(env.NODE_MODEL);
}

let calls = [];
const made = (name, argument, description) =>
  tool({
    description,
    inputSchema: z.object({ [argument]: z.string() }),
    execute: async (input) => {
      calls.push([name, input]);
      return env.NODE_RESULT;
    },
  });
const tools = {
  read_file: made("read_file", "path", "Reads a file."),
  search: made("search", "text", "Searches the project."),
  patch: made("patch", "input", "Changes files."),
};

const told = [];
for (const [index, prompt] of JSON.parse(env.NODE_PROMPTS).entries()) {
  calls = [];
  const request = {
    model: await model(),
    [env.NODE_SYSTEM_FIELD ?? "system"]: env.NODE_SYSTEM,
    prompt,
    tools,
    maxRetries: 0,
    stopWhen: stepCountIs(5),
    // What the provider thinks of the model is not to bound its thinking.
    providerOptions: variant === "anthropic" ? { anthropic: { thinking: { type: "adaptive" } } } : {},
  };
  let result;
  if (index === 0) {
    result = await generateText(request);
  } else {
    result = streamText({ ...request, onError: ({ error }) => { throw error; } });
    for await (const part of result.fullStream) if (part.type === "error") throw part.error;
  }
  const steps = await result.steps;
  const reasoning = steps.map((step) => step.reasoningText ?? "");
  told.push({ answer: (await result.text).trim(), calls, reasoning });
}
console.log(JSON.stringify(told));
