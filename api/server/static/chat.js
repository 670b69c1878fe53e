// The chat: streams answers, stops them, colours their tokens.

import { byId, count, duration, make, short } from "./dom.js";
import { ask, events } from "./server.js";
import { TokenText } from "./tokens.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const IDEAS = ["What is an ostinato?", "Tell me a short story about a cat.", "What is a block table?"];
const ALTERNATIVES = 5;

export class Chat {
  /** `onRefused` is called with an error of status 401 or 403. */
  constructor({ onRefused }) {
    this.onRefused = onRefused;
    this.model = null;
    this.history = [];
    this.running = null; // AbortController of the answer that streams
    this.input = byId("input");
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.input.value);
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send(this.input.value);
      }
    });
    this.input.addEventListener("input", () => this.fit());
    byId("stop").addEventListener("click", () => this.running?.abort());
    byId("clear").addEventListener("click", () => this.clear());
    byId("settings").addEventListener("submit", (event) => event.preventDefault());
    byId("settings-toggle").addEventListener("click", () => {
      const settings = byId("settings");
      settings.hidden = !settings.hidden;
      byId("settings-toggle").setAttribute("aria-expanded", String(!settings.hidden));
    });
    this.clear();
  }

  setModel(model) {
    if (this.model) return;
    this.model = model;
    if (!model.can_generate) {
      this.input.disabled = byId("send").disabled = true;
      this.input.placeholder = "this model gives vectors, not text";
    } else if (!model.can_chat) {
      byId("chat-title").textContent = "Text";
      this.input.placeholder = "A text to go on with";
    }
  }

  fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(180, this.input.scrollHeight + 2)}px`;
  }

  clear() {
    this.running?.abort();
    this.history = [];
    const ideas = IDEAS.map((text) => {
      const button = make("button", "", text, { type: "button" });
      button.addEventListener("click", () => this.send(text));
      return button;
    });
    byId("messages").replaceChildren(
      make("div", "welcome", [
        make("h3", "", "Say something"),
        make("p", "", "Point at an answer’s tokens to see what else it could have said."),
        make("div", "ideas", ideas),
      ]),
    );
  }

  async send(text) {
    if (this.running || !text.trim() || this.input.disabled) return;
    this.input.value = "";
    this.fit();
    const messages = byId("messages");
    messages.querySelector(".welcome")?.remove();
    messages.append(make("div", "user", text));
    this.history.push({ role: "user", content: text });
    const answer = new Answer(messages, byId("colour").checked);
    this.setRunning(new AbortController());
    try {
      await this.stream(answer, text);
      answer.end("");
    } catch (error) {
      if (error.name === "AbortError") answer.end("stopped");
      else answer.fail(error.message);
      if (error.status === 401 || error.status === 403) this.onRefused(error);
    } finally {
      this.setRunning(null);
    }
    this.history.push({ role: "assistant", content: answer.text });
    this.input.focus({ preventScroll: true });
  }

  setRunning(controller) {
    this.running = controller;
    byId("messages").setAttribute("aria-busy", String(controller !== null));
    byId("send").hidden = controller !== null;
    byId("stop").hidden = controller === null;
  }

  async stream(answer, text) {
    const chats = this.model === null || this.model.can_chat;
    const body = { stream: true, stream_options: { include_usage: true }, ...this.sampling() };
    if (chats) {
      const system = byId("system").value.trim();
      body.messages = [...(system ? [{ role: "system", content: system }] : []), ...this.history];
      if (answer.coloured) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
    } else {
      body.prompt = text;
    }
    const response = await ask(chats ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: this.running.signal,
    });
    for await (const event of events(response)) {
      if (event.usage) answer.usage = event.usage;
      const choice = event.choices[0];
      if (!choice) continue;
      if (chats) answer.add(choice.delta.content || "", choice.logprobs?.content || [], choice.delta.reasoning || "");
      else answer.add(choice.text, [], "");
    }
  }

  sampling() {
    const chosen = {};
    for (const name of NUMBERS) {
      const value = byId(name).value.trim();
      if (value !== "") chosen[name] = Number(value);
    }
    return chosen;
  }
}

/** One answer on the page while it grows. */
class Answer {
  constructor(messages, coloured) {
    this.messages = messages;
    this.coloured = coloured;
    this.text = "";
    this.usage = null;
    this.begin = performance.now();
    this.first = 0;
    this.body = make("div", "body");
    this.meta = make("p", "meta");
    this.thought = null;
    this.element = make("div", "assistant", [this.body, this.meta]);
    messages.append(this.element);
    this.tokens = null;
    this.follow(true);
  }

  add(text, tokens, thought) {
    if (!this.first) this.first = performance.now();
    const atEnd = this.isAtEnd();
    if (thought) {
      if (!this.thought) this.element.prepend((this.thought = make("div", "thought")));
      this.thought.append(thought);
    }
    this.text += text;
    if (tokens.length && !this.tokens && !this.body.firstChild) this.tokens = new TokenText(this.body);
    if (this.tokens) this.tokens.add(text, tokens);
    else if (text) this.body.append(text);
    this.follow(atEnd);
  }

  end(word) {
    const atEnd = this.isAtEnd();
    this.tokens?.end();
    const parts = word ? [word] : [];
    if (this.usage) {
      parts.push(count(this.usage.completion_tokens, "token"));
      const seconds = (performance.now() - this.first) / 1000;
      if (this.usage.completion_tokens > 1) parts.push(`${short((this.usage.completion_tokens - 1) / Math.max(0.001, seconds))} a second`);
      const cached = this.usage.prompt_tokens_details?.cached_tokens;
      if (cached) parts.push(`${count(cached, "prompt token")} of ${this.usage.prompt_tokens} cached`);
    }
    if (this.first) {
      const [figure, unit] = duration((this.first - this.begin) / 1000);
      parts.push(`first after ${figure} ${unit}`);
    }
    this.meta.textContent = parts.join(" · ");
    this.follow(atEnd);
  }

  fail(message) {
    this.end("");
    this.element.append(make("p", "problem", message, { role: "alert" }));
    this.follow(true);
  }

  isAtEnd() {
    const box = this.messages;
    return box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  }

  follow(atEnd) {
    if (atEnd) this.messages.scrollTop = this.messages.scrollHeight;
  }
}
