// The live stream: one connection, opened again when it is lost. It uses `fetch` and not
// EventSource, which could not send a key.

const SILENT_MS = 10_000;
const LONGEST_PAUSE_MS = 10_000;

/** A refusal that another try does not change, with the server's reason. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The message of an error's body, in whatever protocol's shape. */
export async function reasonOf(response) {
  try {
    const { error } = await response.json();
    return error?.message ?? `HTTP ${response.status}`;
  } catch {
    return `HTTP ${response.status}`;
  }
}

/**
 * Follows the stream until it is refused, and throws that.
 *
 * headers: of the request. onState: called with each document. onLost: called with the server's reason,
 * if it gave one, before another try. signal: ends it.
 */
export async function follow({ headers, onState, onLost, signal }) {
  let pause = 500;
  while (!signal.aborted) {
    await shown(signal);
    let reason = "";
    try {
      reason = await receive(headers, signal, (state) => {
        pause = 500;
        onState(state);
      });
    } catch (error) {
      if (error instanceof Refused || signal.aborted) throw error;
    }
    if (document.hidden) continue;
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    onLost(reason);
    await waited(pause, signal);
  }
}

/** Receives documents until the connection ends; returns the server's reason, "" if it gave none. */
async function receive(headers, signal, onState) {
  const connection = new AbortController();
  const end = () => connection.abort();
  signal.addEventListener("abort", end);
  // What nobody sees costs the node nothing.
  const hide = () => document.hidden && end();
  document.addEventListener("visibilitychange", hide);
  let silence = setTimeout(end, SILENT_MS);
  try {
    const response = await fetch("/sgl_ext/live", {
      headers, cache: "no-store", credentials: "omit", signal: connection.signal,
    });
    if (response.status === 401 || response.status === 403) {
      throw new Refused(response.status, await reasonOf(response));
    }
    if (!response.ok) return await reasonOf(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return "";
      text += value;
      for (let at; (at = text.indexOf("\n\n")) >= 0; text = text.slice(at + 2)) {
        const data = text.slice(0, at).split("\n").find((line) => line.startsWith("data: "));
        if (!data || !text.startsWith("event: state\n")) continue;
        clearTimeout(silence);
        silence = setTimeout(end, SILENT_MS);
        try {
          onState(JSON.parse(data.slice(6)));
        } catch (error) {
          reportError(error); // a fault of the page, which the connection is not to blame for
        }
      }
    }
  } finally {
    clearTimeout(silence);
    signal.removeEventListener("abort", end);
    document.removeEventListener("visibilitychange", hide);
  }
}

/** Waits until the page is visible. */
function shown(signal) {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => {
    const settle = () => {
      document.removeEventListener("visibilitychange", settle);
      resolve();
    };
    document.addEventListener("visibilitychange", settle);
    signal.addEventListener("abort", settle, { once: true });
  });
}

function waited(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}
