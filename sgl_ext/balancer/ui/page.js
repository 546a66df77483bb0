// The page: the connection, the key, and the one thing that it changes, deleting a pin.

import { follow, reasonOf, Refused } from "./live.js";
import { compact } from "./format.js";
import { setText } from "./table.js";
import { Requests } from "./requests.js";
import { View } from "./view.js";

const byId = (id) => document.getElementById(id);
const KEPT = "sgl-ext key";

let key = sessionStorage.getItem(KEPT) ?? "";
let running = new AbortController();

const headers = () => (key ? { authorization: `Bearer ${key}` } : {});

let chosenPin = null;

const requests = new Requests(byId("requests"), headers);

const view = new View(headers, (pin) => {
  chosenPin = pin;
  const owner = pin.owner ? ` of ${pin.owner}` : "";
  setText(byId("delete-what"), `${compact(pin.tokens)} tokens${owner}, on ${pin.worker}.`);
  byId("delete").showModal();
});

// Not at "close": that event comes late, and may be of the time before.
byId("delete").addEventListener("submit", async (event) => {
  if (event.submitter.value === "delete") say(await deletePin(chosenPin));
});

async function deletePin({ prefix, worker }) {
  try {
    const query = new URLSearchParams({ prefix, worker });
    const response = await fetch(`/v1/pins?${query}`, { method: "DELETE", headers: headers(), credentials: "omit" });
    return response.ok ? "The pin was deleted." : `The pin was not deleted: ${await reasonOf(response)}`;
  } catch {
    return "The pin was not deleted: there is no connection.";
  }
}

/** Says it to everybody, also to who does not see it. */
function say(text) {
  const message = byId("message");
  setText(message, text);
  clearTimeout(message.timer);
  message.timer = setTimeout(() => setText(message, ""), 8000);
}

function connected(state) {
  byId("main").hidden = false;
  byId("gate").hidden = true;
  byId("key").hidden = !key;
  document.body.classList.remove("stale");
  setText(byId("connection"), "Live");
  byId("connection").dataset.state = "ready";
  view.show(state);
  requests.connected = true;
}

function lost(reason) {
  document.body.classList.add("stale");
  requests.connected = false;
  const from = view.shownAt ? ` The figures are from ${view.shownAt}.` : "";
  setText(byId("connection"), `${reason || "Connection lost"}, trying again.${from}`.replace(".,", ","));
  byId("connection").dataset.state = "unreachable";
}

function refused({ status, message }) {
  const wasGiven = Boolean(key);
  forget();
  requests.connected = false;
  byId("main").hidden = true;
  byId("node").hidden = true;
  byId("gate").hidden = false;
  byId("key").hidden = true;
  setText(byId("connection"), "Not connected");
  byId("connection").dataset.state = "";
  // Without keys the node tells where it may be administered from; a key would not help.
  const needsKey = status === 401 || wasGiven;
  byId("gate").classList.toggle("closed", !needsKey);
  setText(byId("gate").querySelector("h2"), needsKey ? "This node needs a key" : "This node does not show its state here");
  setText(byId("gate-reason"), wasGiven || status === 403 ? message : "");
  const { hostname, port } = location;
  const [here, there] = [port || 80, `127.0.0.1:${port || 80}`];
  setText(byId("tunnel"), `ssh -L ${here}:${there} ${hostname}`);
  setText(byId("tunnel-end"), `${location.protocol}//${there}/`);
  if (needsKey) byId("gate-key").focus();
}

function forget() {
  key = "";
  sessionStorage.removeItem(KEPT);
}

async function run() {
  running.abort();
  const { signal } = (running = new AbortController());
  try {
    await follow({ headers: headers(), onState: connected, onLost: lost, signal });
  } catch (error) {
    if (signal.aborted) return;
    if (!(error instanceof Refused)) throw error;
    refused(error);
  }
}

byId("gate").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("gate-key").value.trim();
  byId("gate-key").value = "";
  if (!/^[!-~]+$/.test(given)) {
    setText(byId("gate-reason"), "A key has letters, digits and signs, and no spaces.");
    return;
  }
  key = given;
  sessionStorage.setItem(KEPT, key);
  run();
});

byId("key").addEventListener("click", () => {
  forget();
  run();
});

run();
