// A search among all sessions of the last hour. The live state has the latest of them; for words, or
// for another order, the node is asked, at most once in a while.

import { setText } from "./table.js";
import { count } from "./format.js";

const EVERY_MS = 2000;
const byId = (id) => document.getElementById(id);

export class SessionSearch {
  /** headers: of a request to the node. onFound: called with the sessions and how many there are. */
  constructor(headers, onFound) {
    this.headers = headers;
    this.onFound = onFound;
    this.words = byId("sessions-search");
    this.sort = byId("sessions-sort");
    this.askedMs = -EVERY_MS;
    for (const field of [this.words, this.sort]) {
      field.addEventListener("input", () => {
        clearTimeout(this.typing);
        this.typing = setTimeout(() => this.ask(), 200);
      });
    }
  }

  /** Whether what is shown is what it finds, and not the live state. */
  get isOn() {
    return Boolean(this.words.value.trim()) || this.sort.value !== "last";
  }

  /** Call it with each state. */
  tick() {
    if (!this.isOn) setText(byId("sessions-note"), "");
    else if (performance.now() - this.askedMs >= EVERY_MS) this.ask();
  }

  async ask() {
    if (!this.isOn) return;
    this.askedMs = performance.now();
    const number = (this.number = (this.number ?? 0) + 1);
    const query = new URLSearchParams({ search: this.words.value.trim(), sort: this.sort.value });
    try {
      const response = await fetch(`/sgl_ext/sessions?${query}`, {
        headers: this.headers(), cache: "no-store", credentials: "omit",
      });
      if (!response.ok || number !== this.number || !this.isOn) return;
      const { sessions, count: found, of } = await response.json();
      this.onFound(sessions, found);
      setText(byId("sessions-note"), `${count(found)} of ${count(of)}`);
    } catch {
      // The page says that the connection is lost.
    }
  }
}
