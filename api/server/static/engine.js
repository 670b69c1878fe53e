// The live view of the engine: asks /debug/state while the page is visible, and draws the answer.

import { showBlocks } from "./blocks.js";
import { showSteps, Tile } from "./charts.js";
import { byId, count, duration, make, number, percent, short } from "./dom.js";
import { ask } from "./server.js";

const EVERY_MS = 700;
const AFTER_FAILURE_MS = 2500;
const SHOWN_ROWS = 6;
const SHOWN_STEPS = 120;

export class EngineView {
  /** `onRefused` is called with an error of status 401 or 403, `onModel` with the model. */
  constructor({ onRefused, onModel }) {
    this.onRefused = onRefused;
    this.onModel = onModel;
    this.rate = new Tile("tile-rate");
    this.ttft = new Tile("tile-ttft");
    this.itl = new Tile("tile-itl");
    this.use = new Tile("tile-use");
    this.last = null;
    this.state = null;
    this.number = 0; // number of the engine that is drawn
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.start());
    window.addEventListener("resize", () => this.draw());
  }

  start() {
    clearTimeout(this.timer);
    if (!document.hidden) this.look();
  }

  async look() {
    clearTimeout(this.timer);
    let pause = EVERY_MS;
    try {
      const state = await (await ask(`/debug/state?engine=${this.number}`)).json();
      this.show(state);
    } catch (error) {
      pause = AFTER_FAILURE_MS;
      this.last = null;
      if (error.status === 401 || error.status === 403) {
        this.status("locked", "needs an API key");
        this.onRefused(error);
        return; // continues when the user has entered a key
      }
      this.status("bad", error.status ? error.message : "the server does not answer");
    }
    if (!document.hidden) this.timer = setTimeout(() => this.look(), pause);
  }

  status(kind, text) {
    byId("dot").className = `dot ${kind}`;
    byId("status").textContent = text;
    byId("dot").title = text;
  }

  show(state) {
    if (state.model) {
      byId("model").textContent = `${state.model.name} · ${number(state.model.max_model_len)} tokens`;
      this.onModel(state.model);
    }
    this.status(state.problem ? "bad" : "good", state.problem || "ready");
    this.state = state;
    this.engines(state.engines);
    showRanks(state.ranks);
    this.tiles(state, this.last);
    this.last = state;
    if (state.engine) this.draw();
  }

  draw() {
    const engine = this.state?.engine;
    if (!engine || !byId("engine").clientWidth) return;
    this.steps(engine);
    this.rows(engine);
    this.queue(engine);
    this.blocks(engine);
  }

  /** The list of engines, if there are several. The rest of the page shows the engine that is chosen in it. */
  engines(engines) {
    byId("engines-card").hidden = !engines.length;
    if (!engines.length) return;
    const serving = engines.filter((one) => one.status.state === "serving").length;
    byId("engines-note").textContent = `${number(serving)} of ${number(engines.length)} take requests`;
    byId("engines").replaceChildren(...engines.map((one) => make("li", "", this.engineButton(one))));
  }

  engineButton(one) {
    const { engine, node, state, num_unfinished, num_restarts, reason } = one.status;
    const memory = one.resident_bytes === null ? "" : `, ${short(one.resident_bytes / 2 ** 30)} GiB`;
    const restarts = num_restarts ? `, ${count(num_restarts, "restart")}` : "";
    const place = node ? `on ${node}, ` : "";
    const facts = `${place}${number(one.num_running)} run, ${number(num_unfinished)} in all, ${percent(one.kv_cache_usage)} of blocks${memory}${restarts}`;
    const button = make(
      "button",
      "",
      [make("span", "", `engine ${engine}`), make("span", "", state), make("span", "facts", facts)],
      { type: "button", "aria-pressed": String(engine === this.number), title: reason || state },
    );
    button.addEventListener("click", () => {
      this.number = engine;
      this.last = null;
      this.look();
    });
    return button;
  }

  tiles(state, last) {
    const seconds = last ? state.time - last.time : 0;
    const stats = state.stats;
    let rate = null;
    if (seconds > 0 && last.engine_pid === state.engine_pid) {
      rate = Math.max(0, (stats.num_output_tokens - last.stats.num_output_tokens) / seconds);
    }
    const drafts = stats.speculation;
    let text = `${number(stats.num_output_tokens)} so far`;
    if (drafts?.num_draft_tokens) {
      text += `, ${Math.round((100 * drafts.num_accepted_tokens) / drafts.num_draft_tokens)} % of drafts accepted`;
    }
    this.rate.show([rate === null ? "–" : short(rate), ""], text, rate);
    for (const [tile, found] of [[this.ttft, state.live.ttft], [this.itl, state.live.itl]]) {
      if (found) {
        const [slow, unit] = duration(found.p90);
        tile.show(duration(found.p50), `90 % within ${slow} ${unit}`, found.p50, found.p90);
      } else tile.show(["–", ""], "none in 10 s", null, null);
    }
    this.processor(state, last, seconds);
  }

  processor(state, last, seconds) {
    const use = state.use;
    const gpu = use.gpus[0];
    if (gpu) {
      this.use.title.textContent = gpu.name;
      const memory = `${short(gpu.memory_used_bytes / 2 ** 30)} of ${short(gpu.memory_total_bytes / 2 ** 30)} GiB`;
      this.use.show([Math.round(gpu.utilization * 100), "%"], memory, gpu.utilization);
      return;
    }
    const memory = `${short((sumOfEngines(use, "resident_bytes") || 0) / 2 ** 30)} GiB in memory`;
    const now = sumOfEngines(use, "cpu_seconds");
    const before = last ? sumOfEngines(last.use, "cpu_seconds") : undefined;
    if (!(seconds > 0) || now === undefined || before === undefined || now < before) {
      this.use.show(["–", ""], memory, null);
      return;
    }
    const share = (now - before) / seconds / use.num_cpus;
    this.use.show([Math.round(share * 100), `% of ${count(use.num_cpus, "core")}`], memory, share);
  }

  steps(engine) {
    const steps = engine.steps.slice(-SHOWN_STEPS);
    showSteps(byId("steps"), steps, SHOWN_STEPS);
    const step = steps.at(-1);
    let text = "none yet";
    if (step) {
      const [figure, unit] = duration(step.seconds);
      const padding = step.num_padded_tokens - step.num_tokens;
      const bucket = step.kind === "captured" ? ` in bucket ${number(step.num_padded_tokens)}` : "";
      text = `last: ${step.kind}, ${count(step.num_tokens, "token")}${bucket}, ${figure} ${unit}`;
      if (padding > 0) text += `, ${number(padding)} padding`;
    }
    byId("step-now").textContent = text;
    byId("steps").setAttribute("aria-label", `The last ${steps.length} steps; ${text}`);
    byId("buckets").textContent = engine.bucket_tokens.length
      ? `${count(engine.bucket_tokens.length, "bucket")} of ${number(engine.bucket_tokens[0])} to ${number(engine.bucket_tokens.at(-1))} tokens`
      : "no captured buckets";
  }

  rows(engine) {
    const rows = engine.rows;
    const limit = engine.max_num_seqs;
    const shown = rows.slice(0, SHOWN_ROWS);
    byId("rows").replaceChildren(
      ...(shown.length ? shown.map(rowItem) : [make("li", "empty", "No request runs.")]),
    );
    const some = engine.num_rows > shown.length ? `, ${number(shown.length)} shown` : "";
    byId("batch-note").textContent = `${number(engine.num_rows)} of ${number(limit)} rows${some}`;
  }

  queue(engine) {
    const stats = this.state.stats;
    byId("queue-note").textContent = stats.num_waiting ? `${number(stats.num_waiting)} wait` : "";
    const items = engine.waiting.slice(0, SHOWN_ROWS).map((one) => {
      const [age, unit] = duration(one.age_s);
      return make("li", "", [
        make("span", "name", shortId(one.request_id), { title: one.request_id }),
        make("span", "age", `${count(one.num_prompt_tokens, "token")}, ${age} ${unit}`),
      ]);
    });
    byId("queue").replaceChildren(...(items.length ? items : [make("li", "empty", "The queue is empty.")]));
  }

  blocks(engine) {
    const blocks = engine.blocks;
    const [free, cached, held, shared] = blocks.counts;
    showBlocks(byId("blocks"), blocks);
    const cell = blocks.blocks_per_cell > 1 ? `, ${blocks.blocks_per_cell} a cell` : "";
    byId("blocks-note").textContent =
      `${percent((held + shared) / Math.max(1, blocks.num_blocks))} of ${number(blocks.num_blocks)} in use, ${blocks.block_size} tokens each${cell}`;
    byId("count-held").textContent = `${number(held)} held`;
    byId("count-shared").textContent = `${number(shared)} shared, by prefix`;
    byId("count-cached").textContent = `${number(cached)} cached`;
    byId("count-free").textContent = `${number(free)} free`;
    byId("tiers").textContent = Object.entries(this.state.stats.tiers)
      .map(([name, tier]) =>
        tier.num_places
          ? `${name}: ${number(tier.num_used_places)} of ${count(tier.num_places, "block")}`
          : `${name}: not open yet`)
      .join(", ");
  }
}

