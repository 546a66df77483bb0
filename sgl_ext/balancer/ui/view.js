// Shows a state document: figures, charts and tables. It changes elements in place.

import { Chart } from "./chart.js";
import { linkTo } from "./requests.js";
import { SessionSearch } from "./sessions.js";
import { Table, element, setText } from "./table.js";
import { ago, clock, compact, count, percent, rate, seconds, shortName, span, UNKNOWN } from "./format.js";

const byId = (id) => document.getElementById(id);

const HASH_DIGITS = 8; // digits of a hash that tell it from others

/** A bar of parts, each a class and a share of the whole. */
function bar(cell, label, parts) {
  let made = cell.querySelector(".bar");
  if (!made) {
    made = element("div", { class: "bar", role: "img" }, ...parts.map(([look]) => element("span", { class: look })));
    cell.prepend(made);
  }
  if (made.getAttribute("aria-label") === label) return;
  made.setAttribute("aria-label", label);
  parts.forEach(([, share], at) => { made.children[at].style.inlineSize = `${(100 * share).toFixed(1)}%`; });
}

/** Text beside what else is in a cell. */
function aside(cell, text, look = "beside") {
  let made = cell.querySelector(`.${look}`);
  if (!made) {
    made = element("span", { class: look });
    cell.append(made);
  }
  setText(made, text);
}

function shareCell(cell, share) {
  if (share === null) {
    setText(cell, UNKNOWN);
    return;
  }
  if (!cell.querySelector(".bar")) cell.replaceChildren();
  aside(cell, percent(share));
  bar(cell, `${percent(share)} cached`, [["cached", share]]);
}

function stateCell(cell, engine, nowS) {
  let pill = cell.querySelector(".pill");
  if (!pill) {
    pill = element("span", { class: "pill" });
    cell.append(pill);
  }
  pill.dataset.state = engine.state;
  setText(pill, engine.state);
  const starting = engine.state === "starting";
  const { last_exit: last, crashes } = engine;
  const ended = last && `ended ${ago(nowS - last.time_s)}: ${last.cause}${crashes > 1 ? `; ${count(crashes)} times in all` : ""}`;
  const about = (starting ? engine.stage : engine.fault ?? engine.note) ?? "";
  aside(cell, [about, ended].filter(Boolean).join("; "), "note");
  let progress = cell.querySelector("progress");
  const known = starting && engine.progress !== null;
  if (known && !progress) {
    progress = element("progress", { max: 1, "aria-label": `${engine.id}: loaded` });
    cell.append(progress);
  }
  if (known) progress.value = engine.progress;
  else progress?.remove();
}

/** In a narrow window, also how many wait. */
function runningCell(cell, { running, waiting }) {
  if (!cell.firstChild) cell.append(element("span"), element("span", { class: "note narrow" }));
  setText(cell.children[0], count(running));
  setText(cell.children[1], waiting ? `+ ${count(waiting)} wait` : "");
}

function memoryCell(cell, { kv }) {
  if (!kv) {
    setText(cell, UNKNOWN);
    return;
  }
  if (!cell.querySelector(".bar")) cell.replaceChildren();
  const { total_tokens: total, free_tokens: free } = kv;
  const pinned = Math.min(kv.pinned_tokens, total);
  // Requests may run on what is pinned.
  const used = Math.max(kv.used_tokens - pinned, 0);
  aside(cell, `${compact(total - free)} of ${compact(total)}`);
  const label = `${compact(pinned)} tokens pinned, ${compact(used)} in use, ${compact(free)} free, of ${compact(total)}`;
  bar(cell, label, [["pinned", pinned / total], ["used", used / total]]);
  cell.title = label;
}

/** A name, of any length: two lines of it, and the rest where the pointer rests. */
const name = (of, shorten = (text) => text) => (cell, item) => {
  const text = of(item) || UNKNOWN;
  if (!cell.firstChild) cell.append(element("span", { class: "clip" }));
  setText(cell.firstChild, shorten(text));
  if (cell.title !== text) cell.title = text;
};

