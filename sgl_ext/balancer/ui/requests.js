// Past requests, by the request log: a search whose words are in the address, so that a session's
// row, or another page, can link to it. It asks once in a while, and only while it can be seen.

import { reasonOf } from "./live.js";
import { Table, element, setText } from "./table.js";
import { clock, count, percent, seconds, shortName } from "./format.js";

const EVERY_MS = 5000;
const LIMIT = 100;
const FIELDS = ["session", "model", "status", "slow"];

/** The address of the requests of a session. */
export const linkTo = (session) => `#requests?${new URLSearchParams({ session })}`;

function outcomeCell(cell, { status, outcome }) {
  const isBad = status >= 400 || ["cut", "failed", "rejected"].includes(outcome);
  const text = [status ?? "–", outcome === "complete" ? "" : outcome].filter(Boolean).join(" ");
  if (!cell.firstChild) cell.append(element("span"));
  cell.firstChild.className = isBad ? "bad" : "";
  setText(cell.firstChild, text);
}

function sessionCell(cell, { session }) {
  if (cell.title === (session ?? "")) return;
  cell.title = session ?? "";
  const shown = element("code", {}, shortName(session ?? "–"));
  cell.replaceChildren(session ? element("a", { href: linkTo(session) }, shown) : shown);
}

export class Requests {
  /** place: the section. headers: those of a request to the node. */
  constructor(place, headers) {
    this.place = place;
    this.headers = headers;
    this.form = place.querySelector("form");
    this.note = place.querySelector("[role=status]");
    this.isSeen = false;
    this.isConnected = undefined; // not known yet
    const where = place.querySelector("#requests-table");
    where.hidden = true; // until the first answer
    this.table = new Table(where, {
      label: "requests-title", key: ({ id, time }) => `${time} ${id}`, empty: "No request was found.",
      columns: [
        { head: "Ended", isHead: true, kind: "number", text: ({ time }) => clock(time) },
        { head: "Status", show: outcomeCell },
        { head: "Tenant", kind: "extra one-line", text: ({ tenant }) => tenant || "–" },
        { head: "Model", kind: "extra one-line of-models", text: ({ served_model: model }) => model ?? "–" },
        { head: "Session", kind: "extra", show: sessionCell },
        { head: "First token", kind: "number extra", text: ({ ttft_ms: ms }) => seconds(ms ? ms / 1000 : null) },
        { head: "Cached", kind: "number extra", text: ({ cached_tokens: cached, prompt_tokens: prompt }) => percent(prompt && cached !== null ? cached / prompt : null) },
        { head: "What took its time", kind: "text note", text: ({ sentence }) => sentence },
      ],
    });
    this.form.addEventListener("input", () => this.search());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("reset", () => setTimeout(() => this.search()));
    addEventListener("hashchange", () => this.readAddress());
    document.addEventListener("visibilitychange", () => this.ask());
    new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
      this.ask();
    }).observe(place);
  }

  /** Fills the form from the address, if that is one of this view. */
  readAddress() {
    const [view, words] = location.hash.slice(1).split("?", 2);
    if (view !== "requests") return;
    const asked = new URLSearchParams(words);
    for (const name of FIELDS) {
      const field = this.form.elements[name];
      if (field.type === "checkbox") field.checked = asked.get(name) === "1";
      else field.value = asked.get(name) ?? "";
    }
    const title = this.place.querySelector("h2");
    title.scrollIntoView({ block: "start" });
    title.focus({ preventScroll: true });
    this.ask(true);
  }

  query() {
    const { session, model, status, slow } = this.form.elements;
    const query = new URLSearchParams();
    if (session.value.trim()) query.set("session", session.value.trim());
    if (model.value.trim()) query.set("model", model.value.trim());
    if (status.value) query.set("status", status.value);
    if (slow.checked) query.set("slow", "1");
    return query;
  }

  /** The form has changed: the address follows it. */
  search() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => {
      history.replaceState(null, "", `#requests?${this.query()}`);
      this.ask(true);
    }, 200);
  }

  /** Asks now if it is seen, and again after a while. isUrgent: also if it is not. */
  async ask(isUrgent = false) {
    clearTimeout(this.next);
    if (document.hidden || !(this.isSeen || isUrgent) || !this.isConnected) return;
    const number = (this.number = (this.number ?? 0) + 1);
    const query = this.query();
    query.set("limit", LIMIT);
    try {
      const response = await fetch(`/sgl_ext/requests?${query}`, {
        headers: this.headers(), cache: "no-store", credentials: "omit",
      });
      if (number !== this.number) return; // another search is newer
      if (response.ok) this.show(await response.json());
      else setText(this.note, await reasonOf(response));
    } catch {
      setText(this.note, "There is no connection.");
    }
    if (number === this.number) this.next = setTimeout(() => this.ask(), EVERY_MS);
  }

  /** The page's connection is there, or is not: without one nothing is asked. */
  set connected(isConnected) {
    const began = isConnected && !this.isConnected;
    const isFirst = began && this.isConnected === undefined;
    this.isConnected = isConnected;
    if (isFirst) this.readAddress();
    if (began) this.ask();
  }

  show({ requests, found, groups, searched }) {
    this.place.querySelector("#requests-table").hidden = false;
    this.table.show(requests, Math.max(found, requests.length));
    const refused = groups.map(({ tenant, status, error, outcome, requests: times }) =>
      `${count(times)} × ${status ?? ""} ${tenant ? `of ${tenant}` : ""}: ${error ?? outcome}`.replace(/\s+/g, " ").replace(" :", ":"));
    const cut = searched.complete || !searched.back_to_s ? "" : `Read back to ${clock(searched.back_to_s)}.`;
    setText(this.note, [refused.slice(0, 3).join("; "), cut].filter(Boolean).join(". "));
  }
}