/** The list of ranks, where the shown engine has several. */
function showRanks(ranks) {
  byId("ranks-card").hidden = !ranks.length;
  byId("ranks-note").textContent = `${number(ranks.length)} processes, each with a part of the model`;
  const gib = (bytes) => `${short(bytes / 2 ** 30)} GiB`;
  const items = ranks.map(({ plan, resident_bytes }) => {
    const memory = resident_bytes === null ? "does not run" : `${gib(resident_bytes)} of memory`;
    const layers = `layers ${plan.first_layer} to ${plan.first_layer + plan.num_layers - 1}`;
    const facts = `${layers}: ${gib(plan.weights_bytes)} of weights, ${gib(plan.memory_bytes)} planned, ${count(plan.threads, "thread")}`;
    return make("li", "rank", [
      make("span", "", `rank ${plan.rank}`),
      make("span", "", memory),
      make("span", "facts", facts, { title: `process ${plan.pid}` }),
    ]);
  });
  byId("ranks").replaceChildren(...items);
}

/** A figure of the engine processes, summed; undefined when none runs. */
function sumOfEngines(use, figure) {
  const engines = Object.entries(use.processes).filter(([name]) => name.startsWith("engine"));
  return engines.length ? engines.reduce((sum, [, process]) => sum + process[figure], 0) : undefined;
}

function rowItem(row) {
  const whole = Math.max(1, row.max_num_tokens);
  const prompt = Math.min(row.num_computed_tokens, row.num_prompt_tokens);
  const parts = [["prompt", prompt], ["output", row.num_output_tokens]].map(([name, tokens]) => {
    const bar = make("i", name);
    bar.style.width = `${((tokens / whole) * 100).toFixed(1)}%`;
    return bar;
  });
  const text = `${number(row.num_prompt_tokens)} + ${number(row.num_output_tokens)}`;
  return make("li", "", [
    make("i", `swatch group-${row.group}`, [], {
      title: row.group ? `${row.num_shared_blocks} of ${row.num_blocks} blocks are shared` : "shares no blocks",
    }),
    make("span", "name", shortId(row.request_id), { title: row.request_id }),
    make("span", "track", parts),
    make("span", "counts", text, { title: "prompt and output tokens" }),
  ]);
}

/** The part of an engine's id that tells requests apart. */
function shortId(id) {
  return id.replace(/^(chatcmpl|cmpl|resp|msg)-/, "").replace(/#.*$/, "").slice(0, 14);
}