/** What engines' names have in common is left out. */
let home = "";
const agentName = ({ harness, agent, class: requestClass }) => [harness, agent ?? requestClass].filter(Boolean).join(" ");
const engineName = (id) => id.replace(/^https?:\/\//, "").replace(home, "");

/** The node's part of its engines' names, "" if they are on several. */
function homeOf(engines) {
  const homes = new Set(engines.map(({ id }) => id.match(/@[^@]+$/)?.[0] ?? ""));
  return homes.size === 1 ? [...homes][0] : "";
}

const perSecond = (figure, unit) => (figure === UNKNOWN ? figure : `${figure} ${unit}`);

/** An id of which the first digits are enough. */
function shortId(cell, id) {
  if (cell.title === id) return;
  cell.title = id;
  // A sub-agent's id stands behind that of its session.
  const short = shortName(id);
  cell.replaceChildren(element("code", {}, short));
}

/** A session's id, which leads to its requests. */
function sessionCell(cell, id) {
  shortId(cell, id);
  const code = cell.firstChild;
  if (code?.tagName !== "CODE" || !id) return;
  const link = element("a", { href: linkTo(id), "aria-label": `Requests of the session ${id}` });
  code.replaceWith(link);
  link.append(code);
}

const charts = [
  new Chart({
    title: "Hit rate", unit: "of prompt tokens", format: percent, most: 1,
    series: [{ name: "Hit rate", look: "one", of: (history) => history.hit_rate }],
  }),
  new Chart({
    title: "TTFT", unit: "time to first token", format: seconds, least: 0.1,
    series: [
      { name: "p50", look: "one", of: (history) => history.ttft_p50_s },
      { name: "p99", look: "two", of: (history) => history.ttft_p99_s },
    ],
  }),
  new Chart({
    title: "Requests", unit: "per second", format: rate, least: 1,
    series: [{ name: "Requests", look: "one", of: (history) => history.requests_per_s }],
  }),
  new Chart({
    title: "Output tokens", unit: "per second", format: compact, least: 10,
    series: [{ name: "Output tokens", look: "one", of: (history) => history.output_tokens_per_s }],
  }),
];

/** The page's view. headers: of a request to the node. deletePin: called with a pin. */
export class View {
  constructor(headers, deletePin) {
    byId("charts").replaceChildren(...charts.map(({ node }) => node));
    this.engines = new Table(byId("engines"), {
      label: "engines-title", key: ({ id }) => id, empty: "No engine is known yet.",
      columns: [
        { head: "Engine", isHead: true, kind: "name", show: name(({ id, model }) => this.models.length > 1 ? `${id} · ${model}` : id, engineName) },
        { head: "State", kind: "state", show: (cell, engine) => stateCell(cell, engine, this.now_s) },
        { head: "Running", kind: "number", show: runningCell },
        { head: "Waiting", kind: "number extra", text: ({ waiting }) => count(waiting) },
        { head: "KV memory", kind: "meter", show: memoryCell },
        { head: "Hit rate", kind: "meter share", show: (cell, { hit_rate: share }) => shareCell(cell, share) },
      ],
    });
    this.served = new Table(byId("models"), {
      label: "models-title", key: ({ name: model }) => model, empty: "No engine has said what it serves.",
      columns: [
        { head: "Model", isHead: true, kind: "name", show: name(({ name: model }) => model) },
        { head: "Other names", kind: "text extra", text: ({ aliases, adapters }) => [...aliases, ...adapters].join(", ") || "–" },
        { head: "Ready", kind: "number", text: ({ ready, engines }) => `${count(ready)} of ${count(engines)}` },
        { head: "In flight", kind: "number", text: ({ in_flight: sent }) => count(sent) },
        { head: "Queued", kind: "number", text: ({ waiting }) => count(waiting) },
        { head: "Fallback", kind: "name extra", show: name(({ fallback }) => fallback ?? "–") },
        { head: "Hit rate", kind: "meter share", show: (cell, { hit_rate: share }) => shareCell(cell, share) },
      ],
    });
    this.events = new Table(byId("events"), {
      label: "events-title", empty: "Nothing has happened yet.",
      key: ({ time_s: time, kind, subject, text }) => [time, kind, subject, text].join("\n"),
      columns: [
        { head: "When", kind: "when", show: (cell, { time_s: at }) => whenCell(cell, at, this.now_s) },
        { head: "Event", isHead: true, show: eventCell },
        { head: "Of", kind: "name", show: name(({ subject }) => subject, engineName) },
        { head: "What", kind: "text", text: ({ text, times }) => text + (times > 1 ? ` (${count(times)} times)` : "") },
      ],
    });
    this.programs = new Table(byId("programs"), {
      label: "programs-title", key: ({ tenant, session }) => `${tenant}\n${session}`,
      empty: "No coding agent that names its session sent a request in the last hour.",
      columns: [
        { head: "Program", isHead: true, show: (cell, { session }) => shortId(cell, session) },
        { head: "Tenant", kind: "name extra", show: name(({ tenant }) => tenant) },
        { head: "Harness", kind: "name", show: name(({ harness }) => harness) },
        { head: "Agents", kind: "number", text: ({ agents }) => count(agents) },
        { head: "Sub-agents", kind: "number extra", text: ({ subagents }) => count(subagents) },
        { head: "Turns", kind: "number", text: ({ turns }) => count(turns) },
        { head: "Prompts", kind: "number extra", text: ({ prompt_tokens: tokens }) => compact(tokens) },
        { head: "Engines", kind: "number extra", text: ({ engines }) => count(engines) },
        { head: "Cached", kind: "meter share", show: (cell, { cached_share: share }) => shareCell(cell, share) },
        { head: "Last", kind: "number extra", text: ({ last_s: last }) => ago(this.now_s - last) },
      ],
    });
    this.sessions = new Table(byId("sessions"), {
      label: "sessions-title", key: ({ tenant, id }) => `${tenant}\n${id}`,
      empty: "No session sent a request in the last hour.",
      columns: [
        { head: "Session", isHead: true, show: (cell, { id }) => sessionCell(cell, id) },
        { head: "Tenant", kind: "name", show: name(({ tenant }) => tenant) },
        { head: "Agent", kind: "name extra", show: name(agentName) },
        { head: "Engine", kind: "name extra", show: name(({ engine }) => engine, engineName) },
        { head: "Turns", kind: "number extra", text: ({ turns }) => count(turns) },
        { head: "Prompt", kind: "number extra", text: ({ prompt_tokens: tokens }) => compact(tokens) },
        { head: "First token", kind: "number", show: firstTokenCell },
        { head: "Errors", kind: "number extra", show: errorsCell },
        { head: "Cached", kind: "meter share", show: (cell, { cached_share: share }) => shareCell(cell, share) },
        { head: "Last", kind: "number extra", text: ({ last_s: last }) => ago(this.now_s - last) },
      ],
    });
    this.search = new SessionSearch(headers, (rows, total) => this.sessions.show(rows, total, this.search.isOn ? "No session has these words." : undefined));
    this.pins = new Table(byId("pins"), {
      label: "pins-title", key: ({ prefix, worker }) => `${worker} ${prefix}`, empty: "Nothing is pinned.",
      columns: [
        { head: "Prefix", isHead: true, show: (cell, { prefix }) => shortId(cell, prefix) },
        { head: "Owner", kind: "name", show: name(({ owner }) => owner) },
        { head: "Session", kind: "extra", show: (cell, { session }) => sessionCell(cell, session) },
        { head: "Engine", kind: "name extra", show: name(({ worker }) => worker, engineName) },
        { head: "Tier", kind: "extra", text: ({ tier }) => tier ?? "device" },
        { head: "Tokens", kind: "number", text: ({ tokens }) => compact(tokens) },
        { head: "Reads", kind: "number extra", text: ({ hits }) => count(hits) },
        { head: "Time left", kind: "number", text: ({ left_s: left }) => span(left) },
        { head: "Delete", hidden: true, kind: "action", show: (cell, pin) => this.deleteCell(cell, pin, deletePin) },
      ],
    });
    this.budgets = new Table(byId("pin-budgets"), {
      label: "pins-title", key: ({ id }) => id, empty: "No engine has said what its pins may hold.",
      columns: [
        { head: "Engine", isHead: true, kind: "name", show: name(({ id }) => id, engineName) },
        { head: "Pin budget", kind: "meter", show: budgetCell },
        { head: "Marks declined", kind: "text", text: declinedText },
      ],
    });
    this.divergences = new Table(byId("divergences"), {
      label: "divergences-title", empty: "No prompt diverges from earlier ones.",
      key: ({ harness, model, where, kind, scope, part }) => [harness, model, where, kind, scope, part].join("\n"),
      columns: [
        { head: "Where", isHead: true, kind: "name", show: whereCell },
        { head: "What changes", kind: "text", show: changeCell },
        { head: "Between", kind: "extra", text: ({ scope }) => ({ session: "turns", fleet: "sessions", version: "versions" })[scope] ?? scope },
        { head: "Times", kind: "number extra", text: ({ times }) => count(times) },
        { head: "Tokens lost", kind: "number", text: ({ tokens, estimated }) => (estimated ? "~" : "") + compact(tokens) },
        { head: "Share", kind: "number extra", text: ({ share }) => percent(share) },
      ],
    });
    this.tenants = new Table(byId("tenants"), {
      label: "tenants-title", key: ({ name }) => name, empty: "No tenant sent a request yet.",
      columns: [
        { head: "Tenant", isHead: true, kind: "name", show: name(({ name: tenant }) => tenant || "(none)") },
        { head: "Requests", kind: "number", text: ({ requests }) => compact(requests) },
        { head: "Prompt tokens", kind: "number extra", text: ({ prompt_tokens: tokens }) => compact(tokens) },
        { head: "Cached", kind: "meter share", show: (cell, { cached_share: share }) => shareCell(cell, share) },
        { head: "Limits, per min", kind: "number", text: ({ limits }) => limitsText(limits) },
      ],
    });
    this.queue = new Table(byId("queue"), {
      label: "queue-title", key: ({ priority }) => priority, empty: "No request waits.",
      columns: [
        { head: "Priority", isHead: true, kind: "number", text: ({ priority }) => String(priority).replace("-", "−") },
        { head: "Waiting", kind: "number", text: ({ waiting }) => count(waiting) },
      ],
    });
  }

  show(state) {
    for (const [id, total] of Object.entries({ engines: state.engines.length, ...state.counts })) {
      setText(byId(`${id}-count`), total ? count(total) : "");
    }
    const { node, history, queue, counts, recent } = state;
    this.now_s = node.now_s;
    home = homeOf(state.engines);
    this.models = state.models.map(({ name }) => name);
    document.body.classList.toggle("one-model", this.models.length < 2);
    this.served.show(state.models, state.models.length);
    setText(byId("models-count"), count(state.models.length));
    setText(byId("model"), this.models.length > 1 ? this.models.join(", ") : node.model ?? "");
    document.title = `${node.model ? `${node.model} – ` : ""}sgl-ext`;
    const status = byId("node");
    status.hidden = false;
    status.dataset.state = { ok: "ready", degraded: "degraded", draining: "draining" }[node.status]
      ?? (state.engines.some((engine) => engine.state === "starting") ? "starting" : "unreachable");
    const [ready, wanted] = [node.engines_ready, node.engines_wanted];
    setText(status, { ok: "serving", degraded: `degraded: ${ready} of ${wanted} engines ready` }[node.status] ?? node.status);
    setText(byId("now-hit"), percent(recent.hit_rate));
    setText(byId("now-ttft"), seconds(recent.ttft_p50_s));
    setText(byId("now-ttft99"), `median; p99 ${seconds(recent.ttft_p99_s)}`);
    setText(byId("now-requests"), perSecond(rate(recent.requests_per_s), "/s"));
    setText(byId("now-flight"), `${count(node.in_flight)} in flight`);
    setText(byId("now-output"), perSecond(compact(recent.output_tokens_per_s), "tok/s"));
    setText(byId("now-queue"), count(queue.waiting));
    setText(byId("now-limit"), `waiting, of ${count(queue.limit)} at most`);
    setText(byId("now-engines"), `${ready} of ${wanted}`);
    setText(byId("now-uptime"), `ready; up ${span(node.now_s - node.started_s)}`);
    const failed = state.failures.reduce((sum, each) => sum + each.count, 0);
    const why = state.failures.slice(0, 3).map((each) => `${count(each.count)} × ${each.reason}`).join(" ");
    byId("failures").hidden = !failed;
    setText(byId("failures"), failed ? `${count(failed)} requests refused or failed in the last minute: ${why}` : "");
    for (const chart of charts) chart.show(history);
    this.engines.show(state.engines, state.engines.length);
    const events = [...state.events].reverse();
    this.events.show(events, events.length);
    this.programs.show(state.programs, counts.programs);
    if (!this.search.isOn) this.sessions.show(state.sessions, counts.sessions, "No session sent a request in the last hour.");
    this.search.tick();
    const budgets = state.engines.filter(({ pin_budget_tokens: budget }) => budget);
    this.budgets.show(budgets, budgets.length);
    this.pins.show(state.pins, counts.pins);
    this.divergences.show(state.divergences, counts.divergences);
    this.tenants.show(state.tenants, counts.tenants);
    this.queue.show(queue.by_priority, queue.by_priority.length);
    const { sgl_ext: ours, commit, sglang } = state.version;
    setText(byId("version"), `sgl-ext ${ours}${commit ? ` (${commit})` : ""}${sglang ? `, SGLang ${sglang}` : ""}`);
    this.shown_s = node.now_s;
  }

  /** When the figures are from, for a reader whom the connection has left. */
  get shownAt() {
    return this.shown_s === undefined ? null : clock(this.shown_s);
  }

  deleteCell(cell, pin, deletePin) {
    let button = cell.querySelector("button");
    if (!button) {
      button = element("button", { type: "button", class: "quiet" }, "Delete");
      button.setAttribute("aria-label", `Delete the pin ${pin.prefix.slice(0, HASH_DIGITS)} on ${pin.worker}`);
      button.addEventListener("click", () => deletePin(button.pin));
      cell.append(button);
    }
    button.pin = pin;
  }
}

/** How much of what pins may hold they hold. */
function budgetCell(cell, { kv, pin_budget_tokens: budget }) {
  const pinned = kv?.pinned_tokens ?? 0;
  const text = `${compact(pinned)} of ${compact(budget)}`;
  aside(cell, text);
  bar(cell, `${text} tokens of the pin budget`, [["pinned", Math.min(pinned / budget, 1)]]);
}

const DECLINED = {
  budget: "the prefix is longer than the budget",
  "owner share": "its tenant has its share of the budget",
  "less valuable": "what is pinned is worth more",
  "nothing to lock": "nothing of it is in the cache",
};

function declinedText({ pins_declined: declined }) {
  return declined.map(({ reason, marks }) => `${count(marks)}: ${DECLINED[reason] ?? reason}`).join("; ") || "none";
}

/** In a narrow window, also how many requests ended in an error. */
function firstTokenCell(cell, { ttft_s: ttft, errors }) {
  if (!cell.firstChild) cell.append(element("span"), element("span", { class: "note narrow bad" }));
  setText(cell.children[0], seconds(ttft));
  setText(cell.children[1], errors ? `${count(errors)} failed` : "");
}

function errorsCell(cell, { errors }) {
  if (!cell.firstChild) cell.append(element("span"));
  cell.firstChild.className = errors ? "bad" : "";
  setText(cell.firstChild, count(errors));
}

function whenCell(cell, atS, nowS) {
  setText(cell, ago(nowS - atS));
  cell.title = clock(atS);
}

function eventCell(cell, { kind, level }) {
  if (!cell.firstChild) cell.append(element("span", { class: "pill" }));
  cell.firstChild.dataset.level = level;
  setText(cell.firstChild, kind);
}

function whereCell(cell, { where, harness, model }) {
  if (!cell.firstChild) cell.append(element("code"), element("span", { class: "note" }));
  setText(cell.children[0], where);
  setText(cell.children[1], [harness, model].filter(Boolean).join(", "));
}

function changeCell(cell, { kind, means, advice, versions }) {
  if (!cell.firstChild) cell.append(element("span"), element("span", { class: "note" }));
  const sent = versions?.length ? ` (version ${versions.join(", ")})` : "";
  setText(cell.children[0], (means ?? kind) + sent);
  setText(cell.children[1], advice ? `Do: ${advice}.` : "");
}

function limitsText(limits) {
  if (!limits) return UNKNOWN;
  const told = ({ requests_per_minute: requests, tokens_per_minute: tokens }) =>
    [requests !== null && `${compact(requests)} req`, tokens !== null && `${compact(tokens)} tok`].filter(Boolean);
  const ofModels = Object.entries(limits.models ?? {}).map(([model, of]) => `${model}: ${told(of).join(", ")}`);
  return [told(limits).join(", "), ...ofModels].filter(Boolean).join("; ") || "none";
}
