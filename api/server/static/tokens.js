// Shows tokens in the colour of their probability, and the alternatives at each position.

import { byId, make } from "./dom.js";

const LEVELS = [0.85, 0.5, 0.2, 0.05]; // a probability below a level gets the next colour

/** Builds the token spans of one answer while it streams. `body` holds nothing else. */
export class TokenText {
  constructor(body) {
    this.body = body;
    this.text = ""; // the text to show
    this.length = 0; // number of characters of `text` that are in spans
    this.waiting = []; // tokens whose text has not arrived
    this.decoder = new TextDecoder();
    body.tabIndex = 0;
    body.setAttribute("aria-label", "Answer; arrow keys go from token to token");
    body.addEventListener("pointerover", (event) => this.choose(event.target));
    body.addEventListener("pointerleave", () => this.choose(null));
    body.addEventListener("keydown", (event) => this.onKey(event));
    body.addEventListener("blur", () => this.choose(null));
  }

  add(text, tokens) {
    this.text += text;
    for (const token of tokens) {
      this.waiting.push({ ...token, text: this.decoder.decode(new Uint8Array(token.bytes), { stream: true }) });
    }
    // Text arrives after its tokens while it can become a stop string. An end token has no text.
    while (this.waiting.length && this.text.startsWith(this.waiting[0].text, this.length)) {
      const token = this.waiting.shift();
      this.length += token.text.length;
      if (token.text) this.body.append(tokenSpan(token));
    }
  }

  end() {
    if (this.length < this.text.length) this.body.append(this.text.slice(this.length));
  }

  choose(target) {
    const token = target?.classList?.contains("token") ? target : null;
    this.body.querySelector(".chosen")?.classList.remove("chosen");
    token?.classList.add("chosen");
    showAlternatives(token);
  }

  onKey(event) {
    const chosen = this.body.querySelector(".chosen");
    if (event.key === "ArrowRight") this.choose(chosen ? chosen.nextElementSibling || chosen : this.body.firstElementChild);
    else if (event.key === "ArrowLeft") this.choose(chosen?.previousElementSibling || this.body.firstElementChild);
    else if (event.key === "Escape") this.choose(null);
    else return;
    event.preventDefault();
  }
}

function tokenSpan(token) {
  const probability = Math.exp(token.logprob);
  const level = LEVELS.filter((one) => probability < one).length;
  const span = make("span", level ? `token p${level}` : "token", token.text);
  span.token = token;
  return span;
}

const visible = (text) => (text === "" ? "∅" : text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥"));
const share = (logprob) => {
  const value = Math.exp(logprob) * 100;
  return value >= 99.95 ? "100 %" : `${value.toFixed(value < 10 ? 1 : 0)} %`;
};

/** The popover beside a token's element; null hides it. */
function showAlternatives(element) {
  const box = byId("alternatives");
  if (!element) {
    box.hidden = true;
    return;
  }
  const token = element.token;
  const rows = token.top_logprobs.map((one) => ({ ...one, chosen: one.token === token.token }));
  if (!rows.some((one) => one.chosen)) rows.push({ token: token.token, logprob: token.logprob, chosen: true });
  box.replaceChildren(
    make("h4", "", `${visible(token.text)}  ${share(token.logprob)}`),
    ...rows.map((one) => {
      const bar = make("i");
      bar.style.width = `${Math.exp(one.logprob) * 100}%`;
      return make("div", one.chosen ? "chosen" : "", [
        bar, make("span", "", visible(one.token)), make("span", "", share(one.logprob)),
      ]);
    }),
  );
  box.hidden = false;
  const place = element.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = box;
  const left = Math.max(8, Math.min(window.innerWidth - width - 8, place.left));
  const below = place.bottom + 6;
  box.style.left = `${left}px`;
  box.style.top = `${below + height > window.innerHeight - 8 ? Math.max(8, place.top - height - 6) : below}px`;
}
