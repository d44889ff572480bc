// The admin API, read-only: single answers, and streams of lines.

/** An error that the API answered with. A wrong filter has its place. */
export class Refused extends Error {
  constructor(status, body) {
    super(body.error ?? "status " + status);
    this.status = status;
    this.filter = body.filter;
    this.at = body.at ?? 0;
    this.end = body.end ?? 0;
  }
}

let node = ""; // of whose proxy all is asked; all nodes together without one

/** Says which node's proxy is asked, where the page is of several. */
export const askNode = (name) => (node = name);

function address(path, params) {
  const query = new URLSearchParams(node ? { proxy_node: node } : {});
  for (const [k, v] of Object.entries(params ?? {})) {
    if (v !== undefined && v !== null && v !== "") query.set(k, v);
  }
  const q = query.toString();
  return "/v1/" + path + (q ? "?" + q : "");
}

async function answer(path, params, signal) {
  const response = await fetch(address(path, params), { signal, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  let body = {};
  try {
    body = await response.json();
  } catch {
    // The status says it.
  }
  throw new Refused(response.status, body);
}

/** Asks for one object. */
export async function get(path, params, signal) {
  return (await answer(path, params, signal)).json();
}

let resting = false; // nothing is asked again until somebody goes on
const pausing = new EventTarget();

/** Stops all that follows and polls, or has it go on. */
export function rest(on) {
  if (resting === on) return;
  resting = on;
  pausing.dispatchEvent(new Event("change"));
}

const asleep = () => document.hidden || resting;

/** Calls f when the page is hidden, seen, paused or goes on. Returns how to stop that. */
function whenSeen(f) {
  document.addEventListener("visibilitychange", f);
  pausing.addEventListener("change", f);
  return () => {
    document.removeEventListener("visibilitychange", f);
    pausing.removeEventListener("change", f);
  };
}

const whole = 16 << 20; // characters of the longest line

/** Calls line with each object of a stream, until it ends or is aborted. */
async function read(path, params, signal, opened, line) {
  const response = await answer(path, params, signal);
  opened();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    if (rest.length > whole) throw new Error("a line of the stream is too long");
    for (const part of parts) {
      if (!part) continue;
      const object = JSON.parse(part);
      if (object.error && Object.keys(object).length === 1) throw new Refused(200, object);
      line(object);
    }
  }
}

/** Calls line with each object of an answer of lines. */
export const lines = (path, params, signal, line) => read(path, params, signal, () => {}, line);

/**
 * Follows a stream, and opens it again when it ends. While the page is hidden or paused it
 * is closed: a browser has six connections to a server, for all its tabs. trouble is told
 * of each error, and with null when the stream is open. Returns how to stop it.
 */
export function follow(path, params, line, trouble = () => {}) {
  let stopped = false;
  let running = null;
  let timer = 0;
  let pause = 500;
  const stop = () => {
    clearTimeout(timer);
    running?.abort();
    running = null;
  };
  const start = async () => {
    if (stopped || asleep() || running) return;
    const control = new AbortController();
    running = control;
    try {
      await read(path, params, control.signal, () => {
        pause = 500;
        trouble(null);
      }, line);
      if (!control.signal.aborted) trouble(new Error("the stream has ended"));
    } catch (error) {
      if (control.signal.aborted) return;
      trouble(error);
      if (error instanceof Refused && error.status === 400) return; // it would be wrong again
    } finally {
      if (running === control) running = null;
    }
    if (control.signal.aborted) return;
    timer = setTimeout(start, pause);
    pause = Math.min(pause * 2, 8000);
  };
  const unwatch = whenSeen(() => (asleep() ? stop() : start()));
  start();
  return () => {
    stopped = true;
    unwatch();
    stop();
  };
}

/**
 * Calls ask again and again while the page is seen and not paused, with a pause after each answer:
 * rest ms, but at least ten times what the answer took. Returns how to stop it, and to
 * ask at once.
 */
export function poll(rest, ask) {
  let stopped = false;
  let timer = 0;
  let running = null;
  let again = false;
  const start = async () => {
    clearTimeout(timer);
    if (stopped || document.hidden) return;
    if (running) {
      again = true;
      return;
    }
    const control = new AbortController();
    running = control;
    again = false;
    const began = performance.now();
    try {
      await ask(control.signal);
    } finally {
      running = null;
      const pause = again ? 0 : Math.max(rest, 10 * (performance.now() - began));
      if (!stopped && !asleep()) timer = setTimeout(start, Math.min(pause, 30000));
    }
  };
  const unwatch = whenSeen(() => {
    if (!asleep()) return start();
    clearTimeout(timer);
    running?.abort(); // a late answer would change what is paused
  });
  start();
  return {
    now: start,
    stop() {
      stopped = true;
      clearTimeout(timer);
      running?.abort();
      unwatch();
    },
  };
}
